"""What lies around the matrix products on sm90: the query, the online softmax, its end.

Shared by `attend_wide` and `attend_narrow`, whose scores have heads in different dims: `HEAD` and
`TOKEN` say which is which.

fp8 records arrive as fp16 values times `2^shift` of their own, and the query is made fp16 times
`stretch`, a power of two of each head. With `u` the score in powers of two, a record's weight in
the output is `2^(u + shift - best)`, `best` the running maximum of `u + shift`, and its weight in
the denominator `2^(u - best)`: no weight is above one, whatever the records' magnitudes.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from topkapi.kernels.hopper.gather import (
    GROUP_DIM,
    GROUPS,
    GROWN,
    LATENT_DIM,
    ROPE_DIM,
    ROWS,
    SHIFT,
    SHRUNK,
    exponent_of,
    power_of_two,
)

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# Stands for -inf as a running maximum: differences of it are never NaN.
LOWEST = tl.constexpr(-1.0e30)


@gluon.jit
def zero_unseen(anything):
    """0, unknown to the compiler: operands at constant places would be kept in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [anything], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _dims(q, row, head_block, H, BLOCK_H: gl.constexpr, FIRST: gl.constexpr,
          DIMS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Dims `FIRST : FIRST + DIMS` of BLOCK_H heads; zero past H."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    WIDTH: gl.constexpr = LATENT_DIM + ROPE_DIM
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, ROW))
    dim = FIRST + gl.arange(0, DIMS, layout=gl.SliceLayout(0, ROW))
    pointers = q + row * (H * WIDTH) + head[:, None] * WIDTH + dim[None, :]
    return gl.load(pointers, mask=(head < H)[:, None], other=0.0)


@gluon.jit
def load_query(q, row, head_block, latent, rope, stretches, H, FP8: gl.constexpr,
               WARPS: gl.constexpr):  # fmt: skip
    """The heads' query into shared memory: `latent [BLOCK_H, 512]`, `rope [BLOCK_H, 64]`.

    With fp8 records: fp16 below 2^9, to be multiplied by `stretches [BLOCK_H]`.
    """
    BLOCK_H: gl.constexpr = latent.shape[0]
    if FP8:
        value = _dims(q, row, head_block, H, BLOCK_H, LATENT_DIM, ROPE_DIM, WARPS)
        top = gl.max(gl.abs(value.to(gl.float32)), axis=1)
        for part in gl.static_range(GROUPS):
            value = _dims(q, row, head_block, H, BLOCK_H, part * GROUP_DIM, GROUP_DIM, WARPS)
            top = gl.maximum(top, gl.max(gl.abs(value.to(gl.float32)), axis=1))
        exponent = exponent_of(top) - 8
        stretches.store(power_of_two(exponent))
        shrink = power_of_two(-exponent)[:, None]
    for part in gl.static_range(GROUPS):
        value = _dims(q, row, head_block, H, BLOCK_H, part * GROUP_DIM, GROUP_DIM, WARPS)
        if FP8:
            value = value.to(gl.float32) * shrink
        latent.slice(part * GROUP_DIM, GROUP_DIM, dim=1).store(value.to(latent.dtype))
    value = _dims(q, row, head_block, H, BLOCK_H, LATENT_DIM, ROPE_DIM, WARPS)
    if FP8:
        value = value.to(gl.float32) * shrink
    rope.store(value.to(rope.dtype))


@gluon.jit
def exponents(score, stretch, tokens, stage, scale, cap, HEAD: gl.constexpr, HAS_CAP: gl.constexpr,
              FP8: gl.constexpr):  # fmt: skip
    """Of each weight in the output, up to the rate that is returned, too: `u + shift`, or -inf."""
    TOKEN: gl.constexpr = 1 - HEAD
    LAYOUT: gl.constexpr = gl.SliceLayout(HEAD, score.type.layout)
    rate = scale * LOG2E
    if FP8:
        stretch = stretch * (2.0 * LOG2E * scale / cap) if HAS_CAP else stretch * rate
        grown = tokens.index(ROWS * stage + GROWN).load(LAYOUT)
        score = score * gl.expand_dims(stretch, TOKEN) * gl.expand_dims(grown, HEAD)
    elif HAS_CAP:
        score = score * (2.0 * LOG2E * scale / cap)
    if HAS_CAP:
        # cap * tanh(x) = cap - 2 * cap / (exp(2 * x) + 1)
        score = (cap - 2.0 * cap / (gl.exp2(score) + 1.0)) * LOG2E
    if FP8 or HAS_CAP:
        rate = 1.0
    shift = tokens.index(ROWS * stage + SHIFT).load(LAYOUT)
    return score + gl.expand_dims(shift, HEAD), rate


@gluon.jit
def counted(weight, tokens, stage, HEAD: gl.constexpr, FP8: gl.constexpr):
    """Weights in the denominator, of weights in the output."""
    if FP8:
        shrunk = tokens.index(ROWS * stage + SHRUNK).load(gl.SliceLayout(HEAD, weight.type.layout))
        weight = weight * gl.expand_dims(shrunk, HEAD)
    return weight


@gluon.jit
def close(total, best, sinks, head, H, SPLIT: gl.constexpr,
          HAS_SINKS: gl.constexpr):  # fmt: skip
    """What sums are to be multiplied by, and lse (in powers of two where the row is split)."""
    seen = total != 0.0
    denominator = total
    if HAS_SINKS and not SPLIT:
        sink = gl.load(sinks + head, mask=head < H, other=0.0).to(gl.float32)
        denominator += gl.exp2(sink * LOG2E - best)
    lse = gl.where(seen, best + gl.log2(total), float("-inf"))
    if not SPLIT:
        lse = lse * LN2
    return gl.where(seen, 1.0 / denominator, 0.0), lse
