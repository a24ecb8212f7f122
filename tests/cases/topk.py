"""Cases of `topk`: lengths around k, ties, infinities, NaN, garbage outside the range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from topkapi import reference

Values = Literal["normal", "ties", "zeros", "special", "signed_zeros", "ascending", "outliers"]


@dataclass(frozen=True)
class TopkCase:
    """`lengths` of the rows, the width S of the logits, k, and what the values are like."""

    name: str
    lengths: tuple[int, ...]
    width: int
    k: int
    values: Values = "normal"
    starts: tuple[int, ...] | None = None
    seed: int = 0

    def make(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Keyword arguments of `topk`. Columns outside a row's range hold +inf or NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = len(self.lengths)
        logits = _values(self.values, rows, self.width, generator)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        starts = None if self.starts is None else torch.tensor(self.starts, dtype=torch.int32)
        first = torch.zeros(rows, dtype=torch.int32) if starts is None else starts
        column = torch.arange(self.width)
        outside = (column < first[:, None]) | (column >= (first + lengths)[:, None])
        garbage = torch.where(column % 2 == 0, float("inf"), float("nan"))
        logits = torch.where(outside, garbage, logits)
        return {
            "logits": logits.to(device),
            "lengths": lengths.to(device),
            "k": self.k,
            "starts": None if starts is None else starts.to(device),
        }

    def compare(self, got: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Bit-equal to the definition: the order is total, so there is one answer."""
        cpu = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in inputs.items()}
        want = reference.topk(**cpu)
        assert got.dtype == torch.int32
        assert torch.equal(got.cpu(), want), f"{self.name}: {got.cpu()} instead of {want}"


def _values(kind: Values, rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(rows, width, generator=generator)
    if kind == "ties":
        return torch.randint(-2, 3, (rows, width), generator=generator).float()
    if kind == "zeros":
        return torch.zeros(rows, width)
    if kind == "signed_zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "ascending":
        return torch.arange(width).float().expand(rows, width).contiguous()
    if kind == "special":
        choices = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1.0, -1.0])
        return choices[torch.randint(0, len(choices), (rows, width), generator=generator)]
    if kind == "outliers":
        huge = torch.randint(0, 50, (rows, width), generator=generator) == 0
        return torch.where(huge, normal * 1e38, normal * 1e-42)
    return normal


TOPK_CASES = (
    TopkCase("one", (1,), 1, 1),
    TopkCase("empty batch", (), 7, 3),
    TopkCase("no columns", (0, 0), 0, 3),
    TopkCase("inert rows", (0, 5, 0, 9), 9, 4),
    TopkCase("around k", (62, 63, 64, 65, 127, 128), 128, 64),
    TopkCase("k=1", (1, 2, 63, 65), 65, 1),
    TopkCase("k over the width", (1, 5, 9), 9, 2048),
    TopkCase("odd k", (700, 701, 1), 701, 63),
    TopkCase("ties", (65, 300, 1000), 1000, 65, "ties"),
    TopkCase("all equal", (63, 64, 65, 4097), 4097, 64, "zeros"),
    TopkCase("signed zeros", (257, 100), 257, 100, "signed_zeros"),
    TopkCase("special", (513, 40, 64, 0), 513, 64, "special"),
    TopkCase("special k=1", (513, 40, 3), 513, 1, "special"),
    TopkCase("ascending", (3000, 2049), 3000, 2048, "ascending"),
    TopkCase("outliers", (2500, 100), 2500, 100, "outliers"),
    TopkCase("starts", (10, 0, 64, 65), 200, 64, "ties", starts=(3, 200, 100, 135)),
    TopkCase("starts inside", (50, 63, 129), 1000, 32, "special", starts=(950, 1, 64)),
    TopkCase("long", (20000, 19999, 2048), 20000, 2048),
    TopkCase("long ties", (20000, 2049, 17), 20000, 2048, "ties"),
    TopkCase("many rows", tuple(range(130)), 129, 17, "ties"),
)
