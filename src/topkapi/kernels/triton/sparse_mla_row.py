"""Which slots a program of the portable sparse MLA kernels attends to, and how its results end.

Knows no records.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkapi.kernels.triton.softmax import LN2, LOG2E


@triton.jit
def row_and_heads(H: tl.constexpr, BLOCK_H: tl.constexpr):
    """The row of this program, int64, and its block of the heads."""
    HEAD_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    head = program % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    return (program // HEAD_BLOCKS).to(tl.int64), head


@triton.jit
def stretch_of_row(K, split, splits, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """First and last place of the slots that are this program's."""
    begin, stop = 0, K
    if SPLIT:
        tiles = (K + BLOCK_N - 1) // BLOCK_N
        span = ((tiles + splits - 1) // splits) * BLOCK_N
        begin = split * span
        stop = tl.minimum(K, begin + span)
    return begin, stop


@triton.jit
def load_slots(slots, first, end, BLOCK: tl.constexpr):
    """BLOCK slots from `first` on, -1 from `end` on."""
    place = first + tl.arange(0, BLOCK)
    return tl.load(slots + place, mask=place < end, other=-1).to(tl.int32)


@triton.jit
def _merge(end, count, largest, other_end, other_count, other_largest):
    """What `_scan` found in some slots, and in others."""
    return tl.maximum(end, other_end), count + other_count, tl.maximum(largest, other_largest)


@triton.jit
def _scan(slot, first):
    """Where these slots end, how many are not missing, and the largest of them."""
    seen = slot >= 0
    place = first + tl.arange(0, slot.shape[0])
    return tl.reduce((tl.where(seen, place + 1, 0), seen.to(tl.int32), slot), 0, _merge)


@triton.jit
def scan_row(found, slots, begin, stop, BLOCK: tl.constexpr):
    """Where the slots end, whether one before that is missing, and the largest of them (or 0).

    `found` are the first BLOCK of them, loaded before. They end behind the last that is not -1:
    padding costs nothing, and it is usually at the end.
    """
    end, count, largest = _scan(found, begin)
    for first in range(begin + BLOCK, stop, BLOCK):
        other = _scan(load_slots(slots, first, stop, BLOCK), first)
        end, count, largest = _merge(end, count, largest, other[0], other[1], other[2])
    end = tl.maximum(end, begin)
    return end, count != end - begin, tl.maximum(largest, 0)


@triton.jit
def load_tile(slots, first, K, BLOCK_N: tl.constexpr, EVEN_K: tl.constexpr):
    """The slots of the tile from `first` on; never beyond the row."""
    if EVEN_K:
        slot = tl.load(slots + tl.minimum(first, K - BLOCK_N) + tl.arange(0, BLOCK_N))
    else:
        slot = tl.load(slots + tl.minimum(first + tl.arange(0, BLOCK_N), K - 1))
    return slot


@triton.jit
def readable(slot, largest):
    """Slots to read: what is missing (-1, the largest unsigned number) is the row's `largest`.

    It gets no weight, and loads that need no mask cost half the instructions.
    """
    slot = slot.to(tl.int32).to(tl.uint32, bitcast=True)
    return tl.minimum(slot, largest.to(tl.uint32)).to(tl.int64)


@triton.jit
def close(total, best, sinks, head, H: tl.constexpr, SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Which heads saw a slot, what their sums are to be multiplied by, and lse.

    lse is in powers of two where several programs share the row, whose merge adds the sinks, too.
    """
    seen = total != 0.0
    lse2 = tl.where(seen, best + tl.log2(total), float("-inf"))
    denominator = total
    if HAS_SINKS and not SPLIT:
        sink = tl.load(sinks + head, mask=head < H, other=0.0).to(tl.float32)
        denominator += tl.exp2(sink * LOG2E - best)
    inverse = tl.where(seen, 1.0 / denominator, 0.0)
    return seen, inverse, lse2 * (1.0 if SPLIT else LN2)
