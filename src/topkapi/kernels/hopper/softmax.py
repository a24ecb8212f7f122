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
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from topkapi.kernels.hopper.gather import (
    FAINT,
    GROUP_DIM,
    GROUPS,
    LATENT_DIM,
    ROPE_DIM,
    exponent_of,
    inverse_of,
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
def start_query(q, row, head_block, latent, rope, H, WARPS: gl.constexpr):
    """Start copying the heads' query into `latent [BLOCK_H, 512]`, `rope [BLOCK_H, 64]`.

    As it is, in q's dtype; zero past H. The same warps finish it.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    BLOCK_H: gl.constexpr = latent.shape[0]
    WIDTH: gl.constexpr = LATENT_DIM + ROPE_DIM
    latent = latent._reinterpret(q.dtype.element_ty, latent.shape, latent.layout)
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, ROW))
    first = (q + row * (H * WIDTH) + head * WIDTH)[:, None]
    there = (head < H)[:, None]
    dim = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, ROW))
    async_copy.async_copy_global_to_shared(latent, first + dim[None, :], mask=there)
    dim = LATENT_DIM + gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, ROW))
    async_copy.async_copy_global_to_shared(rope, first + dim[None, :], mask=there)
    async_copy.commit_group()


@gluon.jit
def _top(value):
    return gl.max(gl.abs(value.to(gl.float32)), axis=1)


@gluon.jit
def finish_query(q, latent, rope, stretches, FP8: gl.constexpr, WARPS: gl.constexpr):
    """What `start_query` copied, once it is there.

    With fp8 records the latent becomes fp16 below 2^9, to be multiplied by `stretches [BLOCK_H]`;
    the rope is divided by them.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    async_copy.wait_group(0)
    gl.thread_barrier()
    if FP8:
        given = latent._reinterpret(q.dtype.element_ty, latent.shape, latent.layout)
        top = _top(given.slice(0, GROUP_DIM, dim=1).load(ROW))
        for part in gl.static_range(1, GROUPS):
            top = gl.maximum(top, _top(given.slice(part * GROUP_DIM, GROUP_DIM, dim=1).load(ROW)))
        exponent = exponent_of(top, FAINT) - 8
        stretches.store(power_of_two(exponent))
        shrink = power_of_two(-exponent)[:, None]
        for part in gl.static_range(GROUPS):
            value = given.slice(part * GROUP_DIM, GROUP_DIM, dim=1).load(ROW).to(gl.float32)
            latent.slice(part * GROUP_DIM, GROUP_DIM, dim=1).store(
                (value * shrink).to(latent.dtype)
            )
        rope.store((rope.load(ROW).to(gl.float32) * shrink).to(rope.dtype))


@gluon.jit
def rope_in_units(score, tokens, stage, HEAD: gl.constexpr):
    """Products of ropes in the units of products of fp8 latents, which are added to them."""
    grown = tokens.index(stage).load(gl.SliceLayout(HEAD, score.type.layout))
    return score * gl.expand_dims(inverse_of(grown), HEAD)


@gluon.jit
def exponents(score, stretch, tokens, stage, scale, cap, HEAD: gl.constexpr, HAS_CAP: gl.constexpr,
              FP8: gl.constexpr):  # fmt: skip
    """Of each weight in the output, up to the rate that is returned, too: `u + shift`, or -inf."""
    TOKEN: gl.constexpr = 1 - HEAD
    LAYOUT: gl.constexpr = gl.SliceLayout(HEAD, score.type.layout)
    grown = tokens.index(stage).load(LAYOUT)
    rate = scale * LOG2E
    shift = gl.where(grown != 0.0, 0.0, float("-inf"))
    if FP8:
        stretch = stretch * (2.0 * LOG2E * scale / cap) if HAS_CAP else stretch * rate
        score = score * gl.expand_dims(stretch, TOKEN) * gl.expand_dims(grown, HEAD)
        exponent = (grown.to(gl.int32, bitcast=True) >> 23) - 127
        shift = gl.where(grown != 0.0, exponent.to(gl.float32), float("-inf"))
    elif HAS_CAP:
        score = score * (2.0 * LOG2E * scale / cap)
    if HAS_CAP:
        # cap * tanh(x) = cap - 2 * cap / (exp(2 * x) + 1)
        score = (cap - 2.0 * cap / (gl.exp2(score) + 1.0)) * LOG2E
    if FP8 or HAS_CAP:
        rate = 1.0
    return score + gl.expand_dims(shift, HEAD), rate


@gluon.jit
def counted(weight, tokens, stage, HEAD: gl.constexpr, FP8: gl.constexpr):
    """Weights in the denominator, of weights in the output: times `2^-shift`."""
    if FP8:
        grown = tokens.index(stage).load(gl.SliceLayout(HEAD, weight.type.layout))
        weight = weight * gl.expand_dims(inverse_of(grown), HEAD)
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
