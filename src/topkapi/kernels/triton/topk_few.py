"""Exact top-k of a few long rows: many programs collect from a row, and one chooses.

The steps are those of `topk`, but nothing here is about bytes: with a few rows the time is that of
the longest chain of waiting. So a stretch of a row is held in registers while its floor is searched
for, a trial tests two thresholds, and stores keep the layout that the values have. On sm90 and
later each launch starts while the one before it still runs, and waits where its inputs begin.

Before `gdc_wait` a program reads only what no launch of this chain writes (lengths, starts, which
slots a row has), and writes nothing. Every program waits: so a kernel that has waited for the one
before it has waited for all before that one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from topkapi.kernels.triton.candidates import (
    _first_of_equal,
    _give,
    _give_all,
    _highest,
    _highest_in_memory,
    _quads,
    _ranks,
)
from topkapi.kernels.triton.thresholds import LOWEST, _key, _logit, _reach_two, _spread


@triton.jit
def _least_and_most(least, most, other_least, other_most):
    return tl.minimum(least, other_least), tl.maximum(most, other_most)


@triton.jit
def _load_quads(line, begin, end, N: tl.constexpr, ALIGNED: tl.constexpr):
    """Columns `begin : begin + N` as `[N / 4, 4]`, NaN from `end` on. `begin` is a multiple of 4,
    or `end`.

    ALIGNED: four neighbours are one load, also where the last of them lies past `end`: a row's
    stride is a multiple of four, and 16 bytes at a multiple of 16 are on one page of memory.
    """
    quad = tl.multiple_of(begin, 4) + 4 * tl.arange(0, N // 4)
    index = quad[:, None] + tl.arange(0, 4)[None, :]
    inside = index < end
    loaded = inside
    if ALIGNED:
        loaded = tl.broadcast_to((quad < end)[:, None], [N // 4, 4])
    logit = tl.load(line + index, mask=loaded, other=float("nan"))
    return tl.where(inside, logit, float("nan"))


@triton.jit
def _put(pointer, value, keep, PTX: tl.constexpr):
    """`tl.store` of 32 bits each; with PTX the layout is kept, where Triton changes it first."""
    if PTX:
        tl.inline_asm_elementwise(
            """{
                .reg .pred kept;
                setp.ne.s32 kept, $3, 0;
                @kept st.global.b32 [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [pointer.to(tl.int64), value.to(tl.int32, bitcast=True), keep.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointer, value, mask=keep)


@triton.jit
def _highest_listed(logit, index, size, floor, k, HELD: tl.constexpr):
    """Which of `size` logits are the k highest, the first of equal ones. NaN stands between them.

    All of them reach `floor`, a key above LOWEST.
    """
    high = _key(tl.max(tl.max(logit, axis=1), axis=0)) + 1
    low, count, over = _reach_two(logit, floor, high, size, k, k)
    return _first_of_equal(logit, index, logit == logit, low, count, over, k, HELD)


@triton.jit(do_not_specialize=["row_stride", "k", "splits"])
def _collect_few(
    logits, lengths, starts, values, positions, counts, floors, row_stride, k, splits,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, SAMPLE: tl.constexpr, RUN: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One of `splits` stretches of a row, as `topk._collect_rows`."""
    if EARLY:
        gdc_launch_dependents()
    program = tl.program_id(0)
    row = program // splits
    length = tl.load(lengths + row).to(tl.int32)
    count = 0
    if EARLY:
        gdc_wait()
    if (length > HELD) & (length > k):
        line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
        if HAS_STARTS:
            line += tl.load(starts + row)
        span = (((length + splits - 1) // splits + BLOCK - 1) // BLOCK) * BLOCK
        begin = tl.minimum((program % splits) * span, length)
        end = tl.minimum(begin + span, length)
        values += program.to(tl.int64) * HELD
        positions += program.to(tl.int64) * HELD
        sample = tl.load(line + _spread(length, SAMPLE, RUN))
        # On its way while the floor is searched for.
        logit = _load_quads(line, begin, end, BLOCK, STRIDE_UNIT == 4)
        share = k.to(tl.float32) * SAMPLE / length.to(tl.float32)
        need = tl.minimum((share + 5.0 * tl.sqrt(share) + 4.0).to(tl.int32), SAMPLE)
        least, most = tl.reduce((sample, sample), 0, _least_and_most)
        low, high = _key(least), _key(most) + 1
        # NaN are counted at the low end: a floor need not be exact.
        size = tl.full([], SAMPLE, tl.int32)
        floor, _, _ = _reach_two(sample, low, high, size, need, need + need // 16)
        for first in range(begin, end, BLOCK):
            reached = logit >= _logit(tl.where(count < k, floor, floor + 1))
            index = first + _quads(BLOCK)
            coming = _load_quads(line, first + BLOCK, end, BLOCK, STRIDE_UNIT == 4)
            rank, total = _ranks(reached.to(tl.int32))
            place = count + rank - 1
            keep = reached & (place < HELD)
            _put(values + place, logit, keep, PTX)
            _put(positions + place, index, keep, PTX)
            count += total
            logit = coming
        tl.store(floors + row, floor)
    tl.store(counts + program, count)


@triton.jit(do_not_specialize=["row_stride", "k", "splits", "table_stride"])
def _choose_few(
    logits, lengths, starts, values, positions, counts, floors, out,
    request_of_row, table, table_rows, context_starts,
    row_stride, k, splits, table_stride,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, SLOTS: tl.constexpr, PAGED: tl.constexpr,
    MOST_SPLITS: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The choice from what `_collect_few` collected of one row."""
    row = tl.program_id(0)
    length = tl.load(lengths + row).to(tl.int32)
    page_row = table
    origin = 0
    if SLOTS:
        request = tl.load(request_of_row + row)
        if PAGED:
            page_row = table + tl.load(table_rows + request).to(tl.int64) * table_stride
        else:
            origin = tl.load(context_starts + request)
    out += row.to(tl.int64) * k
    line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
    if HAS_STARTS:
        line += tl.load(starts + row)
    if EARLY:
        gdc_wait()
    index = _quads(HELD)
    if (length > HELD) & (length > k):
        # The first SHARE of each stretch's list, loaded before it is known how many there are.
        SHARE: tl.constexpr = HELD // MOST_SPLITS
        split = (4 * tl.arange(0, HELD // 4)) // SHARE
        there = split < splits
        listed = tl.load(counts + row * splits + split, mask=there, other=0)
        each = tl.arange(0, MOST_SPLITS)
        count = tl.load(counts + row * splits + each, mask=each < splits, other=0)
        floor = tl.load(floors + row)
        base = row.to(tl.int64) * splits * HELD
        place = (split * HELD)[:, None] + index % SHARE
        logit = tl.load(values + base + place, mask=there[:, None], other=float("nan"))
        position = tl.load(positions + base + place, mask=there[:, None], other=0)
        logit = tl.where(index % SHARE < listed[:, None], logit, float("nan"))
        size = tl.sum(count, axis=0)
        if (size >= k) & (size <= HELD) & (floor > LOWEST):
            if tl.max(count, axis=0) > SHARE:
                # Candidate j lies in the stretch where j falls among the counts.
                place = index
                before = 0
                for at in range(splits):
                    more = tl.load(counts + row * splits + at)
                    before += more
                    place += tl.where(index >= before, HELD - more, 0)
                inside = index < size
                logit = tl.load(values + base + place, mask=inside, other=float("nan"))
                position = tl.load(positions + base + place, mask=inside, other=0)
            keep = _highest_listed(logit, index, size, floor, k, HELD)
            if SLOTS:
                if PAGED:
                    position = tl.load(page_row + position, mask=keep, other=-1).to(tl.int32)
                else:
                    position = (origin + position).to(tl.int32)
            rank, _ = _ranks(keep.to(tl.int32))
            _put(out + rank - 1, position, keep, PTX)
        else:
            _highest_in_memory(line, positions, False, length, floor, k, out, row,
                               request_of_row, table, table_rows, context_starts, table_stride,
                               SLOTS, PAGED)  # fmt: skip
    elif length > k:
        logit = tl.load(line + index, mask=index < length, other=float("nan"))
        keep = _highest(logit, index, length, tl.full([], 0, tl.uint32), k, HELD)
        rank, _ = _ranks(keep.to(tl.int32))
        _give(out, rank - 1, index, keep, row, request_of_row, table, table_rows,
              context_starts, table_stride, SLOTS, PAGED)  # fmt: skip
    _give_all(out, length, k, row, request_of_row, table, table_rows, context_starts,
              table_stride, SLOTS, PAGED)  # fmt: skip
