"""Tiles of 384 keys give a prompt's scores the bits that every other kernel gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cases import SelectCase
from cases.contexts import Addressing
from topkapi import ops
from topkapi.device import device_info
from topkapi.kernels.triton.indexer_logits import LONG, Tile, choose_tile, launch_scores
from topkapi.kernels.triton.indexer_logits_long import KEYS, stages_of

DEVICE = "cuda"
E4M3 = torch.float8_e4m3fn
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or device_info(torch.device(DEVICE)).arch != 90,
        reason="needs sm90",
    ),
]


def portable(heads: int, dtype: torch.dtype) -> Tile:
    return Tile(128, 256 if dtype == E4M3 else 128, 64 // heads * (2 if dtype == E4M3 else 1), 4, 3)


def scores(inputs: dict[str, Any], tile: Tile, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """Logits of some rows, all by default, on poison, -inf past each length."""
    q, context = inputs["q"], inputs["context"]
    first, last = rows or (0, q.shape[0])
    out = torch.full((last - first, context.max_length), float("nan"), device=DEVICE)
    launch_scores(
        q.contiguous(), inputs["weights"].contiguous(), inputs["index_cache"], context, out,
        first_row=first, fill=True, tile=tile,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("addressing", ["table", "starts"])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits(heads: int, dtype: torch.dtype, addressing: Addressing) -> None:
    """Requests that end inside a tile, empty ones, padding, and a part of the rows alone."""
    case = SelectCase("prompts", (301, 40, 0, 129), (1000, 40, 0, 2100), heads=heads,
                      cache=torch.uint8, padded_rows=3, addressing=addressing)  # fmt: skip
    inputs = case.make(DEVICE, dtype)
    tile = Tile(KEYS.value, 256, 128 // heads, 4, stages_of(dtype.itemsize), long=True)
    want = scores(inputs, portable(heads, dtype))
    for rows in (256, 64):
        one = Tile(tile.positions, rows, tile.group, 4, tile.stages, long=True)
        got = scores(inputs, one)
        assert torch.equal(got, want)
    assert torch.equal(scores(inputs, tile, (290, 367)), want[290:367])


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=str)
def test_long_contexts(dtype: torch.dtype) -> None:
    case = SelectCase("long", (300, 33), (LONG + 3000, 900), heads=64, cache=torch.uint8, k=512)
    inputs = case.make(DEVICE, dtype)
    k = inputs.pop("k")
    want = scores(inputs, portable(64, dtype))
    got = ops.indexer_logits(**inputs, kernel="triton")
    assert torch.equal(got, want)
    decoding = choose_tile(device_info(torch.device(DEVICE)), 64, dtype.itemsize, True, 8, 1)
    assert decoding.stream
    assert torch.equal(got, scores(inputs, decoding))
    chosen = ops.select(**inputs, k=k, output="positions", kernel="triton", budget_bytes=2**23)
    assert torch.equal(chosen, ops.topk(want, inputs["context"].lengths, k, kernel="triton"))
