"""sm90 attention for up to 32 heads over records in the query's dtype: who works when, on what.

One partition gathers; one warp group computes, or for up to 16 heads two, which take the tiles in
turn:

    gathering | fill tile i + 2 ...... | fill tile i + 3 ..... |
    first     | scores i | softmax i | output i | scores i + 2 ...
    second              | scores i + 1 | softmax i + 1 | output i + 1 | scores i + 3 ...

Tokens, and then dims, are the 64 rows that a matrix instruction needs, heads its columns, so that
few heads waste nothing. Programs that share a row take its tiles in turn, so where they begin does
not depend on where the row ends: the first records are under way while that is looked for. At the
end both groups leave their sums in shared memory, and each finishes half of the heads. The formula,
arguments and results are those of `triton.sparse_mla`.
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
from topkapi.kernels.hopper.softmax import close, exponents, start_query, wait_for_query
from topkapi.kernels.triton.softmax import LOWEST
from topkapi.kernels.triton.zero_unseen import zero_unseen


@gluon.jit
def _kept(buffer, BLOCK_H: gl.constexpr):
    """Where a group leaves sums `[BLOCK_H, 512]` fp32, so that heads are read in one piece."""
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    return buffer._reinterpret(gl.float32, [BLOCK_H, LATENT_DIM], TURNED)


@gluon.jit
def _finish(
    sinks, out, lse, row, rows_stride, first, second, bests, totals_kept, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Merge what the groups left in `first` and `second`: each finishes its share of the heads."""
    BLOCK_H: gl.constexpr = first.shape[0]
    EACH: gl.constexpr = BLOCK_H // GROUPS
    FIRST: gl.constexpr = GROUP * EACH
    READ: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    HEADS: gl.constexpr = gl.SliceLayout(1, READ)
    best = bests.index(0).slice(FIRST, EACH, dim=0).load(HEADS)
    total = gl.sum(totals_kept.index(0).slice(FIRST, EACH, dim=0).load(READ), axis=1)
    rate = gl.full([EACH], 1.0, gl.float32, layout=HEADS)
    other_rate = rate
    if GROUPS == 2:
        other = bests.index(1).slice(FIRST, EACH, dim=0).load(HEADS)
        new_best = gl.maximum(best, other)
        rate, other_rate = gl.exp2(best - new_best), gl.exp2(other - new_best)
        best = new_best
        other = gl.sum(totals_kept.index(1).slice(FIRST, EACH, dim=0).load(READ), axis=1)
        total = total * rate + other * other_rate
    head = FIRST + gl.arange(0, EACH, layout=HEADS)
    inverse, logarithm = close(total, best, sinks, head, H, SPLIT, HAS_SINKS)
    result = first.slice(FIRST, EACH, dim=0).load(READ) * (rate * inverse)[:, None]
    if GROUPS == 2:
        others = second.slice(FIRST, EACH, dim=0).load(READ)
        result += others * (other_rate * inverse)[:, None]
    place = gl.program_id(1).to(gl.int64) * rows_stride + row * H + head
    dim = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, READ))
    pointers = out + place[:, None] * LATENT_DIM + dim[None, :]
    gl.store(pointers, result.to(out.dtype.element_ty), mask=(head < H)[:, None])
    gl.store(lse + place, logarithm, mask=head < H)


