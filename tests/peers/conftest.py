"""The oracle's one correction: Transformers' `torch.topk` breaks ties by chance."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def stable_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU makes plateaus of exact 0.0; at the k-th score the lowest position wins, as in ours."""

    def topk(
        self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> torch.return_types.topk:
        values, indices = torch.sort(self, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    monkeypatch.setattr(torch.Tensor, "topk", topk)
