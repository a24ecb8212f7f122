"""How the portable attention decodes fp8 codes: natively, and by bits as for older GPUs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from cases import SparseMlaCase
from topkapi import ops
from topkapi.kernels.triton import sparse_mla
from topkapi.kernels.triton.sparse_mla_codes import decode_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"


@triton.jit
def _decode_all(codes, even, odd, DECODER: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    first, second = decode_pairs(tl.load(codes + place), DECODER)
    tl.store(even + place, first)
    tl.store(odd + place, second)


@pytest.mark.parametrize("decoder", ["native", "bits", "plain"])
def test_all_pairs_of_codes(decoder: str) -> None:
    """As torch converts them, NaN for NaN."""
    codes = torch.arange(65536, device=DEVICE).to(torch.int16)
    even, odd = (torch.empty(65536, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _decode_all[(64,)](codes, even, odd, DECODER=decoder)
    want = codes.view(torch.float8_e4m3fn).half().view(65536, 2)
    torch.testing.assert_close(torch.stack((even, odd), 1), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [5, 32])
def test_codes_decoded_by_bits_give_the_same(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SparseMlaCase("", 9, heads=heads, k=300, cache=torch.uint8, pattern="holes")
    inputs = case.make(DEVICE, torch.bfloat16)
    want = ops.sparse_mla(**inputs, kernel="triton")
    monkeypatch.setattr(sparse_mla, "decoder_of", lambda device: "bits")
    got = ops.sparse_mla(**inputs, kernel="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
