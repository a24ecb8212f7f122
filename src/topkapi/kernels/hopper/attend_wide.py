"""sm90 attention for 64 heads a program over records in the query's dtype: who works when.

One partition gathers. Two warp groups compute: the left one takes the scores of the even tiles and
the first half of the output's dims, the right one those of the odd tiles and the other half:

    gathering |  fill even ....  fill odd ....
    left      |  scores e | softmax e | output e | ....... | output o |
    right     |  scores o ....        | output e, softmax o | output o |

so that one's softmax lies beside the other's products. Weights lie where the tile's rope was;
maxima and whether one moved go through shared memory. The formula, arguments and results are those
of `triton.sparse_mla`.
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
    ROPE_DIM,
    copy,
    tell_count,
    told_count,
)
from topkapi.kernels.hopper.softmax import (
    HALF_DIM,
    exponents,
    raised,
    rescale,
    share_weights,
    start_query,
    store_half,
    total_of_both,
    wait_for_query,
)
from topkapi.kernels.triton.softmax import LOWEST
from topkapi.kernels.triton.zero_unseen import zero_unseen


@gluon.jit
def _scores(q_latent, q_rope, latents, ropes, shifts, first, stage, scale, cap,
            SCORE: gl.constexpr, HAS_CAP: gl.constexpr):  # fmt: skip
    """Exponents `[64, N]` of one tile up to a rate, and that rate."""
    score = gl.full([q_latent.shape[1], latents.shape[1]], 0.0, gl.float32, layout=SCORE)
    rope, latent = (
        ropes.index(stage).permute((1, 0)),
        latents.index(stage).permute((1, 0)),
    )
    score = warpgroup_mma(q_rope.index(first), rope, score, use_acc=False, is_async=True)
    score = warpgroup_mma(q_latent.index(first), latent, score, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    shift = shifts.index(stage).load(gl.SliceLayout(0, SCORE))
    return exponents(score, shift, scale, cap, 0, HAS_CAP)


@gluon.jit
def _left(
    q, slots, K, splits, sinks, out, lse, row, head_block, rows_stride, scale, cap, q_latent,
    q_rope, latents, ropes, shifts, bests, raises, sides, count, full, empty, ready, closed,
    loaded, known, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    N: gl.constexpr = latents.shape[1]
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, SCORE)
    start_query(q, row, head_block, q_latent.index(0), q_rope.index(0), H)
    tell_count(slots, K, splits, count, known, N, 2)
    pairs = told_count(count) // 2
    wait_for_query()
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded, count=1)
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=HEADS)
    sums = gl.full([BLOCK_H, HALF_DIM], 0.0, gl.float32, layout=OUT)
    for pair in range(0, pairs):
        phase = pair & 1
        even = zero_unseen(pair)
        odd = even + 1
        mbarrier.wait(full.index(even), phase)
        fence_async_shared()
        score, rate = _scores(
            q_latent, q_rope, latents, ropes, shifts, even, even, scale, cap, SCORE, HAS_CAP,
        )  # fmt: skip
        weight, new_best = share_weights(
            score, rate, best, ropes.index(even), bests.index(0), raises.index(0),
            ready.index(0),
        )  # fmt: skip
        if raised(raises.index(0)):
            sums, total = rescale(sums, total, best, new_best, OUT)
        best = new_best
        values = latents.index(even).slice(0, HALF_DIM, dim=1)
        sums = warpgroup_mma(ropes.index(even), values, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(0), count=1)
        total = total + gl.sum(weight, axis=1)

        mbarrier.wait(ready.index(1), phase)
        if raised(raises.index(1)):
            new_best = bests.index(1).load(HEADS)
            sums, total = rescale(sums, total, best, new_best, OUT)
            best = new_best
        values = latents.index(odd).slice(0, HALF_DIM, dim=1)
        sums = warpgroup_mma(ropes.index(odd), values, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(1), count=1)

    # The first two tiles are filled in any case.
    if pairs == 0:
        mbarrier.wait(full.index(0), 0)
    total = total_of_both(total, sides, closed, 0, HEADS)
    store_half(
        sums, total, best, sinks, out, lse, row, head_block, rows_stride, latents.index(0), HEADS,
        OUT, 0, H, SPLIT, HAS_SINKS,
    )  # fmt: skip


@gluon.jit
def _right(
    sinks, out, lse, row, head_block, rows_stride, scale, cap, q_latent, q_rope, latents, ropes,
    shifts, bests, raises, sides, count, full, empty, ready, closed, loaded, H,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    N: gl.constexpr = latents.shape[1]
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_DIM, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, SCORE)
    mbarrier.wait(loaded, 0)
    pairs = told_count(count) // 2
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=HEADS)
    sums = gl.full([BLOCK_H, HALF_DIM], 0.0, gl.float32, layout=OUT)
    for pair in range(0, pairs):
        phase = pair & 1
        even = zero_unseen(pair)
        odd = even + 1
        mbarrier.wait(full.index(odd), phase)
        fence_async_shared()
        score, rate = _scores(
            q_latent, q_rope, latents, ropes, shifts, even, odd, scale, cap, SCORE, HAS_CAP,
        )  # fmt: skip
        mbarrier.wait(ready.index(0), phase)
        if raised(raises.index(0)):
            new_best = bests.index(0).load(HEADS)
            sums, total = rescale(sums, total, best, new_best, OUT)
            best = new_best
        values = latents.index(even).slice(HALF_DIM, HALF_DIM, dim=1)
        sums = warpgroup_mma(ropes.index(even), values, sums, is_async=True)
        weight, new_best = share_weights(
            score, rate, best, ropes.index(odd), bests.index(1), raises.index(1),
            ready.index(1),
        )  # fmt: skip
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(0), count=1)
        if raised(raises.index(1)):
            sums, total = rescale(sums, total, best, new_best, OUT)
        best = new_best
        values = latents.index(odd).slice(HALF_DIM, HALF_DIM, dim=1)
        sums = warpgroup_mma(ropes.index(odd), values, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(1), count=1)
        total = total + gl.sum(weight, axis=1)

    if pairs == 0:
        mbarrier.wait(full.index(1), 0)
    total = total_of_both(total, sides, closed, 1, HEADS)
    store_half(
        sums, total, best, sinks, out, lse, row, head_block, rows_stride, latents.index(1), HEADS,
        OUT, HALF_DIM, H, SPLIT, HAS_SINKS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits", "H"])
def attend_wide(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H, W: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    head_blocks = (H + BLOCK_H - 1) // BLOCK_H
    OPERAND: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    program = gl.program_id(0)
    head_block = program % head_blocks
    row = (program // head_blocks).to(gl.int64)
    slots += row * slots_stride
    latents = gl.allocate_shared_memory(OPERAND, [2, BLOCK_N, LATENT_DIM], SHARED)
    # A tile's rope, and once its scores are known its weights [BLOCK_H, BLOCK_N].
    gl.static_assert(BLOCK_H == BLOCK_N and BLOCK_N == ROPE_DIM)
    ropes = gl.allocate_shared_memory(OPERAND, [2, BLOCK_N, ROPE_DIM], SHARED)
    shifts = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], VECTOR)
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
    q_latent = gl.allocate_shared_memory(OPERAND, [1, BLOCK_H, LATENT_DIM], SHARED)
    q_rope = gl.allocate_shared_memory(OPERAND, [1, BLOCK_H, ROPE_DIM], SHARED)
    gdc_wait()
    # Tuples are written out: a constexpr in a named tuple would become a run-time value.
    gl.warp_specialize(
        [
            (_left, (q, slots, K, splits, sinks, out, lse, row, head_block, rows_stride, scale,
                     cap, q_latent, q_rope, latents, ropes, shifts, bests, raises, sides, count,
                     full, empty, ready, closed, loaded, known, H, SPLIT, HAS_SINKS, HAS_CAP)),
            (_right, (sinks, out, lse, row, head_block, rows_stride, scale, cap, q_latent, q_rope,
                      latents, ropes, shifts, bests, raises, sides, count, full, empty, ready,
                      closed, loaded, H, SPLIT, HAS_SINKS, HAS_CAP)),
            (copy, (kv, slots, K, splits, count, known, latents, ropes, shifts, full, empty, W,
                    BLOCK_N)),
        ],
        [4, 4], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
