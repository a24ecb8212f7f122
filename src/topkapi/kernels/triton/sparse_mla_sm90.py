"""Attention over selected latents on sm90, in Gluon (Triton's lower level): 512 + 64 dims.

The formula, arguments and results are those of `sparse_mla._attend`. What differs is who waits for
whom. There, the compiler's pipeline issues the gather of the next tile after this tile's products.
Here

    wait for tile i | issue the gather of tile i + 1 | (fp8: dequantise tile i) | scores of tile i |
    softmax | weights through shared memory | output

so that a whole iteration covers the gather, which is what bounds the kernel. `_attend_wide` takes
64 heads with two warp groups, which halve the tokens of the scores and the dims of the output, and
hold 64 x 512 fp32 sums in registers. `_attend_narrow` takes 16 or 32 heads with one warp group:
tokens, and then dims, are the 64 rows that a matrix instruction needs, heads its columns, so that
few heads waste nothing. fp8 tiles arrive as they are stored and become bf16 in one buffer of
shared memory.
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
LATENT_DIM = tl.constexpr(512)
ROPE_DIM = tl.constexpr(64)
GROUP_DIM = tl.constexpr(128)
GROUPS = tl.constexpr(4)


@gluon.jit
def _gather(
    kv, slots, first, end, latents, scales, ropes, W: gl.constexpr, N: gl.constexpr,
    FP8: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Issue the copies of the N records named by `slots[first:]`, zeros where there is none."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 16 if FP8 else 8], [1, 32], [WARPS, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SCALE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    place = first + gl.arange(0, N, layout=gl.SliceLayout(1, ROW))
    slot = gl.load(slots + place, mask=place < end, other=-1)
    record = gl.maximum(slot, 0).to(gl.int64) * W
    dim = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, ROW))
    async_copy.async_copy_global_to_shared(
        latents, kv + record[:, None] + dim[None, :], mask=(slot >= 0)[:, None]
    )
    place = first + gl.arange(0, N, layout=gl.SliceLayout(1, ROPE))
    slot = gl.load(slots + place, mask=place < end, other=-1)
    dim = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, ROPE))
    if FP8:
        turned = (kv + LATENT_DIM + 4 * GROUPS).to(gl.pointer_type(gl.bfloat16))
        record = gl.maximum(slot, 0).to(gl.int64) * (W // 2)
    else:
        turned = kv + LATENT_DIM
        record = gl.maximum(slot, 0).to(gl.int64) * W
    async_copy.async_copy_global_to_shared(
        ropes, turned + record[:, None] + dim[None, :], mask=(slot >= 0)[:, None]
    )
    if FP8:
        place = first + gl.arange(0, N, layout=gl.SliceLayout(1, SCALE))
        slot = gl.load(slots + place, mask=place < end, other=-1)
        record = gl.maximum(slot, 0).to(gl.int64) * (W // 4)
        group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, SCALE))
        async_copy.async_copy_global_to_shared(
            scales,
            (kv + LATENT_DIM).to(gl.pointer_type(gl.float32)) + record[:, None] + group[None, :],
            mask=(slot >= 0)[:, None],
        )
    async_copy.commit_group()


@gluon.jit
def _dequantise(codes, scales, latent, WARPS: gl.constexpr):
    """e4m3 codes `[N, 512]` times their groups' scales `[N, 4]`, rounded once, into `latent`."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    for group in gl.static_range(GROUPS):
        code = codes.slice(group * GROUP_DIM, GROUP_DIM, dim=1).load(ROW)
        scale = scales.slice(group, 1, dim=1).load(ROW)
        value = code.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale
        latent.slice(group * GROUP_DIM, GROUP_DIM, dim=1).store(value.to(latent.dtype))


@gluon.jit
def _last_place(slots, K, BLOCK_SCAN: gl.constexpr, WARPS: gl.constexpr):
    """One past the last slot that is not -1: padding at a row's end costs nothing."""
    SCAN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    end = 0
    for first in range(0, K, BLOCK_SCAN):
        place = first + gl.arange(0, BLOCK_SCAN, layout=SCAN)
        slot = gl.load(slots + place, mask=place < K, other=-1)
        end = gl.maximum(end, gl.max(gl.where(slot >= 0, place + 1, 0), axis=0))
    return end


