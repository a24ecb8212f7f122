"""Collecting a row's candidates, choosing among them, and writing the choice out.

A comparison with the floor is one bit, and 32 neighbouring columns are a word: from words on, work
is done only for what was found, and a sum of set bits gives each candidate its place, in order. The
choice is exact: all above the k-th highest key, and the first of those equal to it. Knows nothing
of launches, nor of how many programs share a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkapi.kernels.triton.thresholds import (
    LOWEST,
    _key,
    _logit,
    _reach,
    _reach_in_memory,
)

# Columns that are looked through, or written, at a time where a row is not held.
STRIP = tl.constexpr(4096)


@triton.jit
def _ones(word):
    """How many bits of a uint32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _total_and_most(total, most, more, other):
    return total + more, tl.maximum(most, other)


@triton.jit
def _quads(N: tl.constexpr):
    """0 .. N-1 as `[N / 4, 4]`: four neighbours to a thread, which ranks them by itself."""
    return 4 * tl.arange(0, N // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def _ranks(count):
    """Running sum over `[N, 4]`, and the whole sum: one scan over N."""
    inner = tl.cumsum(count, axis=1)
    group = tl.sum(count, axis=1)
    return (tl.cumsum(group, axis=0) - group)[:, None] + inner, tl.sum(group, axis=0)


@triton.jit
def _note(line, word, first, count, values, positions, LIMIT: tl.constexpr, WORDS: tl.constexpr):
    """Append the columns whose bits are set, and what stands in them; return the new count.

    Nothing is written past LIMIT, but all are counted.
    """
    ones = _ones(word)
    total, most = tl.reduce((ones, ones), 0, _total_and_most)
    place = count + tl.cumsum(ones, axis=0) - ones
    base = first + 32 * tl.arange(0, WORDS)
    for _ in range(tl.where(count < LIMIT, most, 0)):
        low = word & (0 - word)
        # A power of two as a float: its exponent says which bit it is.
        column = base + ((low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127)
        tl.store(positions + place, column, mask=(word != 0) & (place < LIMIT))
        word ^= low
        place += 1
    tl.debug_barrier()
    # The values apart, while the columns are still in the first-level cache: all loads at once.
    end = tl.minimum(count + total, LIMIT)
    for begin in range(count, end, 512):
        index = begin + tl.arange(0, 512)
        here = index < end
        column = tl.load(positions + index, mask=here, other=0)
        tl.store(values + index, tl.load(line + column, mask=here, other=0.0), mask=here)
    return count + total


@triton.jit
def _compare(line, first, end, least, words, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """One bit for each of BLOCK columns: whether its logit is at least `least`."""
    group = tl.arange(0, BLOCK // 32)
    lane = tl.arange(0, 32)
    column = first + 32 * group[:, None] + lane[None, :]
    if WHOLE:
        logit = tl.load(line + column)
    else:
        logit = tl.load(line + column, mask=column < end, other=float("nan"))
    word = tl.sum(tl.where(logit >= least, (1 << lane)[None, :], 0), axis=1)
    # Through memory, so that each word has one owner, not the eight threads that made it.
    tl.store(words + group, word)


@triton.jit
def _collect(
    line, begin, end, floor, k, words, values, positions,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Note every column of `begin : end` that may be among the k highest; return how many.

    Once k logits at the floor or above are noted, none at the floor itself may be: plateaus of
    equal logits cost nothing. NaN is not noted: a floor above -inf excludes it.
    """
    WORDS: tl.constexpr = BLOCK // 32
    # One place in each 32 bytes of the next block: it comes closer while this one is worked on.
    sector = tl.arange(0, BLOCK // 8)
    coming = tl.zeros([BLOCK // 8], tl.float32)
    come = tl.zeros([BLOCK // 8], tl.float32)
    count = 0
    for first in range(begin, end, BLOCK):
        least = _logit(tl.where(count < k, floor, floor + 1))
        if first + BLOCK <= end:
            _compare(line, first, end, least, words, BLOCK, True)
        else:
            _compare(line, first, end, least, words, BLOCK, False)
        come += coming
        ahead = first + BLOCK + 8 * sector
        coming = tl.load(line + ahead, mask=ahead < end, other=0.0)
        tl.debug_barrier()
        word = tl.load(words + tl.arange(0, WORDS)).to(tl.uint32, bitcast=True)
        count = _note(line, word, first, count, values, positions, LIMIT, WORDS)
    # Never written, but the compiler cannot know: what nobody needs it would not load.
    tl.store(values + sector, come + coming, mask=(sector < LIMIT) & (floor == 0))
    return count


@triton.jit
def _give(out, place, position, keep, row, request_of_row, table, table_rows, context_starts,
          table_stride, SLOTS: tl.constexpr, PAGED: tl.constexpr):  # fmt: skip
    """Write chosen positions out, as themselves or as the slots that hold them."""
    if SLOTS:
        request = tl.load(request_of_row + row)
        if PAGED:
            page_row = table + tl.load(table_rows + request).to(tl.int64) * table_stride
            position = tl.load(page_row + position, mask=keep, other=-1).to(tl.int32)
        else:
            position = (tl.load(context_starts + request) + position).to(tl.int32)
    tl.store(out + place, position, mask=keep)


@triton.jit
def _first_of_equal(logit, index, inside, low, count, over, k, HELD: tl.constexpr):
    """Which logits are the k highest, where `count` reach the key `low`, and `over` of them more.

    `inside` tells real logits from padding, which is NaN too.
    """
    least = _logit(low)
    keep = logit >= least
    if count > k:
        # Among equal logits the lowest index is the highest of these.
        equal = ((logit == least) | ((logit != logit) & (low <= LOWEST))) & inside
        backwards = tl.where(equal, (HELD - index).to(tl.float32), float("nan"))
        none = tl.full([], LOWEST, tl.uint32)
        last = _key(tl.full([], 1.0, tl.float32))
        most = _key(tl.full([], HELD + 1, tl.float32))
        last, _, _ = _reach(backwards, none, most, last, HELD, k - over, k - over)
        keep = (logit > least) | (backwards >= _logit(last))
    return keep


@triton.jit
def _highest(logit, index, size, floor, k, HELD: tl.constexpr):
    """Which of `size` logits are the k highest, the first of equal ones. NaN stands outside.

    `floor` is a key that all of them reach.
    """
    first = _key(tl.min(tl.min(logit, axis=1), axis=0))
    high = _key(tl.max(tl.max(logit, axis=1), axis=0)) + 1
    low, count, over = _reach(logit, tl.maximum(floor, LOWEST), high, first, size, k, k)
    return _first_of_equal(logit, index, index < size, low, count, over, k, HELD)


@triton.jit
def _highest_in_memory(
    source, positions, listed, size, floor, k, out, row,
    request_of_row, table, table_rows, context_starts, table_stride,
    SLOTS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write the k highest of `size` logits in memory: a whole row, or a list with its positions."""
    threshold, need = _reach_in_memory(source, size, k, floor, STRIP)
    above = 0
    equal = 0
    for first in range(0, size, STRIP):
        index = first + _quads(STRIP)
        inside = index < size
        key = _key(tl.load(source + index, mask=inside, other=0.0))
        higher = ((key > threshold) & inside).to(tl.int32)
        level = ((key == threshold) & inside).to(tl.int32)
        # Both counts ride in one scan: a strip has fewer than 2^15 keys.
        both, total = _ranks(higher + (level << 16))
        level_rank = equal + (both >> 16)
        keep = (higher > 0) | ((level > 0) & (level_rank <= need))
        place = above + (both & 0xFFFF) + tl.minimum(level_rank, need) - 1
        above += total & 0xFFFF
        equal += total >> 16
        position = index
        if listed:
            position = tl.load(positions + index, mask=keep, other=0)
        _give(out, place, position, keep, row, request_of_row, table, table_rows, context_starts,
              table_stride, SLOTS, PAGED)  # fmt: skip


@triton.jit
def _give_all(out, length, k, row, request_of_row, table, table_rows, context_starts,
              table_stride, SLOTS: tl.constexpr, PAGED: tl.constexpr):  # fmt: skip
    """Write a row's every position if k or fewer, and the -1 behind them in any case."""
    if length <= k:
        for first in range(0, length, STRIP):
            position = first + tl.arange(0, STRIP)
            _give(out, position, position, position < length, row, request_of_row, table,
                  table_rows, context_starts, table_stride, SLOTS, PAGED)  # fmt: skip
    for first in range(length, k, STRIP):
        place = first + tl.arange(0, STRIP)
        tl.store(out + place, tl.full([STRIP], -1, tl.int32), mask=place < k)