@gluon.jit
def _compute(
    sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, latents, ropes, shifts,
    weights, bests, totals_kept, count, full, empty, ready, FIRST: gl.constexpr,
    GROUPS: gl.constexpr, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and output of tiles FIRST, FIRST + GROUPS, ..., and the group's end."""
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    N: gl.constexpr = latents.shape[1]
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORE)
    TOKENS: gl.constexpr = gl.SliceLayout(1, SCORE)
    weights = weights.index(FIRST)
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    # Summed over tokens at the end: one pass across the warps less in each tile.
    totals = gl.full([N, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    sums = gl.full([LATENT_DIM, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    zero = gl.full([N, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    tiles = told_count(count)
    for tile in range(FIRST, tiles, GROUPS):
        origin = zero_unseen(tile)
        stage = tile % 2 + origin
        latent = latents.index(stage)
        mbarrier.wait(full.index(stage), (tile // 2) & 1)
        fence_async_shared()
        rope = q_rope.index(origin).permute((1, 0))
        shift = shifts.index(stage).load(TOKENS)
        query = q_latent.index(origin).permute((1, 0))
        score = warpgroup_mma(ropes.index(stage), rope, zero, use_acc=False, is_async=True)
        score = warpgroup_mma(latent, query, score, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        score, rate = exponents(score, shift, scale, cap, 1, HAS_CAP)
        new_best = gl.maximum(best, gl.max(score, axis=0) * rate)
        weight = gl.exp2(score * rate - new_best[None, :])
        weights.store(weight.to(weights.dtype))
        shrink = gl.exp2(best - new_best)[None, :]
        best = new_best
        totals = totals * shrink + weight
        sums = sums * shrink
        fence_async_shared()
        gl.thread_barrier()
        sums = warpgroup_mma(latent.permute((1, 0)), weights, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        # All have read this tile: its buffer and the weights may be written again.
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)

    # The first two tiles are filled in any case, and this group's results go where its tiles were.
    if tiles <= FIRST:
        mbarrier.wait(full.index(FIRST), 0)
    first = _kept(latents.index(0), BLOCK_H)
    second = _kept(latents.index(1), BLOCK_H)
    mine = first if FIRST == 0 else second
    mine.permute((1, 0)).store(sums)
    bests.index(FIRST).store(best)
    # What each warp's tokens add up to.
    by_warp = gl.sum(gl.reshape(totals, [4, N // 4, BLOCK_H]), axis=1)
    totals_kept.index(FIRST).permute((1, 0)).store(by_warp)
    gl.thread_barrier()
    if GROUPS == 2:
        mbarrier.arrive(ready, count=1)
        mbarrier.wait(ready, 0)
    _finish(
        sinks, out, lse, row, rows_stride, first, second, bests, totals_kept, FIRST, GROUPS, H,
        SPLIT, HAS_SINKS,
    )  # fmt: skip


@gluon.jit
def _compute_first(
    slots, K, splits, q, sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, latents,
    ropes, shifts, weights, bests, totals_kept, count, full, empty, ready, known, loaded,
    GROUPS: gl.constexpr, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    start_query(q, row, 0, q_latent.index(0), q_rope.index(0), H)
    tell_count(slots, K, splits, count, known, latents.shape[1], 1)
    wait_for_query()
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded, count=1)
    _compute(
        sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, latents, ropes, shifts,
        weights, bests, totals_kept, count, full, empty, ready, 0, GROUPS, H, SPLIT, HAS_SINKS,
        HAS_CAP,
    )  # fmt: skip


@gluon.jit
def _compute_second(
    sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, latents, ropes, shifts,
    weights, bests, totals_kept, count, full, empty, ready, loaded, H, SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    mbarrier.wait(loaded, 0)
    _compute(
        sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, latents, ropes, shifts,
        weights, bests, totals_kept, count, full, empty, ready, 1, 2, H, SPLIT, HAS_SINKS,
        HAS_CAP,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits", "H"])
def attend_narrow(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H, W: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """One program for each row and split of it; BLOCK_H holds all H heads.

    Launched before the kernel ahead of it has ended, it waits before it reads anything.
    """
    OPERAND: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row = gl.program_id(0).to(gl.int64)
    slots += row * slots_stride
    latents = gl.allocate_shared_memory(OPERAND, [2, BLOCK_N, LATENT_DIM], SHARED)
    ropes = gl.allocate_shared_memory(q.dtype.element_ty, [2, BLOCK_N, ROPE_DIM], SHARED)
    shifts = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=COPIED)
        mbarrier.init(empty.index(stage), count=1)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_H, 16, rank=2)
    weights = gl.allocate_shared_memory(OPERAND, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    bests = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], VECTOR)
    totals_kept = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H, 4], PLAIN)
    count = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    known = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(known, count=1)
    mbarrier.init(loaded, count=1)
    mbarrier.init(ready, count=2)
    q_latent = gl.allocate_shared_memory(OPERAND, [1, BLOCK_H, LATENT_DIM], SHARED)
    q_rope = gl.allocate_shared_memory(q.dtype.element_ty, [1, BLOCK_H, ROPE_DIM], SHARED)
    gdc_wait()
    # Tuples are written out: a constexpr in a named tuple would become a run-time value.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute_first, (slots, K, splits, q, sinks, out, lse, row, rows_stride, scale,
                                  cap, q_latent, q_rope, latents, ropes, shifts, weights, bests,
                                  totals_kept, count, full, empty, ready, known, loaded, 2, H,
                                  SPLIT, HAS_SINKS, HAS_CAP)),
                (_compute_second, (sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope,
                                   latents, ropes, shifts, weights, bests, totals_kept, count,
                                   full, empty, ready, loaded, H, SPLIT, HAS_SINKS, HAS_CAP)),
                (copy, (kv, slots, K, splits, count, known, latents, ropes, shifts, full, empty, W,
                        BLOCK_N)),
            ],
            [4, 4], [168, 104],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute_first, (slots, K, splits, q, sinks, out, lse, row, rows_stride, scale,
                                  cap, q_latent, q_rope, latents, ropes, shifts, weights, bests,
                                  totals_kept, count, full, empty, ready, known, loaded, 1, H,
                                  SPLIT, HAS_SINKS, HAS_CAP)),
                (copy, (kv, slots, K, splits, count, known, latents, ropes, shifts, full, empty, W,
                        BLOCK_N)),
            ],
            [4], [104],
        )  # fmt: skip
