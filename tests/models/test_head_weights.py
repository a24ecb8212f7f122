"""Index heads' weights: from whatever projects, in fp32, by the product that the device has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from topkapi.device import DeviceInfo
from topkapi.models import attention
from topkapi.models.attention import head_weights


class Packed(nn.Module):
    """A projection that keeps its weights in a way of its own, as quantised ones do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :4]


def test_a_projection_of_any_kind() -> None:
    x = torch.randn(3, 8).bfloat16()
    for row_invariant in (False, True):
        got = head_weights(Packed(), x, row_invariant=row_invariant)
        assert torch.equal(got, x[:, :4].float())


@pytest.mark.parametrize("backend", ["cuda", "hip"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpus_products_give_fp32(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as that can be seen without values; rows may lie apart."""
    monkeypatch.setattr(attention, "device_info", lambda device: DeviceInfo(backend))
    projection = nn.Linear(8, 4, bias=False, device="meta", dtype=dtype).requires_grad_(False)
    for rows in (0, 1, 5):
        x = torch.empty(rows, 16, device="meta", dtype=dtype)[:, ::2]
        got = head_weights(projection, x, row_invariant=False)
        assert (got.shape, got.dtype) == ((rows, 4), torch.float32)
