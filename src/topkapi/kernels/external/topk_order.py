"""A peer's top-k in the order that our contract promises, and what such a peer may refuse.

Peers give an arbitrary order, break ties by chance and rank NaN as they please: their answer is
sorted here, but it stays inexact, so that `auto` never takes them. Knows no package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from topkapi.dispatch import Problem

_NONE = 2**31 - 1


def topk_in_order(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    fill: Callable[[torch.Tensor, torch.Tensor], object],
) -> torch.Tensor:
    """`[R, k]` int32 as `reference.topk` orders them, of what `fill(out [R, k], lengths [R])`, both
    int32, writes over the -1 in `out`. It is not called where there is nothing to select.
    """
    out = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    if out.numel() == 0 or logits.shape[1] == 0:
        return out
    lengths = lengths.to(torch.int32)
    fill(out, lengths)
    return ascending(out, lengths)


def ascending(positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`positions [R, k]` int in any order to int32 ascending, -1 at the end.

    Entries outside `0..lengths[r]-1` count as none. Never synchronises.
    """
    outside = (positions < 0) | (positions >= lengths[:, None])
    ordered = positions.to(torch.int32).masked_fill(outside, _NONE).sort(1).values
    return ordered.masked_fill_(ordered == _NONE, -1)


def refuse_topk(problem: Problem, sizes: tuple[int, ...]) -> str | None:
    """What holds for every such kernel on an NVIDIA GPU, or None."""
    if problem.device.backend != "cuda":
        return f"needs an NVIDIA GPU, this is {problem.device.label}"
    if sizes and problem.topk not in sizes:
        return f"selects {' or '.join(map(str, sizes))}, got {problem.topk}"
    return None
