"""What lies around the matrix products on sm90: the query, the online softmax, its end.

Shared by the four `attend_*` kernels, whose scores have heads in different dims: `HEAD` says in
which.

fp8 latents arrive as fp16 values times `2^shift` of their own, and the query is made fp16 times
`stretch`, a power of two of each head, by which its rope is divided; ropes of records stay what
they are. With `u` the score in powers of two, a record's weight in the output is
`2^(u + shift - best)`, `best` the running maximum of `u + shift`, and its weight in the denominator
`2^(u - best)`: no weight is above one, whatever the records' magnitudes. In all but `attend_narrow`
`best` may lie SLACK behind that maximum, and no weight is above `2^SLACK`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from topkapi.kernels.hopper.gather import (
    GROUP_DIM,
    GROUPS,
    LATENT_DIM,
    ROPE_DIM,
)
from topkapi.kernels.triton.powers_of_two import exponent_of, power_of_two
from topkapi.kernels.triton.softmax import LN2, LOG2E

# In one instruction; `gl.log2` takes 30 for the last bit.
LOG2 = tl.constexpr("lg2.approx.f32 $0, $1;")
# How far, in powers of two, a score may exceed the maximum that weights are relative to before that
# is raised: fp16 weights end at 2^16.
SLACK = tl.constexpr(8.0)
# Dims of the output that one of two sides computes.
HALF_DIM = tl.constexpr(256)


@gluon.jit
def start_query(q, row, head_block, latent, rope, H):
    """Start copying the heads' query into `latent [BLOCK_H, 512]`, `rope [BLOCK_H, 64]`.

    As it is, in q's dtype; zero past H. The same warps finish it.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
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
def wait_for_query():
    """Until what `start_query` copied is there, for the warps that started it."""
    async_copy.wait_group(0)
    gl.thread_barrier()


@gluon.jit
def shrink_query(q, latent, rope, stretches):
    """For fp8 records, in its place: the latent in fp16 below 2^9, to be multiplied by `stretches`.

    `stretches [BLOCK_H]` are powers of two, one a head. The rope stays in q's dtype and is divided
    by the same, so that both parts' products may be added.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    given = latent._reinterpret(q.dtype.element_ty, latent.shape, latent.layout)
    top = _top(given.slice(0, GROUP_DIM, dim=1).load(ROW))
    for part in gl.static_range(1, GROUPS):
        top = gl.maximum(top, _top(given.slice(part * GROUP_DIM, GROUP_DIM, dim=1).load(ROW)))
    exponent = exponent_of(top) - 8
    stretches.store(power_of_two(exponent))
    shrink = power_of_two(-exponent)[:, None]
    rope.store((rope.load(ROW).to(gl.float32) * shrink).to(rope.dtype))
    for part in gl.static_range(GROUPS):
        value = given.slice(part * GROUP_DIM, GROUP_DIM, dim=1).load(ROW).to(gl.float32)
        latent.slice(part * GROUP_DIM, GROUP_DIM, dim=1).store((value * shrink).to(latent.dtype))


@gluon.jit
def _capped(score, cap):
    """`cap * tanh(x)` times `log2(e)`, of `2 * x * log2(e)`."""
    return (cap - 2.0 * cap / (gl.exp2(score) + 1.0)) * LOG2E


@gluon.jit
def exponents(score, shift, scale, cap, HEAD: gl.constexpr, HAS_CAP: gl.constexpr):
    """Of each weight, up to the rate that is returned, too: `u`, or -inf where `shift` is that."""
    rate = scale * LOG2E
    if HAS_CAP:
        score = _capped(score * (2.0 * LOG2E * scale / cap), cap)
        rate = 1.0
    return score + gl.expand_dims(shift, HEAD), rate


@gluon.jit
def exponents_fp8(score, stretch, shift, scale, cap, HEAD: gl.constexpr,
                  HAS_CAP: gl.constexpr):  # fmt: skip
    """Of each weight in the output: `u + shift`, from a product with what `shrink_query` left.

    `shift` is -inf where no slot is.
    """
    rate = 2.0 * LOG2E * scale / cap if HAS_CAP else scale * LOG2E
    score = score * gl.expand_dims(stretch * rate, 1 - HEAD)
    if HAS_CAP:
        score = _capped(score, cap)
    return score + gl.expand_dims(shift, HEAD)


@gluon.jit
def counted(weight, grown, HEAD: gl.constexpr):
    """Of fp8 records: weights in the denominator, `2^-shift` times those in the output.

    `grown` is `2^shift`.
    """
    # 1 / grown, exactly.
    shrunk = ((254 << 23) - grown.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    return weight * gl.expand_dims(shrunk, HEAD)


@gluon.jit
def share_weights(score, rate, best, weights, bests, raises, ready):
    """Of two sides, each of which scores every other tile: this one's weights, for both.

    Returns weights and what 64 heads' are relative to: `best`, or the tile's maximum where that is
    more than SLACK above. Rarely anything moves, and the sums need no factor then; noted in `raises
    [4]`, a warp's heads each.
    """
    top = gl.max(score, axis=1) * rate
    new_best = gl.where(top > best + SLACK, top, best)
    by_warp = gl.reshape(gl.where(new_best != best, 1, 0), [4, best.shape[0] // 4])
    raises.store(gl.max(by_warp, axis=1))
    weight = gl.exp2(score * rate - new_best[:, None])
    weights.store(weight.to(weights.dtype))
    bests.store(new_best)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)
    return weight, new_best


@gluon.jit
def raised(raises):
    """Whether a group noted that maxima moved; the same in all warps."""
    return gl.max(raises.load(gl.BlockedLayout([4], [32], [4], [0])), axis=0) > 0


@gluon.jit
def rescale(sums, total, best, new_best, OUT: gl.constexpr):
    """Sums and total relative to `new_best`."""
    shrink = gl.exp2(best - new_best)
    return sums * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None], total * shrink


@gluon.jit
def total_of_both(total, sides, closed, SIDE: gl.constexpr, HEADS: gl.constexpr):
    """The denominator of both sides' tiles, when both have used all of them."""
    sides.index(SIDE).store(total)
    gl.thread_barrier()
    mbarrier.arrive(closed.index(SIDE), count=1)
    mbarrier.wait(closed.index(1 - SIDE), 0)
    return total + sides.index(1 - SIDE).load(HEADS)


