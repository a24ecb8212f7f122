"""The definitions themselves, against their formulas in plain Python numbers."""

from __future__ import annotations

import math

import pytest
import torch

from cases import make_context
from topkapi import reference


def test_a_logit_is_the_weighted_sum_of_positive_products() -> None:
    torch.manual_seed(0)
    q = torch.randn(4, 3, 32, dtype=torch.float64)
    weights = torch.randn(4, 3, dtype=torch.float64)
    context, num_slots = make_context((3, 1), (5, 2))
    cache = torch.randn(num_slots, 32, dtype=torch.float64)
    logits = reference.indexer_logits(q, weights, cache, context)
    assert logits.shape == (4, 5)
    for row in range(4):
        request = 0 if row < 3 else 1
        slots = reference.indexer.context_slots(context, request, int(context.lengths[row]))
        for position in range(5):
            if position >= context.lengths[row]:
                assert logits[row, position] == -math.inf
                continue
            key = cache[slots[position]].tolist()
            want = sum(
                float(weights[row, h])
                * max(0.0, sum(a * b for a, b in zip(q[row, h].tolist(), key, strict=True)))
                for h in range(3)
            )
            assert float(logits[row, position]) == pytest.approx(want, rel=1e-12)


def test_an_fp8_logit_carries_the_scale_of_its_key() -> None:
    torch.manual_seed(1)
    q, weights = torch.randn(1, 2, 128), torch.rand(1, 2)
    context, num_slots = make_context((1,), (70,))
    keys = torch.randn(num_slots, 128) * torch.logspace(-2, 2, num_slots)[:, None]
    fp8 = torch.zeros(num_slots // 64, 64 * 132, dtype=torch.uint8)
    reference.write_index_key(fp8, torch.arange(num_slots), keys)
    rounded = reference.dequantize_index_key(*reference.quantize_index_key(keys))
    got = reference.indexer_logits(q.double(), weights, fp8, context)
    want = reference.indexer_logits(q.double(), weights, rounded, context)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_topk_takes_the_lowest_positions_of_a_tie() -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 3.0, 0.0, 9.0],
            [0.0, -0.0, 0.0, -0.0, 0.0, 9.0],
            [nan, -inf, nan, -5.0, -inf, 9.0],
            [inf, nan, inf, inf, 2.0, 9.0],
        ]
    )
    got = reference.topk(logits, torch.tensor([5, 5, 5, 2], dtype=torch.int32), 3)
    assert got.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 3], [0, 1, -1]]
    starts = torch.tensor([1, 0, 3, 4], dtype=torch.int32)
    got = reference.topk(logits, torch.tensor([3, 0, 3, 2], dtype=torch.int32), 2, starts=starts)
    assert got.tolist() == [[0, 1], [-1, -1], [0, 2], [0, 1]]


def test_select_maps_positions_to_slots() -> None:
    torch.manual_seed(2)
    context, num_slots = make_context((2, 1), (100, 80), padded_rows=1)
    inputs = torch.randn(4, 2, 32), torch.randn(4, 2), torch.randn(num_slots, 32), context, 7
    positions = reference.select(*inputs, output="positions")
    slots = reference.select(*inputs)
    assert context.table is not None
    for row, table_row in enumerate((2, 2, 1)):
        assert slots[row].tolist() == context.table[table_row, positions[row].long()].tolist()
    assert slots[3].tolist() == positions[3].tolist() == [-1] * 7


@pytest.mark.parametrize("cap", [0.0, 2.5])
@pytest.mark.parametrize("sink", [None, 1.3])
def test_sparse_mla_is_a_softmax_over_the_selected_tokens(cap: float, sink: float | None) -> None:
    torch.manual_seed(3)
    q = torch.randn(2, 3, 6, dtype=torch.float64)
    cache = torch.randn(10, 1, 6, dtype=torch.float64)
    slots = torch.tensor([[3, -1, 7, 7], [-1, 2, -1, 5]])
    sinks = None if sink is None else torch.full((3,), sink)
    out, lse = reference.sparse_mla(q, cache, slots, scale=0.7, v_dim=4, sinks=sinks, logit_cap=cap)
    for row, chosen in enumerate(([3, 7, 7], [2, 5])):
        for head in range(3):
            scores = [0.7 * float(q[row, head] @ cache[slot, 0]) for slot in chosen]
            if cap:
                scores = [cap * math.tanh(score / cap) for score in scores]
            total = sum(math.exp(score) for score in scores)
            divisor = total + (0.0 if sinks is None else math.exp(float(sinks[head])))
            assert float(lse[row, head]) == pytest.approx(math.log(total), rel=1e-12)
            for dim in range(4):
                want = sum(
                    math.exp(score) * float(cache[slot, 0, dim])
                    for score, slot in zip(scores, chosen, strict=True)
                )
                assert float(out[row, head, dim]) == pytest.approx(want / divisor, rel=1e-9)


def test_the_definitions_take_float64_and_empty_tensors() -> None:
    context, _ = make_context((), ())
    q = torch.zeros(0, 2, 32, dtype=torch.float64)
    assert reference.indexer_logits(q, torch.zeros(0, 2), torch.zeros(64, 32), context).shape == (
        0,
        0,
    )
    assert reference.select(q, torch.zeros(0, 2), torch.zeros(64, 32), context, 4).shape == (0, 4)
    out, lse = reference.sparse_mla(
        torch.zeros(0, 2, 6, dtype=torch.float64),
        torch.zeros(4, 1, 6),
        torch.zeros(0, 3, dtype=torch.int32),
        scale=1.0,
        v_dim=4,
    )
    assert out.shape == (0, 2, 4)
    assert out.dtype == torch.float64
    assert lse.shape == (0, 2)
