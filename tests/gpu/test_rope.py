"""Rope on a GPU: the definition's values up to one rounding, from slices of a projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from topkapi import reference
from topkapi.attention.rope import apply_rope

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "first", "pairs", "style"),
    [
        ((4097, 128, 192), 128, 32, "interleaved"),
        ((4097, 576), 512, 32, "interleaved"),
        ((300, 64, 128), 0, 32, "half"),
        ((1, 128), 0, 32, "half"),
        ((7, 3, 32), 20, 6, "half"),
    ],
)
def test_rope(
    shape: tuple[int, ...], first: int, pairs: int, style: Any, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)[..., first:]
    angles = torch.randn(shape[0], 2 * pairs, device="cuda")
    cos, sin = angles.cos().to(dtype)[:, :pairs], angles.sin().to(dtype)[:, pairs:]
    got = apply_rope(x, cos, sin, style, kernel="triton")
    want = reference.apply_rope(x, cos, sin, style)
    assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, dtype, True)
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)
