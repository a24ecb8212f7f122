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


def test_a_row_selects_the_same_in_any_batch() -> None:
    """Decoded alone, among others, or as the last row of a prefill's chunk of 3."""
    case = SelectCase("rows", (3, 1, 1), (3000, 900, 2500), k=256, heads=64, cache=torch.uint8,
                      dtype=torch.bfloat16)  # fmt: skip
    inputs = case.make(DEVICE)
    q, weights = quantize_index_query(inputs["q"], inputs["weights"])
    context, k = inputs["context"], inputs["k"]
    whole = ops.select(q, weights, inputs["index_cache"], context, k, kernel="triton")
    bounds = context.cu_seqlens_q.tolist()
    for request in range(3):
        row = bounds[request + 1] - 1
        one = replace(
            context,
            lengths=context.lengths[row : row + 1],
            request_of_row=torch.zeros_like(context.request_of_row[:1]),
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            max_seq_len_q=1,
            table_rows=context.table_rows[request : request + 1],
        )
        part = slice(row, row + 1)
        alone = ops.select(q[part], weights[part], inputs["index_cache"], one, k, kernel="triton")
        assert torch.equal(alone, whole[part])
