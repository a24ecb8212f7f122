"""The quick readers of fp8 records give the very values of the reference."""

from __future__ import annotations

import pytest
import torch

from topkapi import reference
from topkapi.kernels.torch_cpu.fp8 import (
    dequantize_latent_into,
    e4m3_to_fp32,
    read_index_keys,
)
from topkapi.layout import LATENT_FP8


def test_all_256_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    want = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(e4m3_to_fp32(codes), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 32), (192, 0), (64, 32), (320, 6)])
def test_latents(latent: int, rope: int) -> None:
    torch.manual_seed(0)
    records = reference.quantize_latent(torch.randn(33, latent) * 50, torch.randn(33, rope))
    assert records.shape[1] == LATENT_FP8.bytes_per_token(latent, rope)
    out = torch.full((33, latent + rope), torch.nan)
    dequantize_latent_into(records, latent, out)
    assert torch.equal(out, reference.dequantize_latent(records, latent, rope))


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_index_keys_by_page_and_one_by_one(dim: int) -> None:
    torch.manual_seed(1)
    cache = torch.zeros(9, 64 * (dim + 4), dtype=torch.uint8)
    reference.write_index_key(cache, torch.arange(9 * 64), torch.randn(9 * 64, dim))
    pages = torch.tensor([3, 8, 1])
    by_page = (pages[:, None] * 64 + torch.arange(64)).flatten()
    shifted = torch.cat((by_page[1:], by_page[:1]))
    almost = by_page.clone()
    almost[130] = 5
    for slots in (by_page, shifted, almost, torch.randperm(9 * 64)[:65], by_page[:0]):
        keys, scales = read_index_keys(cache, slots, dim)
        want_keys, want_scales = reference.read_index_key(cache, slots, dim)
        assert want_scales is not None
        assert torch.equal(keys, want_keys.float())
        assert torch.equal(scales, want_scales)
