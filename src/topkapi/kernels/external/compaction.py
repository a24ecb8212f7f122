"""A selection without holes, in one launch: each row's slots moved together, in their order.

    table[r] = slots[r] without -1, then its highest repeated; counts[r] = how many there were

One program a row, which walks it in blocks and keeps a running count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _compact(slots, table, counts, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((), tl.int32)
    highest = tl.zeros((), tl.int32)
    for first in range(0, width, BLOCK):
        slot = tl.load(slots + row * stride + first + lane, mask=first + lane < width, other=-1)
        slot = slot.to(tl.int32)
        valid = (slot >= 0).to(tl.int32)
        place = count + tl.cumsum(valid, 0) - valid
        tl.store(table + row * width + place, slot, mask=valid > 0)
        highest = tl.maximum(highest, tl.max(slot, 0))
        count += tl.sum(valid, 0)
    tl.store(counts + row, count)
    # The places past the count were not written above: no program reads what it wrote.
    for first in range(0, width, BLOCK):
        place = first + lane
        tl.store(table + row * width + place, highest, mask=(place >= count) & (place < width))


def compact(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`slots [R, K]` int to `table [R, K]` int32 and `counts [R]` int32; see `selected.compacted`.

    Never synchronises; safe inside capture. R and K are at least 1.
    """
    slots = slots if slots.stride(1) == 1 else slots.contiguous()
    rows, width = slots.shape
    table = torch.empty(rows, width, dtype=torch.int32, device=slots.device)
    counts = torch.empty(rows, dtype=torch.int32, device=slots.device)
    _compact[(rows,)](slots, table, counts, width, slots.stride(0), BLOCK=BLOCK, num_warps=4)
    return table, counts
