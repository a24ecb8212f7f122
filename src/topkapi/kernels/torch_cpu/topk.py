"""The exact k highest of each row, ties to the lowest position, with plain torch.

`torch.topk` breaks ties by chance. So k + 1 values are asked for: if the lowest of them occurs
once, the k others are the only answer; if not, the tie at the border is settled by position, for
those rows alone.
"""

from __future__ import annotations

import math

import torch

from topkapi.dispatch import Kernel, Problem

_BLOCK_VALUES = 2**22
# Working set of `highest`, in bytes for each value: masks, running counts and gathered candidates.
BYTES_PER_VALUE = 16


def all_positions(lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Positions `[R, k]` int32 of rows no longer than k: `0, 1, ..., length - 1, -1, ...`."""
    position = torch.arange(k, dtype=torch.int32, device=lengths.device)
    return torch.where(position < lengths[:, None], position, -1)


def highest(values: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Positions `[R, k]` int32, ascending, -1 at the end, of the k highest of `values [R, S]` fp32.

    `values` hold no NaN, and -inf at and after `lengths[r]`. Synchronises.
    """
    width = values.shape[1]
    everything = all_positions(lengths, k)
    if width <= k or values.shape[0] == 0:
        return everything
    top, index = _top(values, k + 1)
    lowest = top.amin(1, keepdim=True)
    dropped = top == lowest
    long = lengths > k
    tied = ((dropped.sum(1) > 1) & long).nonzero()[:, 0]
    index = index.to(torch.int32).masked_fill_(dropped, width)
    positions = index.sort(1).values[:, :k]
    if tied.shape[0]:
        positions[tied] = _settle(values[tied], lowest[tied], lengths[tied], k)
    return torch.where(long[:, None], positions, everything)


def _settle(
    values: torch.Tensor, border: torch.Tensor, lengths: torch.Tensor, k: int
) -> torch.Tensor:
    """Positions `[R, k]` of the values above `border [R, 1]`, then of the first equal to it."""
    above = values > border
    equal = values == border
    equal &= torch.arange(values.shape[1], device=values.device) < lengths[:, None]
    needed = k - above.sum(1, keepdim=True, dtype=torch.int32)
    equal &= equal.cumsum(1, dtype=torch.int32) <= needed
    return (above | equal).nonzero()[:, 1].view(-1, k).to(torch.int32)


def _top(values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The n highest of each row `[R, n]` in no order, and their columns; ties by chance.

    Column c belongs to group c % groups. The n groups with the highest maxima hold the n highest
    values, so only their members are ranked: about `2 * sqrt(S * n)` values instead of S.
    """
    rows, width = values.shape
    size = math.isqrt(width // n)
    if size < 2:
        return torch.topk(values, n, dim=1, sorted=False)
    groups = width // size
    maxima = values[:, : groups * size].view(rows, size, groups).amax(1)
    best = torch.topk(maxima, n, dim=1, sorted=False).indices
    stride = torch.arange(size, device=values.device) * groups
    columns = (stride[:, None] + best[:, None, :]).view(rows, size * n)
    rest = torch.arange(groups * size, width, device=values.device).expand(rows, -1)
    columns = torch.cat((columns, rest), dim=1)
    top, at = torch.topk(values.gather(1, columns), n, dim=1, sorted=False)
    return top, columns.gather(1, at)


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.topk`. Works in blocks of rows. Synchronises."""
    rows, width = logits.shape
    longest = int(lengths.max()) if rows else 0
    if longest <= k:
        return all_positions(lengths, k)
    positions = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    column = torch.arange(longest, device=logits.device)
    block = max(1, _BLOCK_VALUES // longest)
    for first in range(0, rows, block):
        part = slice(first, first + block)
        if starts is None:
            values = logits[part, :longest]
        else:
            wanted = (starts[part, None].long() + column).clamp_max(width - 1)
            values = logits[part].gather(1, wanted)
        outside = (column >= lengths[part, None]) | values.isnan()
        values = values.masked_fill(outside, float("-inf"))
        positions[part] = highest(values, lengths[part], k)
    return positions


def _refuse(problem: Problem) -> str | None:
    return "synchronises with the host, so it cannot be captured" if problem.capture else None


TOPK = Kernel("torch", "topk", _refuse, topk)
