"""Exactly the k highest logits of each row, whatever its length; ties to the lowest position.

Logits become unsigned keys in the order of their values (-0.0 as 0.0, NaN as -inf). Three kernels:

`_sample`  takes a sample of each long row and from it a key, the floor, that about k + slack of the
           row's keys exceed.
`_collect` writes down, in order, the positions of all keys above the floor and of enough equal to
           it. One warp walks over one stretch of a row: its prefix sums need no barrier.
`_choose`  holds what was collected in registers, finds the k-th highest key by its 32 bits, and
           writes the positions above it, and the first ones equal to it, in order.

The sample only decides how much is looked at. When it misjudged (fewer than k collected, or more
than fit) `_choose` finds the key by histograms over the whole row instead: the result is the same,
exact and deterministic. Rows short enough to be held are never sampled; no row is ever sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from topkapi.context import Context
from topkapi.device import DeviceInfo
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.target import refuse_device, target_of

BLOCK = 2048
COLLECT_BLOCK = 1024
MOST_SPLITS = 16
WORKSPACE_BYTES = 64 * 2**20


@triton.jit
def _key(logit):
    """fp32 to uint32 in the same order; NaN becomes -inf, -0.0 becomes 0.0."""
    logit = tl.where(logit == logit, logit, float("-inf"))
    logit = tl.where(logit == 0.0, 0.0, logit)
    bits = logit.to(tl.int32, bitcast=True)
    flip = (bits >> 31) | -2147483648
    return (bits ^ flip).to(tl.uint32, bitcast=True)


@triton.jit
def _descend(histogram, need, prefix, SHIFT: tl.constexpr):
    """The byte of the need-th highest key, given the histogram of bytes below `prefix`.

    Returns the longer prefix, and how many are still needed among the keys that share it.
    """
    above = tl.cumsum(histogram, axis=0, reverse=True)
    byte = tl.sum((above >= need).to(tl.int32), axis=0) - 1
    bins = tl.arange(0, 256)
    higher = tl.sum(tl.where(bins == byte + 1, above, 0), axis=0)
    return prefix | (byte.to(tl.uint32) << SHIFT), need - higher


@triton.jit
def _quads(N: tl.constexpr):
    """0 .. N-1 as `[N / 4, 4]`: four neighbours to a thread, which ranks them by itself."""
    return 4 * tl.arange(0, N // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def _ranks(count, before):
    """Running sum over `[N, 4]`, starting behind `before`, and the whole sum: one scan over N."""
    inner = tl.cumsum(count, axis=1)
    group = tl.sum(count, axis=1)
    return (before + tl.cumsum(group, axis=0) - group)[:, None] + inner, tl.sum(group, axis=0)


@triton.jit
def _take(key, threshold, inside, above_before, equal_before, equal_limit):
    """Which keys `[N, 4]` to keep, and where: all above `threshold`, and the first equal ones.

    Returns the mask, the output places and the two counts after this block. Both counts ride in
    one scan: a block has fewer than 2^15 keys.
    """
    above = ((key > threshold) & inside).to(tl.int32)
    equal = ((key == threshold) & inside).to(tl.int32)
    both, total = _ranks(above + (equal << 16), 0)
    above_rank = above_before + (both & 0xFFFF)
    equal_rank = equal_before + (both >> 16)
    keep = (above > 0) | ((equal > 0) & (equal_rank <= equal_limit))
    place = above_rank + tl.minimum(equal_rank, equal_limit) - 1
    return keep, place, above_before + (total & 0xFFFF), equal_before + (total >> 16)


@triton.jit
def _highest(key, need):
    """The need-th highest of `key`, bit by bit: the largest value that `need` keys reach."""
    found = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        trial = found | bit
        enough = tl.sum((key >= trial).to(tl.int32)) >= need
        found = tl.where(enough, trial, found)
        bit = bit >> 1
    return found


@triton.jit(do_not_specialize=["row_stride", "k", "capacity"])
def _sample(
    logits, lengths, starts, floors, row_stride, k, capacity,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths + row).to(tl.int32)
    if (length > capacity) & (length > k):
        line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
        if HAS_STARTS:
            line += tl.load(starts + row)
        # One place in each of SAMPLE equal stretches, at an offset that follows no period.
        draw = tl.arange(0, SAMPLE)
        jitter = ((draw * 40503 + 30011) & 0xFFFF) * (length // SAMPLE) >> 16
        place = (draw.to(tl.int64) * length // SAMPLE).to(tl.int32) + jitter
        key = _key(tl.load(line + place, mask=place < length, other=float("-inf")))
        share = k.to(tl.float32) * SAMPLE / length.to(tl.float32)
        need = tl.minimum((share + 4.0 * tl.sqrt(share) + 8.0).to(tl.int32), SAMPLE)
        tl.store(floors + row, _highest(key, need))


@triton.jit
def _logit(key):
    """The fp32 value of a key: the inverse of `_key`."""
    bits = key.to(tl.int32, bitcast=True)
    flip = ~(bits >> 31) | -2147483648
    return (bits ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def _note(positions, column, keep, count):
    """Write down the columns `[N, 4]` to keep behind the first `count`; return the new count."""
    rank, total = _ranks(keep.to(tl.int32), count)
    tl.store(positions + (rank - 1), column, mask=keep)
    return count + total


@triton.jit(do_not_specialize=["row_stride", "k", "capacity", "splits"])
def _collect(
    logits, lengths, starts, floors, positions, counts, row_stride, k, capacity, splits,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    length = tl.load(lengths + row).to(tl.int32)
    count = 0
    if (length > capacity) & (length > k):
        line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
        if HAS_STARTS:
            line += tl.load(starts + row)
        floor = tl.load(floors + row)
        at_floor = _logit(floor)
        above_floor = _logit(floor + 1)
        positions += tl.program_id(0).to(tl.int64) * (capacity + BLOCK)
        span = (((length + splits - 1) // splits + BLOCK - 1) // BLOCK) * BLOCK
        begin = split * span
        end = tl.minimum(begin + span, length)
        whole = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
        offset = _quads(BLOCK)
        for first in range(begin, whole, BLOCK):
            column = first + offset
            logit = tl.load(line + column)
            # Once k are collected, no later key at the floor itself can be among the k highest.
            # A NaN is collected too: that it ranks as -inf is for _choose to see.
            least = tl.where(count < k, at_floor, above_floor)
            if count <= capacity:
                count = _note(positions, column, ~(logit < least), count)
        column = whole + offset
        inside = column < end
        logit = tl.load(line + column, mask=inside, other=0.0)
        least = tl.where(count < k, at_floor, above_floor)
        if count <= capacity:
            count = _note(positions, column, ~(logit < least) & inside, count)
    tl.store(counts + tl.program_id(0), count)


@triton.jit
def _threshold_of_row(line, length, need, BLOCK: tl.constexpr):
    """The need-th highest key of a whole row, by a histogram of eight bits at a time."""
    threshold = tl.full([], 0, tl.uint32)
    for step in tl.static_range(4):
        found = tl.zeros([256], tl.int32)
        for first in range(0, length, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < length
            key = _key(tl.load(line + column, mask=inside, other=float("-inf")))
            if step > 0:
                inside &= (key >> (32 - 8 * step)) == (threshold >> (32 - 8 * step))
            byte = ((key >> (24 - 8 * step)) & 0xFF).to(tl.int32)
            found += tl.histogram(byte, 256, mask=inside)
        threshold, need = _descend(found, need, threshold, 24 - 8 * step)
    return threshold, need


@triton.jit
def _address(position, row, request_of_row, table, table_rows, context_starts, table_stride,
             SLOTS: tl.constexpr, PAGED: tl.constexpr, mask):  # fmt: skip
    """What a chosen position is given out as: itself, or the slot that holds it."""
    if SLOTS:
        request = tl.load(request_of_row + row)
        if PAGED:
            page_row = table + tl.load(table_rows + request).to(tl.int64) * table_stride
            position = tl.load(page_row + position, mask=mask, other=-1).to(tl.int32)
        else:
            position = (tl.load(context_starts + request) + position).to(tl.int32)
    return position


@triton.jit(do_not_specialize=["row_stride", "k", "capacity", "splits", "table_stride"])
def _choose(
    logits, lengths, starts, positions, counts, out,
    request_of_row, table, table_rows, context_starts,
    row_stride, k, capacity, splits, table_stride,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, MOST_SPLITS: tl.constexpr,
    SLOTS: tl.constexpr, PAGED: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
    COLLECT_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths + row).to(tl.int32)
    out += row.to(tl.int64) * k
    taken = tl.minimum(k, length)
    line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
    if HAS_STARTS:
        line += tl.load(starts + row)
    sampled = (length > capacity) & (length > k)
    size = length
    index = _quads(HELD)
    source = index
    if sampled:
        # Candidate j lies in the stretch where j falls among the counts, behind earlier gaps.
        size = 0
        overfull = 0
        for split in tl.static_range(MOST_SPLITS):
            if split < splits:
                count = tl.load(counts + row * splits + split)
                overfull += (count > capacity).to(tl.int32)
                size += count
                source += tl.where(index >= size, capacity + COLLECT_BLOCK - count, 0)
        size = tl.where((overfull > 0) | (size < k), HELD + 1, size)
    if (length > k) & (size <= HELD):
        inside = index < size
        position = index
        if sampled:
            base = row.to(tl.int64) * splits * (capacity + COLLECT_BLOCK)
            position = tl.load(positions + base + source, mask=inside, other=0)
        key = _key(tl.load(line + position, mask=inside, other=float("-inf")))
        key = tl.where(inside, key, 0)  # below the key of -inf
        threshold = _highest(key, k)
        need = k - tl.sum((key > threshold).to(tl.int32))
        keep, place, _, _ = _take(key, threshold, inside, 0, 0, need)
        chosen = _address(position, row, request_of_row, table, table_rows,
                          context_starts, table_stride, SLOTS, PAGED, keep)  # fmt: skip
        tl.store(out + place, chosen, mask=keep)
    elif length > k:
        threshold, need = _threshold_of_row(line, length, k, BLOCK)
        above = 0
        equal = 0
        for first in range(0, length, BLOCK):
            position = first + _quads(BLOCK)
            inside = position < length
            key = _key(tl.load(line + position, mask=inside, other=float("-inf")))
            keep, place, above, equal = _take(key, threshold, inside, above, equal, need)
            chosen = _address(position, row, request_of_row, table, table_rows,
                              context_starts, table_stride, SLOTS, PAGED, keep)  # fmt: skip
            tl.store(out + place, chosen, mask=keep)
    else:
        for first in range(0, taken, BLOCK):
            position = first + tl.arange(0, BLOCK)
            keep = position < taken
            chosen = _address(position, row, request_of_row, table, table_rows,
                              context_starts, table_stride, SLOTS, PAGED, keep)  # fmt: skip
            tl.store(out + position, chosen, mask=keep)
    for first in range(taken, k, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(out + place, tl.full([BLOCK], -1, tl.int32), mask=place < k)


def capacity_of(k: int) -> int:
    """How many candidates `_choose` holds, and how many one stretch of a row may collect."""
    return min(16384, max(4096, int(triton.next_power_of_2(4 * k))))


def choose_splits(device: DeviceInfo, rows: int, width: int) -> int:
    """Into how many stretches a row is cut: each is one warp's work, at least 4096 columns."""
    wanted = max(1, 16 * device.num_sms // max(rows, 1))
    return max(1, min(MOST_SPLITS, max(4, wanted), width // 4096))


def workspace_bytes_per_row(k: int, splits: int) -> int:
    """Temporary bytes that one row takes while it is selected."""
    return splits * (4 * (capacity_of(k) + COLLECT_BLOCK) + 4) + 4


def launch_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    out: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    slots_of: Context | None = None,
    first_row: int = 0,
    splits: int | None = None,
    warps: int | None = None,
) -> None:
    """Select `k` of each row of `logits [rows, >= S]` into `out [rows, k]` int32.

    With `slots_of`, rows are `first_row + i` of that context and slots are written, not positions.
    Never synchronises.
    """
    rows, width = logits.shape
    device = target_of(logits)
    splits = splits or choose_splits(device, rows, width)
    capacity = capacity_of(k)
    sampled = width > capacity
    block_rows = rows
    if sampled:
        block_rows = max(1, min(rows, WORKSPACE_BYTES // workspace_bytes_per_row(k, splits)))
    stretches = block_rows * splits if sampled else 1
    positions = torch.empty(
        stretches, capacity + COLLECT_BLOCK, dtype=torch.int32, device=logits.device
    )
    counts = torch.empty(stretches, dtype=torch.int32, device=logits.device)
    floors = torch.empty(block_rows, dtype=torch.uint32, device=logits.device)
    aligned = logits.stride(0) % 4 == 0 and logits.data_ptr() % 16 == 0 and starts is None
    unit = 4 if aligned else 1
    table = table_rows = origin = request_of_row = counts
    paged = slots_of is not None and slots_of.table is not None
    if slots_of is not None:
        request_of_row = slots_of.request_of_row[first_row:]
        if slots_of.table is not None and slots_of.table_rows is not None:
            table, table_rows = slots_of.table, slots_of.table_rows
        elif slots_of.starts is not None:
            origin = slots_of.starts
    for first in range(0, rows, block_rows):
        part = slice(first, min(first + block_rows, rows))
        size = part.stop - part.start
        block_starts = counts if starts is None else starts[part]
        shape = {"HAS_STARTS": starts is not None, "STRIDE_UNIT": unit}
        if sampled:
            _sample[(size,)](
                logits[part], lengths[part], block_starts, floors,
                logits.stride(0) // unit, k, capacity,
                SAMPLE=2048 if width <= 131072 else 8192, num_warps=8, **shape,
            )  # fmt: skip
            _collect[(size * splits,)](
                logits[part], lengths[part], block_starts, floors, positions, counts,
                logits.stride(0) // unit, k, capacity, splits,
                BLOCK=COLLECT_BLOCK, num_warps=1, **shape,
            )  # fmt: skip
        _choose[(size,)](
            logits[part], lengths[part], block_starts, positions, counts, out[part],
            request_of_row[part] if slots_of is not None else counts, table, table_rows, origin,
            logits.stride(0) // unit, k, capacity, splits, table.stride(0),
            MOST_SPLITS=triton.next_power_of_2(splits), SLOTS=slots_of is not None, PAGED=paged,
            BLOCK=BLOCK, HELD=capacity, COLLECT_BLOCK=COLLECT_BLOCK, num_warps=warps or 16, **shape,
        )  # fmt: skip


def topk(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, *, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """See `reference.topk`. Never synchronises; safe inside capture.

    Temporaries: at most `WORKSPACE_BYTES`, or what one row needs (at most 1 MB).
    """
    out = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
    if logits.shape[0] == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    launch_topk(logits, lengths, k, out, starts=starts)
    return out


def refuse_topk(problem: Problem) -> str | None:
    """Why this package cannot select `problem.topk` of a row, or None."""
    reason = refuse_device(problem)
    if reason is not None:
        return reason
    return f"selects at most 65536, got {problem.topk}" if problem.topk > 65536 else None


TOPK = Kernel("triton", "topk", refuse_topk, topk)
