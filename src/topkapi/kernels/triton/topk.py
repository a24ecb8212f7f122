"""Exactly the k highest logits of each row, whatever its length; ties to the lowest position.

Logits become unsigned keys in the order of their values (-0.0 as 0.0, NaN as -inf). Two kernels:

`_collect` finds a key that about k + slack of the row's keys exceed, from a sample of the row, and
writes down the positions of all keys above it, in order, and of the first k equal to it.
`_choose` finds the k-th highest key exactly, eight bits at a time by histograms, among what was
collected; then it writes the keys above it, and the first ones equal to it, in order of position.

The sample only decides how much is looked at. When it misjudged (fewer than k collected, or more
than fit), and for rows short enough not to need it, `_choose` reads the whole row instead: the
result is the same, exact and deterministic. Rows are never sorted, and never held in registers.
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
def _take(key, threshold, inside, above_before, equal_before, equal_limit):
    """Which keys of a block to keep, and where: all above `threshold`, and the first equal ones.

    Returns the mask, the output places and the two counts after this block. Both running counts
    ride in one scan: a block has fewer than 2^15 keys.
    """
    above = ((key > threshold) & inside).to(tl.int32)
    equal = ((key == threshold) & inside).to(tl.int32)
    both = tl.cumsum(above + (equal << 16), axis=0)
    total = tl.max(both, axis=0)
    above_rank = above_before + (both & 0xFFFF)
    equal_rank = equal_before + (both >> 16)
    keep = (above > 0) | ((equal > 0) & (equal_rank <= equal_limit))
    place = above_rank + tl.minimum(equal_rank, equal_limit) - 1
    last = tl.max(both & 0xFFFF, axis=0)
    return keep, place, above_before + last, equal_before + (total >> 16)


@triton.jit(do_not_specialize=["row_stride", "k", "capacity", "splits"])
def _collect(
    logits, lengths, starts, keys, positions, counts, row_stride, k, capacity, splits,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    length = tl.load(lengths + row).to(tl.int32)
    line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
    if HAS_STARTS:
        line += tl.load(starts + row)
    count = -1
    if (length > capacity) & (length > k):
        # One place in each of SAMPLE equal stretches, at an offset that follows no period.
        draw = tl.arange(0, SAMPLE)
        stretch = length // SAMPLE
        jitter = ((draw * 40503 + 30011) & 0xFFFF) * stretch >> 16
        drawn = (draw.to(tl.int64) * length // SAMPLE).to(tl.int32) + jitter
        sample = _key(tl.load(line + drawn, mask=drawn < length, other=float("-inf")))
        share = k.to(tl.float32) * SAMPLE / length.to(tl.float32)
        need = tl.minimum((share + 4.0 * tl.sqrt(share) + 8.0).to(tl.int32), SAMPLE)
        floor = tl.full([], 0, tl.uint32)
        for step in tl.static_range(4):
            byte = ((sample >> (24 - 8 * step)) & 0xFF).to(tl.int32)
            if step == 0:
                found = tl.histogram(byte, 256)
            else:
                shared = (sample >> (32 - 8 * step)) == (floor >> (32 - 8 * step))
                found = tl.histogram(byte, 256, mask=shared)
            floor, need = _descend(found, need, floor, 24 - 8 * step)

        span = (((length + splits - 1) // splits + BLOCK - 1) // BLOCK) * BLOCK
        begin = split * span
        end = tl.minimum(begin + span, length)
        base = tl.program_id(0).to(tl.int64) * capacity
        above = 0
        equal = 0
        for first in range(begin, end, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < end
            key = _key(tl.load(line + column, mask=inside, other=float("-inf")))
            keep, place, above, equal = _take(key, floor, inside, above, equal, k)
            keep &= place < capacity
            tl.store(keys + base + place, key, mask=keep)
            tl.store(positions + base + place, column, mask=keep)
        count = above + tl.minimum(equal, k)
    tl.store(counts + tl.program_id(0), count)


@triton.jit
def _load_candidates(line, keys, positions, base, index, inside, whole_row):
    """Keys and positions number `index` of the row itself, or of what was collected from it."""
    column = index
    logit = tl.load(line + index, mask=inside & whole_row, other=float("-inf"))
    key = tl.load(keys + base + index, mask=inside & ~whole_row, other=0)
    position = tl.load(positions + base + index, mask=inside & ~whole_row, other=0)
    return tl.where(whole_row, _key(logit), key), tl.where(whole_row, column, position)


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
    logits, lengths, starts, keys, positions, counts, out,
    request_of_row, table, table_rows, context_starts,
    row_stride, k, capacity, splits, table_stride,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    SLOTS: tl.constexpr, PAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths + row).to(tl.int32)
    out += row.to(tl.int64) * k
    taken = tl.minimum(k, length)
    if length > k:
        line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
        if HAS_STARTS:
            line += tl.load(starts + row)
        split = tl.arange(0, BLOCK_SPLITS)
        count = tl.load(counts + row * splits + split, mask=split < splits, other=0)
        unusable = tl.sum(((count < 0) | (count > capacity)).to(tl.int32), axis=0)
        whole_row = (unusable > 0) | (tl.sum(count, axis=0) < k)
        parts = tl.where(whole_row, 1, splits)

        threshold = tl.full([], 0, tl.uint32)
        need = k
        for step in tl.static_range(4):
            found = tl.zeros([256], tl.int32)
            for part in range(0, parts):
                base = (row * splits + part).to(tl.int64) * capacity
                size = tl.sum(tl.where(split == part, count, 0), axis=0)
                size = tl.where(whole_row, length, size)
                for first in range(0, size, BLOCK):
                    index = first + tl.arange(0, BLOCK)
                    inside = index < size
                    key, _ = _load_candidates(line, keys, positions, base, index, inside, whole_row)
                    if step > 0:
                        inside &= (key >> (32 - 8 * step)) == (threshold >> (32 - 8 * step))
                    byte = ((key >> (24 - 8 * step)) & 0xFF).to(tl.int32)
                    found += tl.histogram(byte, 256, mask=inside)
            threshold, need = _descend(found, need, threshold, 24 - 8 * step)

        above = 0
        equal = 0
        for part in range(0, parts):
            base = (row * splits + part).to(tl.int64) * capacity
            size = tl.sum(tl.where(split == part, count, 0), axis=0)
            size = tl.where(whole_row, length, size)
            for first in range(0, size, BLOCK):
                index = first + tl.arange(0, BLOCK)
                inside = index < size
                key, position = _load_candidates(
                    line, keys, positions, base, index, inside, whole_row
                )
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
    """How many collected positions one program may write down."""
    return max(4096, int(triton.next_power_of_2(4 * k)))


def choose_splits(device: DeviceInfo, rows: int, width: int) -> int:
    """How many programs collect from one row: several only where rows are few and long."""
    wanted = 2 * device.num_sms // max(rows, 1)
    return max(1, min(8, wanted, width // 16384))


def workspace_bytes_per_row(k: int, splits: int) -> int:
    """Temporary bytes that one row takes while it is selected."""
    return splits * (8 * capacity_of(k) + 4)


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
) -> None:
    """Select `k` of each row of `logits [rows, >= S]` into `out [rows, k]` int32.

    With `slots_of`, rows are `first_row + i` of that context and slots are written, not positions.
    Never synchronises.
    """
    rows, width = logits.shape
    device = target_of(logits)
    splits = splits or choose_splits(device, rows, width)
    capacity = capacity_of(k)
    block_rows = max(1, min(rows, WORKSPACE_BYTES // workspace_bytes_per_row(k, splits)))
    space = torch.empty(2, block_rows * splits, capacity, dtype=torch.int32, device=logits.device)
    counts = torch.full((block_rows * splits,), -1, dtype=torch.int32, device=logits.device)
    keys, positions = space[0].view(torch.uint32), space[1]
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
        if width > capacity:
            _collect[(size * splits,)](
                logits[part], lengths[part], block_starts, keys, positions, counts,
                logits.stride(0) // unit, k, capacity, splits,
                HAS_STARTS=starts is not None, STRIDE_UNIT=unit,
                SAMPLE=2048 if width <= 131072 else 8192, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
        _choose[(size,)](
            logits[part], lengths[part], block_starts, keys, positions, counts, out[part],
            request_of_row[part] if slots_of is not None else counts, table, table_rows, origin,
            logits.stride(0) // unit, k, capacity, splits,
            table.stride(0), HAS_STARTS=starts is not None, STRIDE_UNIT=unit,
            BLOCK_SPLITS=8, SLOTS=slots_of is not None, PAGED=paged, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def topk(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, *, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """See `reference.topk`. Never synchronises; safe inside capture.

    Temporaries: at most `WORKSPACE_BYTES`, or what one row needs (8 bytes times 4 k).
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