@gluon.jit
def close(total, best, sinks, head, H, SPLIT: gl.constexpr,
          HAS_SINKS: gl.constexpr):  # fmt: skip
    """What sums are to be multiplied by, and lse (in powers of two where the row is split)."""
    seen = total != 0.0
    denominator = total
    if HAS_SINKS and not SPLIT:
        sink = gl.load(sinks + head, mask=head < H, other=0.0).to(gl.float32)
        denominator += gl.exp2(sink * LOG2E - best)
    total = gl.inline_asm_elementwise(LOG2, "=f,f", [total], dtype=gl.float32, is_pure=True, pack=1)
    lse = gl.where(seen, best + total, float("-inf"))
    if not SPLIT:
        lse = lse * LN2
    return gl.where(seen, 1.0 / denominator, 0.0), lse


@gluon.jit
def store_half(
    sums, total, best, sinks, out, lse, row, head_block, rows_stride, room, HEADS: gl.constexpr,
    OUT: gl.constexpr, FIRST_DIM: gl.constexpr, H, SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Half of the output's dims, and with the first half lse.

    By way of `room`, 64 KB of shared memory: stored from where they are computed, each row's dims
    would come in pieces of 16 bytes.
    """
    BLOCK_H: gl.constexpr = sums.shape[0]
    PART: gl.constexpr = BLOCK_H // 4
    DTYPE: gl.constexpr = out.dtype.element_ty
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    LINES: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [1, 32], [4, 1], [1, 0])
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=HEADS)
    inverse, logarithm = close(total, best, sinks, head, H, SPLIT, HAS_SINKS)
    place = gl.program_id(1).to(gl.int64) * rows_stride + row * H
    if FIRST_DIM == 0:
        gl.store(lse + place + head, logarithm, mask=head < H)
    sums = sums * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=2)
    room = room._reinterpret(DTYPE, [BLOCK_H, HALF_DIM], SHARED)
    room.store(sums.to(DTYPE))
    gl.thread_barrier()
    dim = FIRST_DIM + gl.arange(0, HALF_DIM, layout=gl.SliceLayout(0, LINES))
    for part in gl.static_range(4):
        head = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, LINES))
        head = head_block * BLOCK_H + head
        pointers = out + (place + head)[:, None] * LATENT_DIM + dim[None, :]
        value = room.slice(part * PART, PART, dim=0).load(LINES)
        gl.store(pointers, value, mask=(head < H)[:, None])
