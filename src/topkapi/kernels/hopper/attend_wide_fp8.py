"""sm90 attention for 64 heads a program over fp8 records: who works when, and on which operand.

One partition gathers, which for fp8 takes as long as all products of a tile. So the two warp groups
that compute share each tile, and its buffer is free again as soon as it can be: a side takes the
scores of half of the tile's tokens and the output of half of the dims,

    gathering |  fill i + 1 .............................. | fill i + 2 ...
    a side    |  scores, exponents | weights | output i .. | scores i + 1 ...

and learns from the other side the maximum and the weights of the other tokens. Weights lie where
the tile's rope was. The formula, arguments and results are those of `triton.sparse_mla`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from topkapi.kernels.hopper.gather import COPIED, LATENT_DIM, ROPE_DIM, gather_fp8, places
from topkapi.kernels.hopper.softmax import (
    HALF_DIM,
    LOWEST,
    counted,
    exponents_fp8,
    shrink_query,
    start_query,
    store_half,
    wait_for_query,
)
from topkapi.kernels.triton.zero_unseen import zero_unseen


@gluon.jit
def _attend(
    sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope, stretches,
    latents, ropes, tokens, bests, sides, full, empty, known, stored, closed, H,
    SIDE: gl.constexpr, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    HALF: gl.constexpr = latents.shape[1] // 2
    OTHER: gl.constexpr = 1 - SIDE
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, SCORE)
    OUT_HEADS: gl.constexpr = gl.SliceLayout(1, OUT)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * HALF, 16, rank=2)
    weights = ropes._reinterpret(latents.dtype, [4, BLOCK_H, HALF], WEIGHTS)
    stretch = stretches.load(HEADS)
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=HEADS)
    sums = gl.full([BLOCK_H, HALF_DIM], 0.0, gl.float32, layout=OUT)
    zero = gl.full([BLOCK_H, HALF], 0.0, gl.float32, layout=SCORE)
    for tile in range(0, tiles):
        origin = zero_unseen(tile)
        stage = tile % 2 + origin
        mbarrier.wait(full.index(stage), (tile // 2) & 1)
        fence_async_shared()
        grown = tokens.index(stage).slice(SIDE * HALF, HALF).load(gl.SliceLayout(0, SCORE))
        rope = ropes.index(stage).slice(SIDE * HALF, HALF, dim=0).permute((1, 0))
        latent = latents.index(stage).slice(SIDE * HALF, HALF, dim=0).permute((1, 0))
        of_rope = warpgroup_mma(q_rope.index(origin), rope, zero, use_acc=False, is_async=True)
        score = warpgroup_mma(q_latent.index(origin), latent, zero, use_acc=False, is_async=True)
        score, of_rope = warpgroup_mma_wait(0, deps=[score, of_rope])
        score = exponents_fp8(score, of_rope, stretch, grown, scale, cap, 0, HAS_CAP)
        top = gl.max(score, axis=1)
        bests.index(SIDE).store(top)
        gl.thread_barrier()
        mbarrier.arrive(known.index(SIDE), count=1)
        mbarrier.wait(known.index(OTHER), tile & 1)
        # The other side has its scores, and so the tile's rope is read.
        new_best = gl.maximum(best, gl.maximum(top, bests.index(OTHER).load(HEADS)))
        weight = gl.exp2(score - new_best[:, None])
        weights.index(2 * stage + SIDE).store(weight.to(latents.dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(stored.index(SIDE), count=1)
        shrink = gl.exp2(best - new_best)
        best = new_best
        sums = sums * gl.convert_layout(shrink, OUT_HEADS)[:, None]
        total = total * shrink + gl.sum(counted(weight, grown, 0), axis=1)
        mbarrier.wait(stored.index(OTHER), tile & 1)
        values = latents.index(stage).slice(SIDE * HALF_DIM, HALF_DIM, dim=1)
        sums = warpgroup_mma(
            weights.index(2 * stage), values.slice(0, HALF, dim=0), sums, is_async=True
        )
        sums = warpgroup_mma(
            weights.index(2 * stage + 1), values.slice(HALF, HALF, dim=0), sums, is_async=True
        )
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)

    sides.index(SIDE).store(total)
    gl.thread_barrier()
    mbarrier.arrive(closed.index(SIDE), count=1)
    mbarrier.wait(closed.index(OTHER), 0)
    total += sides.index(OTHER).load(HEADS)
    store_half(sums, total, best, sinks, out, lse, row, head_block, rows_stride, HEADS, OUT,
               SIDE * HALF_DIM, H, SPLIT, HAS_SINKS)  # fmt: skip


@gluon.jit
def _left(
    q, sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope,
    stretches, latents, ropes, tokens, bests, sides, full, empty, known, stored, closed, loaded, H,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    wait_for_query()
    shrink_query(q, q_latent.index(0), stretches, 4)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded, count=1)
    _attend(
        sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope,
        stretches, latents, ropes, tokens, bests, sides, full, empty, known, stored, closed, H, 0,
        SPLIT, HAS_SINKS, HAS_CAP,
    )  # fmt: skip


@gluon.jit
def _right(
    sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope, stretches,
    latents, ropes, tokens, bests, sides, full, empty, known, stored, closed, loaded, H,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    mbarrier.wait(loaded, 0)
    _attend(
        sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope,
        stretches, latents, ropes, tokens, bests, sides, full, empty, known, stored, closed, H, 1,
        SPLIT, HAS_SINKS, HAS_CAP,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits", "H"])
def attend_wide_fp8(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H, W: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    head_blocks = (H + BLOCK_H - 1) // BLOCK_H
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    program = gl.program_id(0)
    head_block = program % head_blocks
    row = (program // head_blocks).to(gl.int64)
    slots += row * slots_stride
    latents = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, LATENT_DIM], SHARED)
    # A tile's rope, and once its scores are known its weights, two times [BLOCK_H, BLOCK_N / 2].
    gl.static_assert(BLOCK_H == BLOCK_N and BLOCK_N == ROPE_DIM)
    ropes = gl.allocate_shared_memory(q.dtype.element_ty, [2, BLOCK_N, ROPE_DIM], SHARED)
    tokens = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], VECTOR)
    bests = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], VECTOR)
    sides = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    closed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    for index in gl.static_range(2):
        mbarrier.init(full.index(index), count=COPIED)
        mbarrier.init(empty.index(index), count=2)
        mbarrier.init(known.index(index), count=1)
        mbarrier.init(stored.index(index), count=1)
        mbarrier.init(closed.index(index), count=1)
    q_latent = gl.allocate_shared_memory(gl.float16, [1, BLOCK_H, LATENT_DIM], SHARED)
    q_rope = gl.allocate_shared_memory(q.dtype.element_ty, [1, BLOCK_H, ROPE_DIM], SHARED)
    stretches = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    start_query(q, row, head_block, q_latent.index(0), q_rope.index(0), H, 4)
    begin, end = places(slots, K, splits, BLOCK_N, SPLIT)
    tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
    # Tuples are written out: a constexpr in a named tuple would become a run-time value.
    gl.warp_specialize(
        [
            (_left, (q, sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent,
                     q_rope, stretches, latents, ropes, tokens, bests, sides, full, empty, known,
                     stored, closed, loaded, H, SPLIT, HAS_SINKS, HAS_CAP)),
            (_right, (sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent,
                      q_rope, stretches, latents, ropes, tokens, bests, sides, full, empty, known,
                      stored, closed, loaded, H, SPLIT, HAS_SINKS, HAS_CAP)),
            (gather_fp8, (kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty,
                          W // 4, BLOCK_N, 0, BLOCK_N)),
        ],
        [4, 4], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
