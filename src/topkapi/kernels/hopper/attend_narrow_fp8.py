"""sm90 attention over fp8 records for up to 32 heads: who works when, and on which operand.

One partition copies records as they are; two groups of warps score tiles in turn and make weights
of that; one sums up what these weigh:

    copying | tile i + 2 ....... | tile i + 3 ....... | tile i + 4 .......
    first   | scores i ....... | weights i |    | scores i + 2 ..... | weights i + 2 |
    second         | scores i + 1 ....... | weights i + 1 |    | scores i + 3 .....
    summing                          | output i | output i + 1 | output i + 2 |

Tokens, and then dims, are the 64 rows that a matrix instruction needs, heads its columns. Codes are
the left operand of both products and become fp16 in the registers that these read (`codes.py`):
nothing dequantised lies in shared memory, which leaves room for four tiles, or with 32 heads three.
Scales are left out of both products. Those of the scores are applied to the sums of each group of
dims, in fp32; for the output there are four sets of weights, one with the scales of each group.

A tile's weights are relative to what those of the tile before are, or to its own maximum where a
score exceeds that by more than SLACK, as in the first tile. So the groups that score tell each
other, and the one that sums up, which rescales its sums then. The formula, arguments and results
are those of `triton.sparse_mla`; `softmax.py` says what `shift` is.
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
    by_dims,
    by_tokens,
    columns,
    prepare_query,
    start_score,
    turned,
)
from topkapi.kernels.hopper.gather import (
    COPIED,
    GROUP_DIM,
    GROUPS,
    LATENT_DIM,
    ROPE_DIM,
    told_count,
)
from topkapi.kernels.hopper.gather_codes import LINES, copy_codes, list_turns, load_turns
from topkapi.kernels.hopper.softmax import (
    SLACK,
    close,
    counted,
    exponents_fp8,
    raised,
    start_query,
    wait_for_query,
)
from topkapi.kernels.triton.powers_of_two import exponent_of, power_of_two
from topkapi.kernels.triton.softmax import LOWEST
from topkapi.kernels.triton.zero_unseen import zero_unseen


@gluon.jit
def _score(score, zero, codes, scales, query, OPERAND: gl.constexpr):
    """Add to the product with the ropes, which is under way, those with each group's codes.

    With few heads a group's codes are loaded before the product ahead of it is waited for.
    """
    AHEAD: gl.constexpr = query.shape[0] == 16
    first, second = by_tokens(codes, 0, OPERAND)
    for group in gl.static_range(GROUPS):
        product = start_score(first, second, query, zero, group)
        if AHEAD and group < GROUPS - 1:
            first, second = by_tokens(codes, group + 1, OPERAND)
        product, score = warpgroup_mma_wait(0, deps=[product, score])
        score += product * scales[group][:, None]
        if not AHEAD and group < GROUPS - 1:
            first, second = by_tokens(codes, group + 1, OPERAND)
    return score


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
def _moved(total, best, new_best):
    """What `_by_warp` returned, of weights relative to `best`, relative to `new_best`."""
    HEADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout))
    factor = gl.convert_layout(gl.exp2(best - new_best), HEADS)
    return total * factor[None, None, :]


@gluon.jit
def _score_tiles(
    scale, cap, turns, query, records, weighed, FIRST: gl.constexpr, HAS_CAP: gl.constexpr
):
    """Weights of every other tile from FIRST on, and at the end what they add up to."""
    q_latent, q_rope, stretches, _ = query
    codes, scales, ropes, shifts, full, _ = records
    weights, raises, bests, totals, made, free, summed = weighed
    _, _, _, _, _, count, _ = turns
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    N: gl.constexpr = codes.shape[1]
    STAGES: gl.constexpr = codes.shape[0]
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORE)
    TOKENS: gl.constexpr = gl.SliceLayout(1, SCORE)
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    zero = gl.full([N, BLOCK_H], 0.0, gl.float32, layout=SCORE)
    total = _by_warp(zero)
    tiles = told_count(count)
    for tile in range(FIRST, tiles, 2):
        origin = zero_unseen(tile)
        stage = tile % STAGES + origin
        turn = (tile // 2) & 1
        mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
        fence_async_shared()
        rope = q_rope.index(origin).permute((1, 0))
        score = warpgroup_mma(ropes.index(stage), rope, zero, use_acc=False, is_async=True)
        scale_0, scale_1, scale_2, scale_3 = columns(scales.index(stage), TOKENS)
        parts = (scale_0, scale_1, scale_2, scale_3)
        score = _score(score, zero, codes.index(stage), parts, q_latent.index(origin), OPERAND)
        largest = gl.maximum(gl.maximum(scale_0, scale_1), gl.maximum(scale_2, scale_3))
        # Codes (up to 448) times what is left of their scale stay below 448 * 2^7, and weights,
        # up to 2^SLACK, below 2^15.
        shift = exponent_of(largest) - 6
        shrink = power_of_two(-shift)
        parts = (scale_0 * shrink, scale_1 * shrink, scale_2 * shrink, scale_3 * shrink)
        grown = power_of_two(shift)
        shift = shift.to(gl.float32) + shifts.index(stage).load(TOKENS)
        score = exponents_fp8(score, stretches.load(HEADS), shift, scale, cap, 1, HAS_CAP)
        # What the tile before is relative to: it was the other group's turn.
        mbarrier.wait(made.index(1 - FIRST), turn ^ (1 - FIRST))
        new_best = bests.index(1 - FIRST).load(HEADS)
        total = _moved(total, best, new_best)
        best = new_best
        # This group's last weights have been used.
        mbarrier.wait(free.index(FIRST), turn ^ 1)
        _note_excess(score, best, raises.index(FIRST))
        bests.index(FIRST).store(best)
        weight = _weigh(score, best, parts, weights, FIRST)
        if raised(raises.index(FIRST)):
            top = gl.max(score, axis=0)
            new_best = gl.where(top > best + SLACK, top, best)
            total = _moved(total, best, new_best)
            best = new_best
            bests.index(FIRST).store(best)
            weight = _weigh(score, best, parts, weights, FIRST)
        mbarrier.arrive(made.index(FIRST), count=1)
        total += _by_warp(counted(weight, grown, 1))
    totals.index(FIRST).permute((1, 0)).store(gl.sum(total, axis=1))
    gl.thread_barrier()
    mbarrier.arrive(summed, count=1)


@gluon.jit
def _grow(sums, pairs, codes, weights, which, OPERAND: gl.constexpr):
    """Start adding a tile's weighted codes to the sums; all but the last group's are complete.

    Of each group `sums` has the even and the odd dims. `pairs` are the first group's codes; each
    next one's are loaded before a product is waited for.
    """
    even_codes, odd_codes = by_dims(pairs)
    grown = ()
    for group in gl.static_range(GROUPS):
        mine = weights[group].index(which)
        even = warpgroup_mma(even_codes, mine, sums[2 * group], is_async=True)
        odd = warpgroup_mma(odd_codes, mine, sums[2 * group + 1], is_async=True)
        if group < GROUPS - 1:
            even_codes, odd_codes = by_dims(turned(codes, group + 1, OPERAND))
            even, odd = warpgroup_mma_wait(0, deps=[even, odd])
        grown += (even, odd)  # type: ignore[assignment]
    return grown


@gluon.jit
def _scaled(sums, factor):
    scaled = ()
    for index in gl.static_range(2 * GROUPS):
        scaled += (sums[index] * factor[None, :],)
    return scaled


@gluon.jit
def _total(totals, bests, HEADS: gl.constexpr):
    """The denominator, from both groups that score, and what it is relative to."""
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    first = gl.convert_layout(gl.sum(totals.index(0).load(FOUR), axis=1), HEADS)
    second = gl.convert_layout(gl.sum(totals.index(1).load(FOUR), axis=1), HEADS)
    first_best, second_best = bests.index(0).load(HEADS), bests.index(1).load(HEADS)
    best = gl.maximum(first_best, second_best)
    return first * gl.exp2(first_best - best) + second * gl.exp2(second_best - best), best


@gluon.jit
def _store_group(out, even, odd, inverse, place, there, GROUP: gl.constexpr):
    """A group's dims of the output, even and odd ones `[64, BLOCK_H]`, times `inverse`."""
    both = gl.join(even * inverse[None, :], odd * inverse[None, :])
    LAYOUT: gl.constexpr = both.type.layout
    HEADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    pair = gl.arange(0, GROUP_DIM // 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    place = gl.convert_layout(place, HEADS, assert_trivial=True)
    there = gl.convert_layout(there, HEADS, assert_trivial=True)
    dim = GROUP * GROUP_DIM + 2 * pair[:, None, None] + which[None, None, :]
    pointers = out + place[None, :, None] * LATENT_DIM + dim
    gl.store(pointers, both.to(out.dtype.element_ty), mask=there[None, :, None])


@gluon.jit
def _sum_up(
    result, turns, records, weighed, BLOCK_H: gl.constexpr, H, SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """The output: every tile's codes times its weights, and at the end its division and storing."""
    sinks, out, lse, row, rows_stride = result
    codes, _, _, _, full, empty = records
    weights, raises, bests, totals, made, free, summed = weighed
    _, _, _, _, _, count, known = turns
    STAGES: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HEADS: gl.constexpr = gl.SliceLayout(0, SUMS)
    best = gl.full([BLOCK_H], LOWEST, gl.float32, layout=HEADS)
    zero = gl.full([N, BLOCK_H], 0.0, gl.float32, layout=SUMS)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    mbarrier.wait(known, 0)
    tiles = told_count(count)
    # The first two tiles are filled in any case.
    mbarrier.wait(full.index(0), 0)
    pairs = turned(codes.index(0), 0, OPERAND)
    for tile in range(tiles):
        origin = zero_unseen(tile)
        stage = tile % STAGES + origin
        which = tile % 2 + origin
        mbarrier.wait(made.index(which), (tile // 2) & 1)
        if raised(raises.index(which)):
            new_best = bests.index(which).load(HEADS)
            sums = _scaled(sums, gl.exp2(best - new_best))
            best = new_best
        sums = _grow(sums, pairs, codes.index(stage), weights, which, OPERAND)
        following = (tile + 1) % STAGES + origin
        if tile + 1 < tiles:
            mbarrier.wait(full.index(following), ((tile + 1) // STAGES) & 1)
        pairs = turned(codes.index(following), 0, OPERAND)
        sums = warpgroup_mma_wait(0, deps=sums)
        # All have read this tile: its buffer and the weights may be written again.
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(free.index(which), count=1)
    if tiles < 2:
        mbarrier.wait(full.index(1), 0)
    mbarrier.wait(summed, 0)
    total, best = _total(totals, bests, HEADS)
    head = gl.arange(0, BLOCK_H, layout=HEADS)
    inverse, logarithm = close(total, best, sinks, head, H, SPLIT, HAS_SINKS)
    place = gl.program_id(1).to(gl.int64) * rows_stride + row * H + head
    gl.store(lse + place, logarithm, mask=head < H)
    for group in gl.static_range(GROUPS):
        even, odd = sums[2 * group], sums[2 * group + 1]
        _store_group(out, even, odd, inverse, place, head < H, group)


@gluon.jit
def _score_first(loaded, scale, cap, turns, query, records, weighed, HAS_CAP: gl.constexpr):
    """Slots, query and what the first weights are relative to; then the even tiles."""
    q_latent, q_rope, stretches, prepared = query
    codes, _, _, _, _, _ = records
    _, _, bests, _, _, _, _ = weighed
    BLOCK_H: gl.constexpr = q_latent.shape[1]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    list_turns(loaded, turns, codes.shape[1])
    lowest = gl.full([BLOCK_H], LOWEST, gl.float32, layout=ONE)
    bests.index(0).store(lowest)
    bests.index(1).store(lowest)
    wait_for_query()
    prepare_query(q_latent.index(0), q_rope.index(0), stretches)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(prepared, count=1)
    _score_tiles(scale, cap, turns, query, records, weighed, 0, HAS_CAP)


@gluon.jit
def _score_second(scale, cap, turns, query, records, weighed, HAS_CAP: gl.constexpr):
    """The odd tiles."""
    _, _, _, prepared = query
    mbarrier.wait(prepared, 0)
    _score_tiles(scale, cap, turns, query, records, weighed, 1, HAS_CAP)


@gluon.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits", "H"])
def attend_narrow_fp8(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H, W: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_CAP: gl.constexpr,
    STAGES: gl.constexpr, SCORE_REGISTERS: gl.constexpr, SUM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program for each row and split of it; BLOCK_H (16 or 32) holds all H heads.

    Launched before the kernel ahead of it has ended, it waits before it reads anything. Slots and
    query are asked for before the warps part, which takes as long as they do: once records are
    under way, they would come behind those.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_H, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    row = gl.program_id(0).to(gl.int64)
    slots += row * slots_stride
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, LATENT_DIM // 2], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, ROPE_DIM], SHARED)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N, GROUPS], PLAIN)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    weights_0 = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    weights_1 = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    weights_2 = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    weights_3 = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, BLOCK_H], WEIGHTS)
    raises = gl.allocate_shared_memory(gl.int32, [2, 4], VECTOR)
    bests = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], VECTOR)
    totals = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H, 4], PLAIN)
    made = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_latent = gl.allocate_shared_memory(gl.float16, [1, BLOCK_H, LATENT_DIM], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, ROPE_DIM], SHARED)
    stretches = gl.allocate_shared_memory(gl.float32, [BLOCK_H], VECTOR)
    prepared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    lists = gl.allocate_shared_memory(gl.int32, [LINES, BLOCK_N], VECTOR)
    count = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    listed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    known = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=COPIED)
        mbarrier.init(empty.index(stage), count=1)
    for group in gl.static_range(2):
        mbarrier.init(made.index(group), count=1)
        mbarrier.init(free.index(group), count=1)
    mbarrier.init(summed, count=2)
    mbarrier.init(prepared, count=1)
    mbarrier.init(listed, count=1)
    mbarrier.init(known, count=1)
    gdc_wait()
    loaded = load_turns(slots, 0, splits, K, BLOCK_N)
    start_query(q, row, 0, q_latent.index(0), q_rope.index(0), H)
    turns = (slots, K, splits, lists, listed, count, known)
    query = (q_latent, q_rope, stretches, prepared)
    records = (codes, scales, ropes, shifts, full, empty)
    weights = (weights_0, weights_1, weights_2, weights_3)
    weighed = (weights, raises, bests, totals, made, free, summed)
    result = (sinks, out, lse, row, rows_stride)
    gl.warp_specialize(
        [
            (_score_first, (loaded, scale, cap, turns, query, records, weighed, HAS_CAP)),
            (_score_second, (scale, cap, turns, query, records, weighed, HAS_CAP)),
            (_sum_up, (result, turns, records, weighed, BLOCK_H, H, SPLIT, HAS_SINKS)),
            (copy_codes, (kv, turns, records, W // 4)),
        ],
        [4, 4, 4],
        [SCORE_REGISTERS, SUM_REGISTERS, 512 - 2 * SCORE_REGISTERS - SUM_REGISTERS],
    )  # fmt: skip
