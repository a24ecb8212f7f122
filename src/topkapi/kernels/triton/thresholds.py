"""The k-th highest of many logits: keys in the order of their values, and searches for a threshold.

    key(x) = bits(x) with the order of unsigned integers; -0.0 as 0.0, NaN as -inf

Brackets are halved among keys, but what is compared are the logits themselves: no key is ever made
of most of them. A NaN reaches no threshold above LOWEST, the key of -inf, as it should.

A search keeps a bracket: at least k keys reach `low`, fewer reach `high`. The next trial is where k
would lie on a line between the two counts: ordinary data are done in five to ten steps. After
`LINEAR` steps it is the middle, so that 32 more end any search. A trial that parted nothing has
fallen among equal logits or into a gap: then the bracket is drawn in to the logits that are there.
Where `low + 1 == high`, `low` is the k-th highest key itself. Knows nothing of rows or launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINEAR = tl.constexpr(10)
# The key of -inf, which no key is below.
LOWEST = tl.constexpr(0x007FFFFF)


@triton.jit
def _key(logit):
    """fp32 to uint32 in the same order; NaN becomes -inf, -0.0 becomes 0.0."""
    logit = tl.where(logit == logit, logit, float("-inf"))
    logit = tl.where(logit == 0.0, 0.0, logit)
    bits = logit.to(tl.int32, bitcast=True)
    flip = (bits >> 31) | -2147483648
    return (bits ^ flip).to(tl.uint32, bitcast=True)


@triton.jit
def _logit(key):
    """The fp32 value of a key: the inverse of `_key`."""
    bits = key.to(tl.int32, bitcast=True)
    flip = ~(bits >> 31) | -2147483648
    return (bits ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def _trial(low, high, count, over, k, step):
    """The next threshold to try between low, which `count` keys reach, and high (`over` do)."""
    share = (count - k).to(tl.float32) / (count - over).to(tl.float32)
    line = low + ((high - low).to(tl.float32) * share).to(tl.uint32)
    trial = tl.where(step < LINEAR, line, low + ((high - low) >> 1))
    return tl.maximum(tl.minimum(tl.maximum(trial, low + 1), high - 1), low)


@triton.jit
def _reach(logit, low, high, first, size, k, most):
    """A threshold that k to `most` of the logits in registers reach, or else the k-th highest.

    It, the bracket and the first trial are keys. All `size` logits count as reaching `low`, NaN
    among them only there, and none reaches `high`. Returns the threshold, how many reach it, and
    how many the lowest trial that fewer than k did.
    """
    count = size
    over = 0
    step = 0
    idle = 0
    trial = tl.maximum(tl.minimum(first, high - 1), low)
    while (high - low > 1) & (count > most):
        if step > 0:
            if (idle > 0) & (low > LOWEST):
                low = _key(tl.min(tl.where(logit >= _logit(low), logit, float("inf"))))
                below = tl.where(logit >= _logit(high), float("-inf"), logit)
                high = _key(tl.max(below)) + 1
            trial = _trial(low, high, count, over, k, step)
        reach = tl.sum((logit >= _logit(trial)).to(tl.int32))
        # NaN reach nothing, but count at the low end.
        enough = (reach >= k) | (trial == low)
        idle = ((step > 0) & ((reach == count) | (reach == over))).to(tl.int32)
        low = tl.where(enough, trial, low)
        count = tl.where(enough & (trial > LOWEST), reach, count)
        high = tl.where(enough, high, trial)
        over = tl.where(enough, over, reach)
        step += 1
    return low, count, over


@triton.jit
def _reach_two(logit, low, high, count, k, most):
    """As `_reach`, where waiting, not work, is what a trial costs: two thresholds at a time.

    `count` logits reach `low`. Two counts ride in one sum: there are fewer than 2^15 logits.
    """
    over = 0
    step = 0
    idle = 0
    while (high - low > 1) & (count > most):
        if (idle > 0) & (low > LOWEST):
            low = _key(tl.min(tl.where(logit >= _logit(low), logit, float("inf"))))
            below = tl.where(logit >= _logit(high), float("-inf"), logit)
            high = _key(tl.max(below)) + 1
        between = (count - over).to(tl.float32)
        wide = (high - low).to(tl.float32)
        # On both sides of where k would lie on a line, as far as equal chances scatter it.
        margin = tl.where(step == 0, 0.05 * between, 0.3 * tl.sqrt(between))
        want = (count - k).to(tl.float32)
        scale = wide / between
        one = tl.where(step < LINEAR, tl.maximum((want - margin) * scale, 0.0), 0.333 * wide)
        two = tl.where(step < LINEAR, tl.minimum((want + margin) * scale, wide), 0.667 * wide)
        lower = low + one.to(tl.uint32)
        lower = tl.maximum(tl.minimum(tl.maximum(lower, low + 1), high - 1), low)
        upper = low + two.to(tl.uint32)
        upper = tl.maximum(tl.minimum(tl.maximum(upper, lower), high - 1), low)
        reached = (logit >= _logit(lower)).to(tl.int32)
        both = tl.sum(reached + ((logit >= _logit(upper)).to(tl.int32) << 16))
        by_lower = both & 0xFFFF
        by_upper = both >> 16
        before = count - over
        enough = by_lower >= k
        ample = by_upper >= k
        low = tl.where(ample, upper, tl.where(enough, lower, low))
        count = tl.where(ample, by_upper, tl.where(enough, by_lower, count))
        high = tl.where(ample, high, tl.where(enough, upper, lower))
        over = tl.where(ample, over, tl.where(enough, by_upper, by_lower))
        idle = (count - over == before).to(tl.int32)
        step += 1
    return low, count, over


@triton.jit
def _spread(length, SAMPLE: tl.constexpr, RUN: tl.constexpr):
    """Columns of a sample: RUN neighbours in each of SAMPLE / RUN equal stretches of a row.

    Their offsets follow no period; a run costs the memory no more than one of its members would.
    """
    draw = tl.arange(0, SAMPLE)
    runs: tl.constexpr = SAMPLE // RUN
    units = length // RUN
    run = draw // RUN
    jitter = ((run * 40503 + 30011) & 0xFFFF) * (units // runs) >> 16
    return ((run.to(tl.int64) * units // runs).to(tl.int32) + jitter) * RUN + draw % RUN


@triton.jit
def _floor_of_sample(line, length, k, SAMPLE: tl.constexpr, RUN: tl.constexpr):
    """A key that about k + slack of a long row's keys exceed, from a sample of them."""
    logit = tl.load(line + _spread(length, SAMPLE, RUN))
    share = k.to(tl.float32) * SAMPLE / length.to(tl.float32)
    need = tl.minimum((share + 5.0 * tl.sqrt(share) + 4.0).to(tl.int32), SAMPLE)
    low = tl.full([], LOWEST, tl.uint32)
    first = _key(tl.min(logit))
    high = _key(tl.max(logit)) + 1
    floor, _, _ = _reach(logit, low, high, first, SAMPLE, need, need + need // 16)
    return floor


@triton.jit
def _reach_in_memory(source, size, k, floor, BLOCK: tl.constexpr):
    """The k-th highest key of `size` logits in memory, as `low` and `need`.

    Every key above `low` is among the k highest, and the first `need` of those equal to it. A
    plateau at `floor` or just above is tried first.
    """
    low = tl.full([], LOWEST, tl.uint32)
    high = tl.full([], 0xFFFFFFFF, tl.uint32)
    count = size
    over = 0
    step = 0
    trial = tl.maximum(floor, low) + 1
    while (high - low > 1) & (count != k):
        least = _logit(trial)
        reached = tl.zeros([BLOCK], tl.int32)
        for first in range(0, size, BLOCK):
            index = first + tl.arange(0, BLOCK)
            logit = tl.load(source + index, mask=index < size, other=float("nan"))
            reached += (logit >= least).to(tl.int32)
        reach = tl.sum(reached, axis=0)
        enough = reach >= k
        low = tl.where(enough, trial, low)
        count = tl.where(enough, reach, count)
        high = tl.where(enough, high, trial)
        over = tl.where(enough, over, reach)
        below = (step == 0) & (high == floor + 1) & (floor > low)
        trial = tl.where(below, floor, _trial(low, high, count, over, k, step))
        step += 1
    exact = (count == k) & (low > LOWEST)
    return tl.where(exact, low - 1, low), tl.where(exact, 0, k - over)
