"""e4m3 index queries on a GPU: the definition's bits, and scores on fp8 products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cases import RECORD_CASES, SELECT_CASES, RecordCase, SelectCase
from topkapi import ops, reference
from topkapi.attention.index_queries import quantize_index_query

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"
# Hopper's fp8 products keep about 13 bits of a sum, relative to its largest term.
FP8_PRODUCTS = 1e-3


def named(case: Any) -> str:
    return str(case.name)


@pytest.mark.parametrize("case", RECORD_CASES, ids=named)
def test_quantising_gives_the_definitions_bits(case: RecordCase) -> None:
    keys = case.make(DEVICE)["keys"]
    rows = keys.shape[0] // 3
    q = keys[: rows * 3].view(rows, 3, keys.shape[1])
    weights = torch.randn(rows, 3, device=DEVICE)
    codes, scaled = quantize_index_query(q, weights, kernel="triton")
    want, want_scaled = quantize_index_query(q.cpu(), weights.cpu(), kernel="torch")
    got, want = (x.cpu().view(torch.uint8) for x in (codes, want))
    nan = ((got & 0x7F) == 0x7F) & ((want & 0x7F) == 0x7F)
    assert bool(((got == want) | nan).all())
    assert torch.equal(scaled.cpu(), want_scaled)


CASES = (
    *(case for case in SELECT_CASES if case.cache == torch.uint8),
    SelectCase("decode", (1,) * 7, (5000, 2049, 63, 1, 700, 4096, 2048), k=512, heads=64,
               cache=torch.uint8, dtype=torch.bfloat16),
    SelectCase("prefill", (300, 1, 40), (3000, 900, 40), k=512, heads=64, cache=torch.uint8,
               dtype=torch.bfloat16, padded_rows=3),
    SelectCase("verify", (4,) * 5, (900,) * 5, k=64, heads=32, cache=torch.uint8,
               dtype=torch.bfloat16),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=named)
def test_scores_of_e4m3_queries(case: SelectCase) -> None:
    """Within the products' digits of the exact scores of the same codes, and then selected
    exactly: what is selected are the k highest of the logits that the kernel gives.
    """
    inputs = case.make(DEVICE)
    inputs["q"], inputs["weights"] = quantize_index_query(inputs["q"], inputs["weights"])
    k = inputs.pop("k")
    got = ops.indexer_logits(**inputs, kernel="triton")
    want = case.expected_logits(inputs)
    finite = want.isfinite()
    assert torch.equal(got.cpu() == float("-inf"), want == float("-inf"))
    assert torch.equal(got.cpu().isnan(), want.isnan())
    largest = torch.where(finite, want.abs(), 0.0).amax(1, keepdim=True).clamp_min(1e-9)
    error = torch.where(finite, (got.cpu() - want).abs(), 0.0) / largest
    print(case.name, float(error.max()))
    assert float(error.max()) < FP8_PRODUCTS
    positions = ops.select(**inputs, k=k, output="positions", kernel="triton")
    lengths = inputs["context"].lengths
    assert torch.equal(positions.cpu(), reference.topk(got.cpu(), lengths.cpu(), k))
    again = ops.select(**inputs, k=k, output="positions", kernel="triton")
    assert torch.equal(again, positions)


def test_a_graph_replays_on_new_queries() -> None:
    """Quantising and scoring captured together follow new values."""
    case = SelectCase("graph", (1,) * 8, (3000,) * 8, k=512, heads=64, cache=torch.uint8,
                      dtype=torch.bfloat16)  # fmt: skip
    inputs = case.make(DEVICE)
    q, weights = inputs.pop("q"), inputs.pop("weights")

    def step() -> torch.Tensor:
        codes, scaled = quantize_index_query(q, weights)
        return ops.select(codes, scaled, **inputs, kernel="triton")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    before = captured.clone()
    for length in (3000, 700):
        inputs["context"].lengths.fill_(length)
        q.normal_()
        graph.replay()
        assert torch.equal(captured, step())
    assert not torch.equal(captured, before)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize(
    ("q_dtype", "cache"),
    [
        (torch.float8_e4m3fn, torch.uint8),
        (torch.bfloat16, torch.uint8),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
    ids=["e4m3, fp8", "bf16, fp8", "bf16", "fp32"],
)
def test_a_row_scores_the_same_bits_in_any_batch(
    q_dtype: torch.dtype, cache: torch.dtype, heads: int
) -> None:
    """Decoded alone, verified beside 3 others, in a chunk of 40 or in one of 300."""
    dtype = torch.float32 if q_dtype == torch.float32 else torch.bfloat16
    case = SelectCase("rows", (300,), (3000,), heads=heads, cache=cache, dtype=dtype)
    inputs = case.make(DEVICE)
    q, weights, context = inputs["q"], inputs["weights"], inputs["context"]
    if q_dtype == torch.float8_e4m3fn:
        q, weights = quantize_index_query(q, weights)
    whole = ops.indexer_logits(q, weights, inputs["index_cache"], context, kernel="triton")
    for count in (1, 4, 40):
        for first in (0, 100, 300 - count):
            rows = slice(first, first + count)
            part = replace(
                context,
                lengths=context.lengths[rows],
                request_of_row=context.request_of_row[rows],
                cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
                max_seq_len_q=count,
            )
            got = ops.indexer_logits(
                q[rows], weights[rows], inputs["index_cache"], part, kernel="triton"
            )
            assert torch.equal(got, whole[rows]), (count, first)
