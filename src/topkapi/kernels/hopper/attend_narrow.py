"""sm90 attention for 16 or 32 heads a program: who works when, and on which operand.

Two partitions gather, half of each tile's tokens each. One warp group computes, or for 16 heads
two, which take the tiles in turn and merge their results at the end:

    gathering | fill tile i + 2 ...... | load the next into registers, fill tile i + 3 ..... |
    first     | scores i | softmax i | output i | scores i + 2 ...                           |
    second              | scores i + 1 | softmax i + 1 | output i + 1 | scores i + 3 ...     |

Tokens, and then dims, are the 64 rows that a matrix instruction needs, heads its columns, so that
few heads waste nothing. The formula, arguments and results are those of `triton.sparse_mla`.
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

from topkapi.kernels.hopper.gather import (
    COPIED,
    LATENT_DIM,
    ROPE_DIM,
    copy,
    gather_fp8,
    places,
)
from topkapi.kernels.hopper.softmax import (
    LOWEST,
    close,
    counted,
    exponents,
    exponents_fp8,
    shrink_query,
    start_query,
    wait_for_query,
)
from topkapi.kernels.triton.zero_unseen import zero_unseen


@gluon.jit
def _compute(
    sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope, stretches,
    latents, ropes, tokens, weights, bests, full, empty, ready, FIRST: gl.constexpr,
    GROUPS: gl.constexpr, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_CAP: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and output of tiles FIRST, FIRST + GROUPS, ..., and the first one's end."""
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    N: gl.constexpr = latents.shape[1]
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORE)
    weights = weights.index(FIRST)
    stretch = gl.full([BLOCK_H], 1.0, gl.float32, layout=HEADS)
    if FP8:
        stretch = stretches.load(HEADS)
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    # Summed over tokens at the end: one pass across the warps less in each tile.
    totals = gl.full([N, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    sums = gl.full([LATENT_DIM, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    zero = gl.full([N, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    for tile in range(FIRST, tiles, GROUPS):
        origin = zero_unseen(tile)
        stage = tile % 2 + origin
        latent = latents.index(stage)
        mbarrier.wait(full.index(stage), (tile // 2) & 1)
        fence_async_shared()
        rope = q_rope.index(origin).permute((1, 0))
        seen = tokens.index(stage).load(gl.SliceLayout(1, SCORE))
        query = q_latent.index(origin).permute((1, 0))
        score = warpgroup_mma(ropes.index(stage), rope, zero, use_acc=False, is_async=True)
        if FP8:
            of_latent = warpgroup_mma(latent, query, zero, use_acc=False, is_async=True)
            score, of_latent = warpgroup_mma_wait(0, deps=[score, of_latent])
            score = exponents_fp8(of_latent, score, stretch, seen, scale, cap, 1, HAS_CAP)
            rate = 1.0
        else:
            score = warpgroup_mma(latent, query, score, is_async=True)
            score = warpgroup_mma_wait(0, deps=[score])
            score, rate = exponents(score, seen, scale, cap, 1, HAS_CAP)
        new_best = gl.maximum(best, gl.max(score, axis=0) * rate)
        weight = gl.exp2(score * rate - new_best[None, :])
        weights.store(weight.to(weights.dtype))
        shrink = gl.exp2(best - new_best)[None, :]
        best = new_best
        totals = totals * shrink + (counted(weight, seen, 1) if FP8 else weight)
        sums = sums * shrink
        fence_async_shared()
        gl.thread_barrier()
        sums = warpgroup_mma(latent.permute((1, 0)), weights, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        # All have read this tile: its buffer and the weights may be written again.
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)

    total = gl.sum(totals, axis=0)
    # The second group leaves its results where its tiles were.
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    others = latents.index(1)._reinterpret(gl.float32, [LATENT_DIM, BLOCK_H], PLAIN)
    if FIRST == 1:
        others.store(sums)
        bests.index(0).store(best)
        bests.index(1).store(total)
        gl.thread_barrier()
        mbarrier.arrive(ready, count=1)
    else:
        if GROUPS == 2:
            mbarrier.wait(ready, 0)
            other_best = bests.index(0).load(HEADS)
            new_best = gl.maximum(best, other_best)
            mine, theirs = gl.exp2(best - new_best), gl.exp2(other_best - new_best)
            total = total * mine + bests.index(1).load(HEADS) * theirs
            sums = sums * mine[None, :] + others.load(SCORE) * theirs[None, :]
            best = new_best
        head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=HEADS)
        inverse, logarithm = close(total, best, sinks, head, H, SPLIT, HAS_SINKS)
        place = gl.program_id(1).to(gl.int64) * rows_stride + row * H
        gl.store(lse + place + head, logarithm, mask=head < H)
        STORE: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [2, 2], [0, 1])
        result = gl.convert_layout((sums * inverse[None, :]).to(out.dtype.element_ty), STORE)
        head = head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, STORE))
        dim = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(1, STORE))
        pointers = out + (place + head)[None, :] * LATENT_DIM + dim[:, None]
        gl.store(pointers, result, mask=(head < H)[None, :])


@gluon.jit
def _compute_first(
    q, sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope,
    stretches, latents, ropes, tokens, weights, bests, full, empty, ready, loaded,
    GROUPS: gl.constexpr, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_CAP: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    wait_for_query()
    if FP8:
        shrink_query(q, q_latent.index(0), stretches, 4)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded, count=1)
    _compute(
        sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope,
        stretches, latents, ropes, tokens, weights, bests, full, empty, ready, 0, GROUPS, H, SPLIT,
        HAS_SINKS, HAS_CAP, FP8,
    )  # fmt: skip


@gluon.jit
def _compute_second(
    sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope, stretches,
    latents, ropes, tokens, weights, bests, full, empty, ready, loaded, H,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    mbarrier.wait(loaded, 0)
    _compute(
        sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap, q_latent, q_rope,
        stretches, latents, ropes, tokens, weights, bests, full, empty, ready, 1, 2, H, SPLIT,
        HAS_SINKS, HAS_CAP, FP8,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits", "H"])
def attend_narrow(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H, W: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
    FP8: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    head_blocks = (H + BLOCK_H - 1) // BLOCK_H
    OPERAND: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    program = gl.program_id(0)
    head_block = program % head_blocks
    row = (program // head_blocks).to(gl.int64)
    slots += row * slots_stride
    latents = gl.allocate_shared_memory(OPERAND, [2, BLOCK_N, LATENT_DIM], SHARED)
    ropes = gl.allocate_shared_memory(q.dtype.element_ty, [2, BLOCK_N, ROPE_DIM], SHARED)
    tokens = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=2 * COPIED if FP8 else COPIED)
        mbarrier.init(empty.index(stage), count=1)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_H, 16, rank=2)
    weights = gl.allocate_shared_memory(OPERAND, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    bests = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], VECTOR)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(loaded, count=1)
    q_latent = gl.allocate_shared_memory(OPERAND, [1, BLOCK_H, LATENT_DIM], SHARED)
    q_rope = gl.allocate_shared_memory(q.dtype.element_ty, [1, BLOCK_H, ROPE_DIM], SHARED)
    stretches = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    start_query(q, row, head_block, q_latent.index(0), q_rope.index(0), H, 4)
    begin, end = places(slots, K, splits, BLOCK_N, SPLIT)
    tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
    # Tuples are written out: a constexpr in a named tuple would become a run-time value.
    if FP8 and GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute_first, (q, sinks, out, lse, row, head_block, tiles, rows_stride, scale,
                                  cap, q_latent, q_rope, stretches, latents, ropes, tokens, weights,
                                  bests, full, empty, ready, loaded, 2, H, SPLIT, HAS_SINKS,
                                  HAS_CAP, FP8)),
                (_compute_second, (sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap,
                                   q_latent, q_rope, stretches, latents, ropes, tokens, weights,
                                   bests, full, empty, ready, loaded, H, SPLIT, HAS_SINKS, HAS_CAP,
                                   FP8)),
                (gather_fp8, (kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty,
                              W // 4, BLOCK_N, 0, BLOCK_N // 2)),
                (gather_fp8, (kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty,
                              W // 4, BLOCK_N, BLOCK_N // 2, BLOCK_N // 2)),
            ],
            [4, 4, 4], [256 - REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip
    elif FP8:
        gl.warp_specialize(
            [
                (_compute_first, (q, sinks, out, lse, row, head_block, tiles, rows_stride, scale,
                                  cap, q_latent, q_rope, stretches, latents, ropes, tokens, weights,
                                  bests, full, empty, ready, loaded, 1, H, SPLIT, HAS_SINKS,
                                  HAS_CAP, FP8)),
                (gather_fp8, (kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty,
                              W // 4, BLOCK_N, 0, BLOCK_N // 2)),
                (gather_fp8, (kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty,
                              W // 4, BLOCK_N, BLOCK_N // 2, BLOCK_N // 2)),
            ],
            [4, 4], [REGISTERS, REGISTERS],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute_first, (q, sinks, out, lse, row, head_block, tiles, rows_stride, scale,
                                  cap, q_latent, q_rope, stretches, latents, ropes, tokens, weights,
                                  bests, full, empty, ready, loaded, 2, H, SPLIT, HAS_SINKS,
                                  HAS_CAP, FP8)),
                (_compute_second, (sinks, out, lse, row, head_block, tiles, rows_stride, scale, cap,
                                   q_latent, q_rope, stretches, latents, ropes, tokens, weights,
                                   bests, full, empty, ready, loaded, H, SPLIT, HAS_SINKS, HAS_CAP,
                                   FP8)),
                (copy, (kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty, W,
                        BLOCK_N)),
            ],
            [4, 4], [168, 104],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute_first, (q, sinks, out, lse, row, head_block, tiles, rows_stride, scale,
                                  cap, q_latent, q_rope, stretches, latents, ropes, tokens, weights,
                                  bests, full, empty, ready, loaded, 1, H, SPLIT, HAS_SINKS,
                                  HAS_CAP, FP8)),
                (copy, (kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty, W,
                        BLOCK_N)),
            ],
            [4], [104],
        )  # fmt: skip
