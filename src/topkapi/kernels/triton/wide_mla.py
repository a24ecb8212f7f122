"""Attention over selected latents for 64 heads at a time on sm90, in Gluon (Triton's lower level).

The formula, arguments and results are those of `sparse_mla._attend`. What differs is who waits for
whom: there, the compiler's pipeline issues the gather of the next tile after this tile's products,
and computes the scores once in each warp group. Here

    wait for tile i | issue the gather of tile i + 1 | scores of tile i, half of the tokens in each
    warp group | softmax | weights through shared memory | output, half of the dims in each

so that a whole iteration covers the gather, which at 64 heads is what bounds the kernel (L2).
Shared memory: the query, two tiles of 64 records and the weights, 224 of 227 KB.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)


@gluon.jit
def _gather(
    kv, slots, first, end, latent_tile, rope_tile, L: gl.constexpr, P: gl.constexpr,
    W: gl.constexpr, N: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Issue the copies of the N records named by `slots[first:]`, zeros where there is none."""
    place = first + gl.arange(0, N, layout=gl.SliceLayout(1, LATENT))
    slot = gl.load(slots + place, mask=place < end, other=-1)
    record = kv + gl.maximum(slot, 0).to(gl.int64) * W
    dim = gl.arange(0, L, layout=gl.SliceLayout(0, LATENT))
    async_copy.async_copy_global_to_shared(
        latent_tile, record[:, None] + dim[None, :], mask=(slot >= 0)[:, None]
    )
    place = first + gl.arange(0, N, layout=gl.SliceLayout(1, ROPE))
    slot = gl.load(slots + place, mask=place < end, other=-1)
    record = kv + gl.maximum(slot, 0).to(gl.int64) * W
    dim = gl.arange(0, P, layout=gl.SliceLayout(0, ROPE))
    async_copy.async_copy_global_to_shared(
        rope_tile, record[:, None] + L + dim[None, :], mask=(slot >= 0)[:, None]
    )
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits"])
def _attend_wide(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H: gl.constexpr, L: gl.constexpr, P: gl.constexpr, W: gl.constexpr, BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SCAN: gl.constexpr, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_CAP: gl.constexpr,
):  # fmt: skip
    LATENT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SCAN: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    DTYPE: gl.constexpr = q.dtype.element_ty
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H

    program = gl.program_id(0)
    head_block = program % HEAD_BLOCKS
    row = (program // HEAD_BLOCKS).to(gl.int64)
    split = gl.program_id(1)
    slots += row * slots_stride
    end = 0
    for first in range(0, K, BLOCK_SCAN):
        place = first + gl.arange(0, BLOCK_SCAN, layout=SCAN)
        slot = gl.load(slots + place, mask=place < K, other=-1)
        end = gl.maximum(end, gl.max(gl.where(slot >= 0, place + 1, 0), axis=0))
    begin = 0
    if SPLIT:
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        span = ((tiles + splits - 1) // splits) * BLOCK_N
        begin = split * span
        end = gl.minimum(end, begin + span)

    latents = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, L], SHARED)
    ropes = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, P], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [BLOCK_H, BLOCK_N], SHARED)
    _gather(kv, slots, begin, end, latents.index(0), ropes.index(0), L, P, W, BLOCK_N, LATENT, ROPE)

    q_head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LATENT))
    dim = gl.arange(0, L, layout=gl.SliceLayout(0, LATENT))
    query = q + row * (H * (L + P))
    value = gl.load(
        query + q_head[:, None] * (L + P) + dim[None, :], mask=(q_head < H)[:, None], other=0.0
    )
    q_latent = gl.allocate_shared_memory(DTYPE, [BLOCK_H, L], SHARED, value)
    q_head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, ROPE))
    dim = gl.arange(0, P, layout=gl.SliceLayout(0, ROPE))
    value = gl.load(
        query + q_head[:, None] * (L + P) + L + dim[None, :],
        mask=(q_head < H)[:, None],
        other=0.0,
    )
    q_rope = gl.allocate_shared_memory(DTYPE, [BLOCK_H, P], SHARED, value)

    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORE))
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORE))
    acc = gl.full([BLOCK_H, L], 0.0, gl.float32, layout=OUT)
    zero = gl.full([BLOCK_H, BLOCK_N], 0.0, gl.float32, layout=SCORE)
    buffer = 0
    for first in range(begin, end, BLOCK_N):
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        # Every warp has finished the products of tile i - 1: its buffer may be filled again.
        latent = latents.index(buffer)
        rope = ropes.index(buffer)
        score = warpgroup_mma(q_rope, rope.permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma(q_latent, latent.permute((1, 0)), score, is_async=True)
        _gather(kv, slots, first + BLOCK_N, end, latents.index(1 - buffer),
                ropes.index(1 - buffer), L, P, W, BLOCK_N, LATENT, ROPE)  # fmt: skip
        place = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORE))
        valid = gl.load(slots + place, mask=place < end, other=-1) >= 0
        score = warpgroup_mma_wait(0, deps=[score])
        if HAS_CAP:
            grown = gl.exp2(score * (2.0 * LOG2E * scale / cap)) + 1.0
            score = cap - 2.0 * cap / grown
            rate = LOG2E
        else:
            rate = scale * LOG2E
        score = gl.where(valid[None, :], score, float("-inf"))
        new_best = gl.maximum(best, gl.max(score, axis=1) * rate)
        weight = gl.exp2(score * rate - new_best[:, None])
        weights.store(weight.to(DTYPE))
        shrink = gl.exp2(best - new_best)
        total = total * shrink + gl.sum(weight, axis=1)
        best = new_best
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(weights, latent, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        buffer = 1 - buffer
    async_copy.wait_group(0)

    seen = total != 0.0
    lse2 = gl.where(seen, best + gl.log2(total), float("-inf"))
    denominator = total
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, SCORE))
    if HAS_SINKS:
        sink = gl.load(sinks + head, mask=head < H, other=0.0).to(gl.float32)
        if not SPLIT:
            denominator += gl.exp2(sink * LOG2E - best)
    inverse = gl.where(seen, 1.0 / denominator, 0.0)
    place = split.to(gl.int64) * rows_stride + row * H
    gl.store(lse + place + head, lse2 * (1.0 if SPLIT else LN2), mask=head < H)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, OUT))
    dim = gl.arange(0, L, layout=gl.SliceLayout(0, OUT))
    gl.store(
        out + (place + head)[:, None] * L + dim[None, :],
        acc.to(out.dtype.element_ty),
        mask=(head < H)[:, None],
    )
