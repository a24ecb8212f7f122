"""Powers of two, by which fp16 operands are kept in range exactly; for kernels in Gluon, too."""

from __future__ import annotations

import triton
import triton.language as tl

# Magnitudes all below 2^LEAST count as zeros; fp16 overflows where they are far above 2^MOST.
LEAST = tl.constexpr(-60)
MOST = tl.constexpr(120)


@triton.jit
def power_of_two(exponent):
    """`2^exponent` of int32 exponents between -126 and 127, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(value):
    """`floor(log2(value))` of fp32 values that are not negative, within LEAST .. MOST."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> 23) - 127, LEAST), MOST)
