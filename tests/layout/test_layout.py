"""Sizes and byte offsets of the records, as the peers' formats have them."""

from __future__ import annotations

import pytest
import torch

from topkapi.layout import INDEX_BF16, INDEX_FP8, INDEX_FP32, LATENT_BF16, LATENT_FP8, LATENT_FP32
from topkapi.layout.index_key import fp8_page_views, index_key_layout
from topkapi.layout.latent import LatentLayout, latent_layout


@pytest.mark.parametrize(
    ("layout", "latent", "rope", "size", "width"),
    [
        (LATENT_FP8, 512, 64, 656, 656),
        (LATENT_FP8, 128, 32, 196, 196),
        (LATENT_FP8, 192, 0, 200, 200),
        (LATENT_BF16, 512, 64, 1152, 576),
        (LATENT_FP32, 512, 64, 2304, 576),
    ],
)
def test_latent_records(
    layout: LatentLayout, latent: int, rope: int, size: int, width: int
) -> None:
    assert layout.bytes_per_token(latent, rope) == size
    assert layout.width(latent, rope) == width


def test_index_keys() -> None:
    assert INDEX_FP8.bytes_per_token(128) == 132
    assert INDEX_FP8.cache_shape(3, 64, 128) == (3, 8448)
    assert INDEX_BF16.bytes_per_token(128) == 256
    assert INDEX_FP32.cache_shape(3, 64, 128) == (192, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_a_dtype_names_one_layout(dtype: torch.dtype) -> None:
    assert latent_layout(dtype).dtype == dtype
    assert index_key_layout(dtype).dtype == dtype
    assert latent_layout(dtype).name == index_key_layout(dtype).name


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_page_views_share_the_bytes(dim: int) -> None:
    cache = torch.arange(3 * 64 * (dim + 4)).to(torch.uint8).view(3, -1)
    keys, scales = fp8_page_views(cache, dim, 64)
    assert keys.shape == (3, 64, dim)
    assert scales.shape == (3, 64)
    for page, token in ((0, 0), (1, 63), (2, 7)):
        row = cache[page, token * dim : (token + 1) * dim]
        assert torch.equal(keys[page, token].view(torch.uint8), row)
        at = 64 * dim + 4 * token
        assert torch.equal(scales[page, token].view(1).view(torch.uint8), cache[page, at : at + 4])
    keys.view(torch.uint8)[2, 5] = 255
    assert bool((cache[2, 5 * dim : 6 * dim] == 255).all()), "a view, not a copy"
