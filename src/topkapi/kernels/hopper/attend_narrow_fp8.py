"""sm90 attention over fp8 records for up to 32 heads: who works when, and on which operand.

One partition copies records as they are; two warp groups compute, and take the tiles in turn:

    copying | tile i + 2 ....... | tile i + 3 ....... | tile i + 4 ....... |
    first   | scores i | softmax i | output i | scores i + 2 ...
    second        | scores i + 1 | softmax i + 1 | output i + 1 | scores i + 3 ...

Tokens, and then dims, are the 64 rows that a matrix instruction needs, heads its columns. Codes are
the left operand of both products and become fp16 in the registers that these read (`codes.py`):
nothing dequantised lies in shared memory, which leaves room for four tiles, or with 32 heads three.
In the output's product codes are unscaled, as there are four sets of weights, one with the scales
of each group of dims.

Weights are relative to the maximum of the tiles before, so that the tile's own need not be known
first; a score that exceeds it by SLACK, as in the first tile, has them made once more. The end is
that of `attend_narrow`, with 32 heads half of the dims at a time. The formula, arguments and
results are those of `triton.sparse_mla`; `softmax.py` says what `shift` is.
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

from topkapi.kernels.hopper.codes import (
    PAIRS,
    add_score,
    by_dims,
    by_tokens,
    columns,
    load_query,
    part,
    prepare_query,
)
from topkapi.kernels.hopper.finish import finish, kept
from topkapi.kernels.hopper.gather import (
    COPIED,
    GROUP_DIM,
    GROUPS,
    LATENT_DIM,
    ROPE_DIM,
    copy_codes,
    exponent_of,
    power_of_two,
    tell_count,
    told_count,
)
from topkapi.kernels.hopper.softmax import SLACK, counted, exponents_fp8
from topkapi.kernels.triton.softmax import LOWEST
from topkapi.kernels.triton.zero_unseen import zero_unseen


@gluon.jit
def _score(zero, codes, parts, query, OPERAND: gl.constexpr, COUNT: gl.constexpr):
    """Start the last product of the scores: one after the other, COUNT pairs of codes each.

    With few heads what is multiplied next is loaded before the product that is waited for.
    """
    AHEAD: gl.constexpr = COUNT == PAIRS
    LAST: gl.constexpr = LATENT_DIM // 2 // COUNT - 1
    score = zero
    following = by_tokens(codes, 0, COUNT, OPERAND)
    for index in gl.static_range(LAST + 1):
        pairs = following
        if AHEAD and index < LAST:
            following = by_tokens(codes, (index + 1) * COUNT, COUNT, OPERAND)
        score = add_score(
            score, pairs, parts[index * COUNT // PAIRS], query, index * COUNT, OPERAND
        )
        if index < LAST and (index > 0 or not AHEAD):
            score = warpgroup_mma_wait(0, deps=[score])
        if not AHEAD and index < LAST:
            following = by_tokens(codes, (index + 1) * COUNT, COUNT, OPERAND)
    return score


@gluon.jit
def _add(even, odd, even_codes, odd_codes, weights):
    """Start adding the products of a group's codes with the weights that hold its scales."""
    even = warpgroup_mma(even_codes, weights, even, is_async=True)
    return even, warpgroup_mma(odd_codes, weights, odd, is_async=True)


@gluon.jit
def _add_now(even, odd, codes, weights, GROUP: gl.constexpr, OPERAND: gl.constexpr):
    even_codes, odd_codes = part(by_dims(codes, GROUP, OPERAND))
    even, odd = _add(even, odd, even_codes, odd_codes, weights)
    return warpgroup_mma_wait(0, deps=[even, odd])


