"""e4m3 (OCP fp8) values as raw bytes: decoding and encoding inside a kernel, on any target.

Decoding is exact. Encoding rounds to nearest even and is equal to torch's conversion for
|x| <= 448; larger values become NaN as in torch, and so do NaNs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(code, NATIVE: tl.constexpr):
    """uint8 codes to their fp16 values, exactly; the e4m3 NaN stays a NaN.

    Without a native conversion: the seven magnitude bits are fp16's exponent and mantissa moved
    by 7 with a bias of 7 where fp16 has 15, so a factor of 2^8 puts them right, subnormals too.
    """
    if NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = code.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value.to(tl.float32)).to(tl.float16)
    return value


@triton.jit
def encode(value):
    """fp32 values to uint8 codes, round to nearest even."""
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: keep three mantissa bits, then move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9: adding 2^23 rounds the multiple of it to an integer.
    steps = magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    small = steps.to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, small, normal)
    # 464 is half way between 448 and what would come next.
    code = tl.where(magnitude > 0x43E80000, 0x7F, code)
    return (sign | code).to(tl.uint8)
