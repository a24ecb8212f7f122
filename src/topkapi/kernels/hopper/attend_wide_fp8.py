"""sm90 attention for 64 heads a program over fp8 records: who works when, and on which operand.

One partition gathers. Two warp groups compute: the left one takes the scores of the even tiles and
the first half of the output's dims, the right one those of the odd tiles and the other half:

    gathering |  fill odd ......... | fill next even ......... | fill next odd ...
    left      |  softmax e | output e ...... | output o, scores of the next e | softmax
    right     |  ........ | output e, scores o | softmax o | output o .......

Filling a tile takes about as long as using it. So a tile's output is issued as soon as its weights
are there, before the scores of the other tile, and its buffer is handed back before those are done.
Weights lie where the tile's rope was; maxima and whether one moved go through shared memory. The
formula, arguments and results are those of `triton.sparse_mla`.
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
from triton.language.extra.cuda import gdc_wait

from topkapi.kernels.hopper.gather import (
    COPIED,
    LATENT_DIM,
    LISTED,
    ROPE_DIM,
    gather_whole,
    tell_count,
    told_count,
)
from topkapi.kernels.hopper.softmax import (
    HALF_DIM,
    counted,
    exponents_fp8,
    raised,
    rescale,
    share_weights,
    shrink_query,
    start_query,
    store_half,
    total_of_both,
    wait_for_query,
)
from topkapi.kernels.triton.softmax import LOWEST
from topkapi.kernels.triton.zero_unseen import zero_unseen


@gluon.jit
def _start_scores(q_latent, latents, first, stage, SCORE: gl.constexpr):
    """Start the product of one tile's latents with the query."""
    zero = gl.full([q_latent.shape[1], latents.shape[1]], 0.0, gl.float32, layout=SCORE)
    latent = latents.index(stage).permute((1, 0))
    return warpgroup_mma(q_latent.index(first), latent, zero, use_acc=False, is_async=True)