@gluon.jit
def _weigh(score, best, scales, weights, FIRST: gl.constexpr):
    """The weights `[N, BLOCK_H]` relative to `best`; times each group's scales into `weights`.

    Four buffers: between several stores into one the compiler puts barriers.
    """
    weight = gl.exp2(score - best[None, :])
    for group in gl.static_range(GROUPS):
        weights[group].index(FIRST).store((weight * scales[group][:, None]).to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    return weight


@gluon.jit
def _note_excess(score, best, raises):
    """Whether a score exceeds `best` by more than SLACK: each warp's answer into `raises [4]`."""
    BLOCK_H: gl.constexpr = score.shape[1]
    excess = gl.where(score > best[None, :] + SLACK, 1, 0)
    # First over what one thread holds.
    excess = gl.reshape(excess, [4, 2, 8, BLOCK_H // 8, 4, 2])
    excess = gl.max(gl.max(gl.max(excess, axis=5), axis=3), axis=1)
    raises.store(gl.max(gl.reshape(excess, [4, 32]), axis=1))


@gluon.jit
def _by_warp(weight):
    """What a thread's two tokens add up to: `[4, 8, BLOCK_H]` of `[64, BLOCK_H]`."""
    return gl.sum(gl.reshape(weight, [4, 2, 8, weight.shape[1]]), axis=1)


@gluon.jit
def _shrunk(total, factor):
    """What `_by_warp` returned, times a factor `[BLOCK_H]` for each head."""
    HEADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout))
    return total * gl.convert_layout(factor, HEADS)[None, None, :]


@gluon.jit
def _compute(
    sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, stretches, codes, scales,
    ropes, shifts, weights, raises, bests, totals_kept, count, full, empty, ready,
    FIRST: gl.constexpr, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and output of a group's tiles, and its end."""
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    # Dims whose sums of all heads fit in a tile's codes.
    DIMS: gl.constexpr = LATENT_DIM * 16 // BLOCK_H
    N: gl.constexpr = codes.shape[1]
    STAGES: gl.constexpr = codes.shape[0]
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORE)
    TOKENS: gl.constexpr = gl.SliceLayout(1, SCORE)
    WARPS: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    AHEAD: gl.constexpr = BLOCK_H == 16
    stretch = stretches.load(HEADS)
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    zero = gl.full([N, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    total = _by_warp(zero)
    # Of each group of dims the even and the odd ones: [64, BLOCK_H].
    e0, e1, e2, e3 = zero, zero, zero, zero
    o0, o1, o2, o3 = zero, zero, zero, zero
    tiles = told_count(count)
    for tile in range(FIRST, tiles, 2):
        origin = zero_unseen(tile)
        stage = tile % STAGES + origin
        query = q_latent.index(origin)
        mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
        fence_async_shared()
        scale_0, scale_1, scale_2, scale_3 = columns(scales.index(stage), TOKENS)
        largest = gl.maximum(gl.maximum(scale_0, scale_1), gl.maximum(scale_2, scale_3))
        # Codes (up to 448) times what is left of their scale stay below 448 * 2^7, and weights,
        # up to 2^SLACK, below 2^15.
        shift = exponent_of(largest) - 6
        shrink = power_of_two(-shift)
        scale_0, scale_1 = scale_0 * shrink, scale_1 * shrink
        scale_2, scale_3 = scale_2 * shrink, scale_3 * shrink
        held = codes.index(stage)
        parts = (scale_0, scale_1, scale_2, scale_3)
        score = _score(zero, held, parts, query, OPERAND, PAIRS if AHEAD else PAIRS // 2)
        if AHEAD:
            turned_0 = by_dims(held, 0, OPERAND)
        missing = shifts.index(stage).load(TOKENS)
        grown = power_of_two(shift)
        score = warpgroup_mma_wait(0, deps=[score])
        score = score * grown[:, None]
        rope = q_rope.index(origin).permute((1, 0))
        score = warpgroup_mma(ropes.index(stage), rope, score, is_async=True)
        if AHEAD:
            even_0, odd_0 = part(turned_0)
            turned_1 = by_dims(held, 1, OPERAND)
        score = warpgroup_mma_wait(0, deps=[score])
        shift = shift.to(gl.float32) + missing
        score = exponents_fp8(score, stretch, shift, scale, cap, 1, HAS_CAP)
        # Relative to the maximum so far: what the tile's is need not be known before.
        _note_excess(score, best, raises.index(FIRST))
        weight = _weigh(score, best, parts, weights, FIRST)
        if gl.max(raises.index(FIRST).load(WARPS), axis=0) > 0:
            top = gl.max(score, axis=0)
            new_best = gl.where(top > best + SLACK, top, best)
            factor = gl.exp2(best - new_best)
            best = new_best
            total = _shrunk(total, factor)
            factor = factor[None, :]
            e0, e1, e2, e3 = e0 * factor, e1 * factor, e2 * factor, e3 * factor
            o0, o1, o2, o3 = o0 * factor, o1 * factor, o2 * factor, o3 * factor
            weight = _weigh(score, best, parts, weights, FIRST)
        total += _by_warp(counted(weight, grown, 1))
        if AHEAD:
            e0, o0 = _add(e0, o0, even_0, odd_0, weights[0].index(FIRST))
            even_1, odd_1 = part(turned_1)
            turned_2 = by_dims(held, 2, OPERAND)
            e1, o1 = _add(e1, o1, even_1, odd_1, weights[1].index(FIRST))
            e0, o0, e1, o1 = warpgroup_mma_wait(0, deps=[e0, o0, e1, o1])
            even_2, odd_2 = part(turned_2)
            turned_3 = by_dims(held, 3, OPERAND)
            e2, o2 = _add(e2, o2, even_2, odd_2, weights[2].index(FIRST))
            e2, o2 = warpgroup_mma_wait(0, deps=[e2, o2])
            even_3, odd_3 = part(turned_3)
            e3, o3 = _add(e3, o3, even_3, odd_3, weights[3].index(FIRST))
            e3, o3 = warpgroup_mma_wait(0, deps=[e3, o3])
        else:
            e0, o0 = _add_now(e0, o0, held, weights[0].index(FIRST), 0, OPERAND)
            e1, o1 = _add_now(e1, o1, held, weights[1].index(FIRST), 1, OPERAND)
            e2, o2 = _add_now(e2, o2, held, weights[2].index(FIRST), 2, OPERAND)
            e3, o3 = _add_now(e3, o3, held, weights[3].index(FIRST), 3, OPERAND)
        # All have read this tile: its buffer and the weights may be written again.
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)

    # The first two tiles are filled in any case, and this group's results may go there.
    if tiles <= FIRST:
        mbarrier.wait(full.index(FIRST), 0)
    bests.index(FIRST).store(best)
    totals_kept.index(FIRST).permute((1, 0)).store(gl.sum(total, axis=1))
    mine = kept(codes.index(_last(tiles, FIRST, STAGES)), BLOCK_H, DIMS)
    first = kept(codes.index(_last(tiles, 0, STAGES)), BLOCK_H, DIMS)
    second = kept(codes.index(_last(tiles, 1, STAGES)), BLOCK_H, DIMS)
    mine.slice(0, GROUP_DIM, dim=1).store(_joined(e0, o0))
    mine.slice(GROUP_DIM, GROUP_DIM, dim=1).store(_joined(e1, o1))
    if DIMS == LATENT_DIM:
        mine.slice(2 * GROUP_DIM, GROUP_DIM, dim=1).store(_joined(e2, o2))
        mine.slice(3 * GROUP_DIM, GROUP_DIM, dim=1).store(_joined(e3, o3))
    _finish_when(
        ready, sinks, out, lse, row, rows_stride, first, second, bests, totals_kept, FIRST, 0, H,
        SPLIT, HAS_SINKS,
    )  # fmt: skip
    if DIMS < LATENT_DIM:
        # Once both groups have read that.
        gl.thread_barrier()
        mbarrier.arrive(ready, count=1)
        mbarrier.wait(ready, 1)
        mine.slice(0, GROUP_DIM, dim=1).store(_joined(e2, o2))
        mine.slice(GROUP_DIM, GROUP_DIM, dim=1).store(_joined(e3, o3))
        _finish_when(
            ready, sinks, out, lse, row, rows_stride, first, second, bests, totals_kept, FIRST,
            DIMS, H, SPLIT, HAS_SINKS,
        )  # fmt: skip


@gluon.jit
def _last(tiles, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """The buffer of a group's last tile, which nobody else uses any more."""
    return (GROUP + gl.maximum(tiles - 1 - GROUP, 0) // 2 * 2) % STAGES


@gluon.jit
def _finish_when(
    ready, sinks, out, lse, row, rows_stride, first, second, bests, totals_kept,
    GROUP: gl.constexpr, FIRST_DIM: gl.constexpr, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """`finish`, as soon as both groups have left sums: in the first or third phase of `ready`."""
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, 0)
    finish(
        sinks, out, lse, row, rows_stride, first, second, bests, totals_kept, GROUP, 2, FIRST_DIM,
        H, SPLIT, HAS_SINKS,
    )  # fmt: skip


@gluon.jit
def _joined(even, odd):
    """A group's dims `[BLOCK_H, 128]`."""
    both = gl.permute(gl.join(even, odd), (1, 0, 2))
    return gl.reshape(both, [both.shape[0], GROUP_DIM])


@gluon.jit
def _first(
    q, slots, K, splits, sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, stretches,
    codes, scales, ropes, shifts, weights, raises, bests, totals_kept, count, full, empty, ready,
    known, loaded, H, SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    latent = load_query(q, row, BLOCK_H, 0, LATENT_DIM, H)
    rope = load_query(q, row, BLOCK_H, LATENT_DIM, ROPE_DIM, H)
    tell_count(slots, K, splits, count, known, codes.shape[1], 1)
    prepare_query(latent, rope, q_latent.index(0), q_rope.index(0), stretches)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(loaded, count=1)
    _compute(
        sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, stretches, codes, scales,
        ropes, shifts, weights, raises, bests, totals_kept, count, full, empty, ready, 0, H, SPLIT,
        HAS_SINKS, HAS_CAP,
    )  # fmt: skip


@gluon.jit
def _second(
    sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, stretches, codes, scales,
    ropes, shifts, weights, raises, bests, totals_kept, count, full, empty, ready, loaded, H,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    mbarrier.wait(loaded, 0)
    _compute(
        sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, stretches, codes, scales,
        ropes, shifts, weights, raises, bests, totals_kept, count, full, empty, ready, 1, H, SPLIT,
        HAS_SINKS, HAS_CAP,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits", "H"])
def attend_narrow_fp8(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H, W: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program for each row and split of it; BLOCK_H (16 or 32) holds all H heads.

    Launched before the kernel ahead of it has ended, it waits before it reads anything.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_H, 16, rank=2)
    row = gl.program_id(0).to(gl.int64)
    slots += row * slots_stride
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, LATENT_DIM // 2], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, ROPE_DIM], SHARED)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N, GROUPS], PLAIN)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], VECTOR)
    weights_0 = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    weights_1 = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    weights_2 = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    weights_3 = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    weights = (weights_0, weights_1, weights_2, weights_3)
    raises = gl.allocate_shared_memory(gl.int32, [2, 4], VECTOR)
    q_latent = gl.allocate_shared_memory(gl.float16, [1, BLOCK_H, LATENT_DIM], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, ROPE_DIM], SHARED)
    stretches = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    bests = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], VECTOR)
    totals_kept = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H, 4], PLAIN)
    count = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=COPIED)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(known, count=1)
    mbarrier.init(loaded, count=1)
    mbarrier.init(ready, count=2)
    gdc_wait()
    gl.warp_specialize(
        [
            (_first, (q, slots, K, splits, sinks, out, lse, row, rows_stride, scale, cap, q_latent,
                      q_rope, stretches, codes, scales, ropes, shifts, weights, raises, bests,
                      totals_kept, count, full, empty, ready, known, loaded, H, SPLIT, HAS_SINKS,
                      HAS_CAP)),
            (_second, (sinks, out, lse, row, rows_stride, scale, cap, q_latent, q_rope, stretches,
                       codes, scales, ropes, shifts, weights, raises, bests, totals_kept, count,
                       full, empty, ready, loaded, H, SPLIT, HAS_SINKS, HAS_CAP)),
            (copy_codes, (kv, slots, K, splits, count, known, codes, scales, ropes, shifts, full,
                          empty, W // 4, BLOCK_N)),
        ],
        [4, 4], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
