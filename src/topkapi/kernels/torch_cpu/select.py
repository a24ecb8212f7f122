"""Scoring and selecting in bounded memory, with plain torch.

`select` scores groups of rows against windows of positions that together fit the budget, and keeps
the k best so far. `highest` is exact and has one answer, so neither size changes the result.
"""

from __future__ import annotations

from typing import Literal

import torch

from topkapi.context import Context
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.torch_cpu.scoring import BLOCK_POSITIONS, Rows, score_rows
from topkapi.kernels.torch_cpu.topk import BYTES_PER_VALUE, all_positions, highest

# A group is no larger than what is worth it: its logits are ranked while they are in cache, and the
# keys are read once a group.
_GROUP_VALUES = 2**21
_GROUP_ROWS = 128


def indexer_logits(
    q: torch.Tensor, weights: torch.Tensor, index_cache: torch.Tensor, context: Context
) -> torch.Tensor:
    """See `reference.indexer_logits`. Synchronises."""
    logits = torch.empty(q.shape[0], context.max_length, dtype=torch.float32, device=q.device)
    score_rows(q, weights, index_cache, context, Rows.of(context), 0, 0, logits)
    return logits


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    k: int,
    *,
    output: Literal["slots", "positions"] = "slots",
    budget_bytes: int = 256 * 2**20,
) -> torch.Tensor:
    """See `reference.select`. Rows no longer than k are not scored. Synchronises."""
    count = q.shape[0]
    if context.max_length <= k:
        positions = all_positions(context.lengths, k)
    else:
        rows = Rows.of(context)
        positions = torch.empty(count, k, dtype=torch.int32, device=q.device)
        longest = max(rows.lengths, default=0)
        step, window = _blocks(count, longest, k, q.shape[1] * q.shape[2], budget_bytes)
        buffer = torch.empty(step * min(window, longest), dtype=torch.float32, device=q.device)
        for first in range(0, count, step):
            last = min(first + step, count)
            positions[first:last] = _select_group(
                q, weights, index_cache, context, rows, first, last, k, buffer, window
            )
    return positions if output == "positions" else context.slots(positions)


def _blocks(rows: int, longest: int, k: int, query_size: int, budget: int) -> tuple[int, int]:
    """How many rows and how many positions are scored at once.

    A window is at least k wide, so that the best of the windows so far never has holes.
    """
    least = -(-max(k, 1) // BLOCK_POSITIONS) * BLOCK_POSITIONS
    whole = -(-max(longest, 1) // BLOCK_POSITIONS) * BLOCK_POSITIONS
    fitting = budget // BYTES_PER_VALUE // BLOCK_POSITIONS * BLOCK_POSITIONS
    window = max(least, min(whole, fitting))
    row_bytes = BYTES_PER_VALUE * (window + 4 * k) + 4 * query_size
    most = max(_GROUP_VALUES // window, _GROUP_ROWS)
    return max(1, min(rows, most, budget // row_bytes)), window


def _select_group(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    rows: Rows,
    first: int,
    last: int,
    k: int,
    buffer: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """Positions `[last - first, k]` int32 of one group of rows."""
    lengths = context.lengths[first:last]
    longest = max(rows.lengths[first:last])
    if longest <= k:
        return all_positions(lengths, k)
    negative = float("-inf")
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    for start in range(0, longest, window):
        width = min(window, longest - start)
        logits = buffer[: (last - first) * width].view(last - first, width)
        score_rows(q, weights, index_cache, context, rows, first, start, logits, skip_below=k)
        torch.nan_to_num_(logits, nan=negative, posinf=float("inf"), neginf=negative)
        seen = (lengths - start).clamp(0, logits.shape[1])
        positions = highest(logits, seen, k)
        if longest <= window:
            return positions
        values = logits.gather(1, positions.clamp_min(0).long())
        values = values.masked_fill_(positions < 0, negative)
        positions = torch.where(positions < 0, -1, positions + start)
        if best is not None:
            values = torch.cat((best[0], values), dim=1)
            positions = torch.cat((best[1], positions), dim=1)
            kept = highest(values, (positions >= 0).sum(1), k)
            values = values.gather(1, kept.clamp_min(0).long()).masked_fill_(kept < 0, negative)
            positions = positions.gather(1, kept.clamp_min(0).long()).masked_fill_(kept < 0, -1)
        best = values, positions
    assert best is not None, "a group longer than k has a window"
    return best[1]


def _refuse(problem: Problem) -> str | None:
    return "synchronises with the host, so it cannot be captured" if problem.capture else None


def _refuse_select(problem: Problem) -> str | None:
    if "batch_invariant" in problem.features and problem.device.backend != "cpu":
        return "a row's scores depend on its batch on a GPU, and deterministic=True forbids that"
    return _refuse(problem)


INDEXER_LOGITS = Kernel("torch", "indexer_logits", _refuse, indexer_logits)
SELECT = Kernel("torch", "select", _refuse_select, select, batch_invariant=True)