@gluon.jit
def _exponents(
    score, q_rope, stretches, ropes, grown, shifts, first, stage, line, scale, cap,
    SCORE: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Exponents `[64, N]` of one tile from its latents' product: the ropes' is added here."""
    TOKENS: gl.constexpr = gl.SliceLayout(0, SCORE)
    score = score * grown.index(line).load(TOKENS)[None, :]
    rope = ropes.index(stage).permute((1, 0))
    score = warpgroup_mma(q_rope.index(first), rope, score, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    # Loaded for each tile: registers are short.
    stretch = stretches.load(gl.SliceLayout(1, SCORE))
    return exponents_fp8(score, stretch, shifts.index(line).load(TOKENS), scale, cap, 0, HAS_CAP)


@gluon.jit
def _left(
    q, slots, K, splits, sinks, out, lse, row, head_block, rows_stride, scale, cap, q_latent,
    q_rope, stretches, latents, ropes, grown, shifts, bests, raises, sides, count, full, empty,
    ready, closed, loaded, known, H,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    N: gl.constexpr = latents.shape[1]
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, SCORE)
    weights = ropes._reinterpret(latents.dtype, [2, BLOCK_H, N], ropes.layout)
    start_query(q, row, head_block, q_latent.index(0), q_rope.index(0), H)
    tell_count(slots, K, splits, count, known, N, 2)
    pairs = told_count(count) // 2
    wait_for_query()
    shrink_query(q, q_latent.index(0), q_rope.index(0), stretches)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded, count=1)
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=HEADS)
    sums = gl.full([BLOCK_H, HALF_DIM], 0.0, gl.float32, layout=OUT)
    score = gl.full([BLOCK_H, N], 0.0, gl.float32, layout=SCORE)
    if pairs > 0:
        mbarrier.wait(full.index(0), 0)
        fence_async_shared()
        score = _start_scores(q_latent, latents, 0, 0, SCORE)
        score = warpgroup_mma_wait(0, deps=[score])
    for pair in range(0, pairs):
        phase = pair & 1
        even = zero_unseen(pair)
        odd = even + 1
        line = 2 * phase
        score = _exponents(
            score, q_rope, stretches, ropes, grown, shifts, even, even, line, scale, cap, SCORE,
            HAS_CAP,
        )  # fmt: skip
        weight, new_best = share_weights(
            score, 1.0, best, weights.index(even), bests.index(0), raises.index(0),
            ready.index(0),
        )  # fmt: skip
        if raised(raises.index(0)):
            sums, total = rescale(sums, total, best, new_best, OUT)
        best = new_best
        values = latents.index(even).slice(0, HALF_DIM, dim=1)
        sums = warpgroup_mma(weights.index(even), values, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(0), count=1)
        # Beside the right side's softmax. The line is written again only in two pairs' time.
        share = counted(weight, grown.index(line).load(gl.SliceLayout(0, SCORE)), 0)
        total = total + gl.sum(share, axis=1)

        mbarrier.wait(ready.index(1), phase)
        if raised(raises.index(1)):
            new_best = bests.index(1).load(HEADS)
            sums, total = rescale(sums, total, best, new_best, OUT)
            best = new_best
        values = latents.index(odd).slice(0, HALF_DIM, dim=1)
        sums = warpgroup_mma(weights.index(odd), values, sums, is_async=True)
        # After the last pair what lies there is scored once more, for nobody.
        if pair + 1 < pairs:
            mbarrier.wait(full.index(even), phase ^ 1)
        fence_async_shared()
        score = _start_scores(q_latent, latents, even, even, SCORE)
        sums = warpgroup_mma_wait(1, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(1), count=1)
        score = warpgroup_mma_wait(0, deps=[score])

    total = total_of_both(total, sides, closed, 0, HEADS)
    store_half(
        sums, total, best, sinks, out, lse, row, head_block, rows_stride, latents.index(0), HEADS,
        OUT, 0, H, SPLIT, HAS_SINKS,
    )  # fmt: skip


@gluon.jit
def _right(
    sinks, out, lse, row, head_block, rows_stride, scale, cap, q_latent, q_rope, stretches,
    latents, ropes, grown, shifts, bests, raises, sides, count, full, empty, ready, closed, loaded,
    H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    N: gl.constexpr = latents.shape[1]
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, SCORE)
    weights = ropes._reinterpret(latents.dtype, [2, BLOCK_H, N], ropes.layout)
    mbarrier.wait(loaded, 0)
    pairs = told_count(count) // 2
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=HEADS)
    sums = gl.full([BLOCK_H, HALF_DIM], 0.0, gl.float32, layout=OUT)
    for pair in range(0, pairs):
        phase = pair & 1
        even = zero_unseen(pair)
        odd = even + 1
        line = 2 * phase + 1
        mbarrier.wait(ready.index(0), phase)
        if raised(raises.index(0)):
            new_best = bests.index(0).load(HEADS)
            sums, total = rescale(sums, total, best, new_best, OUT)
            best = new_best
        values = latents.index(even).slice(HALF_DIM, HALF_DIM, dim=1)
        sums = warpgroup_mma(weights.index(even), values, sums, is_async=True)
        mbarrier.wait(full.index(odd), phase)
        fence_async_shared()
        score = _start_scores(q_latent, latents, even, odd, SCORE)
        sums = warpgroup_mma_wait(1, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(0), count=1)
        score = warpgroup_mma_wait(0, deps=[score])
        score = _exponents(
            score, q_rope, stretches, ropes, grown, shifts, even, odd, line, scale, cap, SCORE,
            HAS_CAP,
        )  # fmt: skip
        weight, new_best = share_weights(
            score, 1.0, best, weights.index(odd), bests.index(1), raises.index(1),
            ready.index(1),
        )  # fmt: skip
        if raised(raises.index(1)):
            sums, total = rescale(sums, total, best, new_best, OUT)
        best = new_best
        values = latents.index(odd).slice(HALF_DIM, HALF_DIM, dim=1)
        sums = warpgroup_mma(weights.index(odd), values, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(1), count=1)
        share = counted(weight, grown.index(line).load(gl.SliceLayout(0, SCORE)), 0)
        total = total + gl.sum(share, axis=1)

    total = total_of_both(total, sides, closed, 1, HEADS)
    store_half(
        sums, total, best, sinks, out, lse, row, head_block, rows_stride, latents.index(1), HEADS,
        OUT, HALF_DIM, H, SPLIT, HAS_SINKS,
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
    # A tile's rope, and once its scores are known its weights [BLOCK_H, BLOCK_N].
    gl.static_assert(BLOCK_H == BLOCK_N and BLOCK_N == ROPE_DIM)
    ropes = gl.allocate_shared_memory(q.dtype.element_ty, [2, BLOCK_N, ROPE_DIM], SHARED)
    # Lines of four tiles: a tile's are read after its buffer is handed back.
    grown = gl.allocate_shared_memory(gl.float32, [4, BLOCK_N], VECTOR)
    shifts = gl.allocate_shared_memory(gl.float32, [4, BLOCK_N], VECTOR)
    lists = gl.allocate_shared_memory(gl.int32, [LISTED, BLOCK_N], VECTOR)
    bests = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], VECTOR)
    raises = gl.allocate_shared_memory(gl.int32, [2, 4], VECTOR)
    sides = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], VECTOR)
    count = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # For the end alone: a signal of `ready` more, and a side that is late would wait for ever.
    closed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.init(known, count=1)
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=COPIED)
        mbarrier.init(empty.index(stage), count=2)
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(closed.index(stage), count=1)
    q_latent = gl.allocate_shared_memory(gl.float16, [1, BLOCK_H, LATENT_DIM], SHARED)
    q_rope = gl.allocate_shared_memory(q.dtype.element_ty, [1, BLOCK_H, ROPE_DIM], SHARED)
    stretches = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    gdc_wait()
    # Tuples are written out: a constexpr in a named tuple would become a run-time value.
    gl.warp_specialize(
        [
            (_left, (q, slots, K, splits, sinks, out, lse, row, head_block, rows_stride, scale,
                     cap, q_latent, q_rope, stretches, latents, ropes, grown, shifts, bests,
                     raises, sides, count, full, empty, ready, closed, loaded, known, H, SPLIT,
                     HAS_SINKS, HAS_CAP)),
            (_right, (sinks, out, lse, row, head_block, rows_stride, scale, cap, q_latent, q_rope,
                      stretches, latents, ropes, grown, shifts, bests, raises, sides, count, full,
                      empty, ready, closed, loaded, H, SPLIT, HAS_SINKS, HAS_CAP)),
            (gather_whole, (kv, slots, K, splits, count, known, latents, ropes, grown, shifts,
                            lists, full, empty, W // 4, BLOCK_N)),
        ],
        [4, 4], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