@gluon.jit
def _load_query(q, row, head_block, H: gl.constexpr, BLOCK_H: gl.constexpr, FIRST: gl.constexpr,
                DIMS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Dims `FIRST : FIRST + DIMS` of BLOCK_H heads, in shared memory; zero past H."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    DTYPE: gl.constexpr = q.dtype.element_ty
    WIDTH: gl.constexpr = LATENT_DIM + ROPE_DIM
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, ROW))
    dim = FIRST + gl.arange(0, DIMS, layout=gl.SliceLayout(0, ROW))
    pointers = q + row * (H * WIDTH) + head[:, None] * WIDTH + dim[None, :]
    value = gl.load(pointers, mask=(head < H)[:, None], other=0.0)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return gl.allocate_shared_memory(DTYPE, [BLOCK_H, DIMS], layout, value)


@gluon.jit
def _scored(score, scale, cap, HAS_CAP: gl.constexpr):
    """Scores, and what turns them into powers of two."""
    if HAS_CAP:
        grown = gl.exp2(score * (2.0 * LOG2E * scale / cap)) + 1.0
        score = cap - 2.0 * cap / grown
        rate = LOG2E + 0.0 * scale
    else:
        rate = scale * LOG2E
    return score, rate


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits"])
def _attend_wide(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H: gl.constexpr, W: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SCAN: gl.constexpr, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    CODES: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    DTYPE: gl.constexpr = q.dtype.element_ty
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    program = gl.program_id(0)
    head_block = program % HEAD_BLOCKS
    row = (program // HEAD_BLOCKS).to(gl.int64)
    split = gl.program_id(1)
    slots += row * slots_stride
    end = _last_place(slots, K, BLOCK_SCAN, 8)
    begin = 0
    if SPLIT:
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        span = ((tiles + splits - 1) // splits) * BLOCK_N
        begin = split * span
        end = gl.minimum(end, begin + span)

    if FP8:
        arrived = gl.allocate_shared_memory(gl.uint8, [2, BLOCK_N, LATENT_DIM], CODES)
        scales = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N, GROUPS], PLAIN)
        plain = gl.allocate_shared_memory(DTYPE, [BLOCK_N, LATENT_DIM], SHARED)
    else:
        arrived = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, LATENT_DIM], SHARED)
        scales = arrived
    ropes = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, ROPE_DIM], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [BLOCK_H, BLOCK_N], SHARED)
    _gather(kv, slots, begin, end, arrived.index(0), scales.index(0), ropes.index(0), W, BLOCK_N,
            FP8, 8)  # fmt: skip
    q_latent = _load_query(q, row, head_block, H, BLOCK_H, 0, LATENT_DIM, 8)
    q_rope = _load_query(q, row, head_block, H, BLOCK_H, LATENT_DIM, ROPE_DIM, 8)

    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORE))
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORE))
    acc = gl.full([BLOCK_H, LATENT_DIM], 0.0, gl.float32, layout=OUT)
    zero = gl.full([BLOCK_H, BLOCK_N], 0.0, gl.float32, layout=SCORE)
    buffer = 0
    for first in range(begin, end, BLOCK_N):
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        # Every warp has finished the products of tile i - 1: its buffer may be filled again.
        rope = ropes.index(buffer)
        score = warpgroup_mma(q_rope, rope.permute((1, 0)), zero, use_acc=False, is_async=True)
        if not FP8:
            latent = arrived.index(buffer)
            score = warpgroup_mma(q_latent, latent.permute((1, 0)), score, is_async=True)
        _gather(kv, slots, first + BLOCK_N, end, arrived.index(1 - buffer),
                scales.index(1 - buffer), ropes.index(1 - buffer), W, BLOCK_N, FP8, 8)  # fmt: skip
        if FP8:
            latent = plain
            _dequantise(arrived.index(buffer), scales.index(buffer), latent, 8)
            fence_async_shared()
            gl.thread_barrier()
            score = warpgroup_mma(q_latent, latent.permute((1, 0)), score, is_async=True)
        place = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORE))
        valid = gl.load(slots + place, mask=place < end, other=-1) >= 0
        score = warpgroup_mma_wait(0, deps=[score])
        score, rate = _scored(score, scale, cap, HAS_CAP)
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
    denominator = total
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, SCORE))
    if HAS_SINKS and not SPLIT:
        sink = gl.load(sinks + head, mask=head < H, other=0.0).to(gl.float32)
        denominator += gl.exp2(sink * LOG2E - best)
    lse2 = gl.where(seen, best + gl.log2(total), float("-inf"))
    inverse = gl.where(seen, 1.0 / denominator, 0.0)
    place = split.to(gl.int64) * rows_stride + row * H
    gl.store(lse + place + head, lse2 * (1.0 if SPLIT else LN2), mask=head < H)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, OUT))
    dim = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, OUT))
    pointers = out + (place + head)[:, None] * LATENT_DIM + dim[None, :]
    gl.store(pointers, acc.to(out.dtype.element_ty), mask=(head < H)[:, None])


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits"])
def _attend_narrow(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H: gl.constexpr, W: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SCAN: gl.constexpr, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    # Rows are tokens in the scores [BLOCK_N, BLOCK_H], and dims in the output [512, BLOCK_H].
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    HEADS_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_H, 16, rank=2)
    CODES: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    DTYPE: gl.constexpr = q.dtype.element_ty
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    program = gl.program_id(0)
    head_block = program % HEAD_BLOCKS
    row = (program // HEAD_BLOCKS).to(gl.int64)
    split = gl.program_id(1)
    slots += row * slots_stride
    end = _last_place(slots, K, BLOCK_SCAN, 4)
    begin = 0
    if SPLIT:
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        span = ((tiles + splits - 1) // splits) * BLOCK_N
        begin = split * span
        end = gl.minimum(end, begin + span)

    if FP8:
        arrived = gl.allocate_shared_memory(gl.uint8, [2, BLOCK_N, LATENT_DIM], CODES)
        scales = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N, GROUPS], PLAIN)
        plain = gl.allocate_shared_memory(DTYPE, [BLOCK_N, LATENT_DIM], SHARED)
    else:
        arrived = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, LATENT_DIM], SHARED)
        scales = arrived
    ropes = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, ROPE_DIM], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_H], HEADS_SHARED)
    _gather(kv, slots, begin, end, arrived.index(0), scales.index(0), ropes.index(0), W, BLOCK_N,
            FP8, 4)  # fmt: skip
    q_latent = _load_query(q, row, head_block, H, BLOCK_H, 0, LATENT_DIM, 4)
    q_rope = _load_query(q, row, head_block, H, BLOCK_H, LATENT_DIM, ROPE_DIM, 4)

    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=gl.SliceLayout(0, SCORE))
    # Summed over tokens at the end: one pass across the warps less in each tile.
    totals = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    acc = gl.full([LATENT_DIM, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    zero = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    buffer = 0
    for first in range(begin, end, BLOCK_N):
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        rope = ropes.index(buffer)
        score = warpgroup_mma(rope, q_rope.permute((1, 0)), zero, use_acc=False, is_async=True)
        if not FP8:
            latent = arrived.index(buffer)
            score = warpgroup_mma(latent, q_latent.permute((1, 0)), score, is_async=True)
        _gather(kv, slots, first + BLOCK_N, end, arrived.index(1 - buffer),
                scales.index(1 - buffer), ropes.index(1 - buffer), W, BLOCK_N, FP8, 4)  # fmt: skip
        if FP8:
            latent = plain
            _dequantise(arrived.index(buffer), scales.index(buffer), latent, 4)
            fence_async_shared()
            gl.thread_barrier()
            score = warpgroup_mma(latent, q_latent.permute((1, 0)), score, is_async=True)
        place = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORE))
        valid = gl.load(slots + place, mask=place < end, other=-1) >= 0
        score = warpgroup_mma_wait(0, deps=[score])
        score, rate = _scored(score, scale, cap, HAS_CAP)
        score = gl.where(valid[:, None], score, float("-inf"))
        new_best = gl.maximum(best, gl.max(score, axis=0) * rate)
        weight = gl.exp2(score * rate - new_best[None, :])
        weights.store(weight.to(DTYPE))
        shrink = gl.exp2(best - new_best)
        totals = totals * shrink[None, :] + weight
        best = new_best
        acc = acc * shrink[None, :]
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(latent.permute((1, 0)), weights, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        buffer = 1 - buffer
    async_copy.wait_group(0)

    total = gl.sum(totals, axis=0)
    seen = total != 0.0
    denominator = total
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, SCORE))
    if HAS_SINKS and not SPLIT:
        sink = gl.load(sinks + head, mask=head < H, other=0.0).to(gl.float32)
        denominator += gl.exp2(sink * LOG2E - best)
    lse2 = gl.where(seen, best + gl.log2(total), float("-inf"))
    inverse = gl.where(seen, 1.0 / denominator, 0.0)
    place = split.to(gl.int64) * rows_stride + row * H
    gl.store(lse + place + head, lse2 * (1.0 if SPLIT else LN2), mask=head < H)
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [2, 2], [0, 1])
    acc = gl.convert_layout((acc * inverse[None, :]).to(out.dtype.element_ty), STORE)
    head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, STORE))
    dim = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(1, STORE))
    pointers = out + (place + head)[None, :] * LATENT_DIM + dim[:, None]
    gl.store(pointers, acc, mask=(head < H)[None, :])
