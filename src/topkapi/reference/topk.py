"""Which positions have the k highest logits: the definition, ties included.

A total order: higher logit first, then lower position. -0.0 equals 0.0; NaN ranks with -inf.
"""

from __future__ import annotations

import torch


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions `[R, k]` int32 of the k highest of each row's candidates, ascending, -1 at the end.

    `logits [R, S]` float; the candidates of row r are its columns `starts[r] + i` for
    `0 <= i < lengths[r]` (`starts` 0 when None), and positions count from `starts[r]`. All of them
    are taken when `lengths[r] <= k`. No other column is looked at. Synchronises.
    """
    positions = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if starts is None else int(starts[row])
        candidates = logits[row, start : start + length]
        candidates = candidates.masked_fill(candidates.isnan(), float("-inf"))
        best_first = torch.sort(candidates, descending=True, stable=True).indices
        chosen = best_first[:k].sort().values
        positions[row, : chosen.shape[0]] = chosen.to(torch.int32)
    return positions
