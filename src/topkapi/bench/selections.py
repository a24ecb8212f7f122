"""Which tokens do the queries of a measured case select? Uniformly random ones, or as many shared
with neighbouring queries as the demo model's indexers share.

`SHARED` is what was measured, `LIFETIMES` the simplest process found that repeats it: each of the k
selected tokens of a query has a lifetime, and the next query keeps it with the probability that
this gives, or draws another. Where in the context the tokens lie is not imitated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from topkapi.errors import ConfigError


@dataclass(frozen=True)
class SharedSelections:
    """What share of a query's selection the query `distance` tokens before it selected, too.

    Means over layers and documents of the demo model; `uniform` is what a uniform choice of k from
    such a context would share. Measured by `topkapi bench overlap`.
    """

    context: int
    k: int
    documents: int
    date: str
    shares: dict[int, float]

    @property
    def uniform(self) -> float:
        return self.k / self.context


# Rows of the second half of each document. All distances and each layer by itself:
# benchmarks/results/cpu/selection_overlap.jsonl.
SHARED = (
    SharedSelections(
        context=4096,
        k=128,
        documents=6,
        date="2026-11-30",
        shares={1: 0.662, 4: 0.584, 16: 0.508, 64: 0.356, 256: 0.195, 1024: 0.087},
    ),
)
# Share of the selection with a mean lifetime in queries (0: drawn anew by each query). Fitted to
# SHARED[0] by least squares, within 0.025 at every distance measured.
LIFETIMES = ((0.29, 0.0), (0.14, 2.0), (0.31, 64.0), (0.26, 512.0))


def keeping_probabilities(k: int) -> torch.Tensor:
    """`[k]` fp32: how probably the next query keeps each selected token."""
    shares, lifetimes = torch.tensor(LIFETIMES).unbind(1)
    place = (torch.arange(k) + 0.5) / k
    which = torch.searchsorted(shares.cumsum(0), place).clamp_max(len(LIFETIMES) - 1)
    return torch.exp(-1 / lifetimes)[which]  # exp(-1 / 0) is 0


def expected_share(distance: int, k: int, visible: int) -> float:
    """What `overlapping_positions` gives on average: kept tokens, and those drawn again."""
    kept = keeping_probabilities(k).double().pow(distance).mean().item()
    return kept + (1 - kept) * k / visible


def overlapping_positions(
    lengths: torch.Tensor, k: int, context: int, generator: torch.Generator
) -> torch.Tensor:
    """`[R, k]` ascending distinct positions; `lengths [R]` are the last R lengths of one context.

    Token j of a selection lies in the j-th of k equal stretches of what all rows see. Raises
    `ConfigError` where the first row sees fewer than k tokens.
    """
    rows, device = lengths.shape[0], generator.device
    visible = context - rows + 1
    if visible < k:
        raise ConfigError(f"overlap: the first of {rows} rows sees {visible} tokens, fewer than k")
    keep = keeping_probabilities(k).to(device)
    keep = keep[torch.randperm(k, generator=generator, device=device)]
    renewed = torch.rand(rows, k, generator=generator, device=device) >= keep
    row = torch.arange(rows, device=device)[:, None]
    drawn_by = torch.where(renewed, row, 0).cummax(0).values
    edges = torch.arange(k + 1, device=device) * visible // k
    place = torch.rand(rows, k, generator=generator, device=device, dtype=torch.float64)
    drawn = edges[:-1] + (place * (edges[1:] - edges[:-1])).long()
    return drawn.gather(0, drawn_by)


def uniform_positions(
    lengths: torch.Tensor, k: int, context: int, generator: torch.Generator
) -> torch.Tensor:
    """`[R, k]` ascending distinct positions of `lengths [R]` tokens each, -1 at the end."""
    rows, device = lengths.shape[0], generator.device
    found = torch.full((rows, k), -1, dtype=torch.int64, device=device)
    block = max(1, 2**27 // context)
    for first in range(0, rows, block):
        part = lengths[first : first + block, None]
        place = torch.rand(len(part), context, generator=generator, device=device)
        place.masked_fill_(torch.arange(context, device=device) >= part, -1.0)
        best = place.topk(min(k, context), dim=1)
        position = torch.where(best.values < 0, context, best.indices).sort(1).values
        position = torch.where(position == context, -1, position)
        found[first : first + block, : position.shape[1]] = position
    return found
