"""The memory that the torch kernels take: never `[rows, context]` beyond the budget."""

from __future__ import annotations

import pytest
import torch

from cases import LargestTensor, SelectCase, make_context
from topkapi import ops, reference
from topkapi.layout import INDEX_FP8

MIB = 2**20


@pytest.mark.parametrize("budget", [2**16, MIB, 4 * MIB])
@pytest.mark.parametrize("values", ["normal", "zeros"])
def test_select_stays_within_its_budget(values: str, budget: int) -> None:
    """Ties everywhere are the worst case: each row's border is settled by position."""
    case = SelectCase("", (300, 1), (6000, 5000), k=64, heads=4, index_dim=32, values=values)  # type: ignore[arg-type]
    inputs = case.make()
    arguments = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    with LargestTensor(*arguments) as watch:
        got = ops.select(**inputs, kernel="torch", budget_bytes=budget)
    # A tile of scores is scratch memory of a fixed size: 1 MiB a thread, of 8 threads at most.
    assert watch.bytes <= max(budget, MIB * min(torch.get_num_threads(), 8)), watch.shape
    whole = ops.select(**inputs, kernel="torch")
    assert torch.equal(got, whole), "the budget must not change the selection"


@pytest.mark.parametrize("k", [1, 64, 700])
def test_a_context_wider_than_the_window_is_merged_exactly(k: int) -> None:
    context, num_slots = make_context((3, 1, 2), (9000, 513, 4100), padded_rows=1)
    generator = torch.Generator().manual_seed(5)
    q = torch.randint(-1, 2, (7, 2, 32), generator=generator).float()
    weights = torch.randint(-1, 3, (7, 2), generator=generator).float()
    cache = torch.randint(-1, 2, (num_slots, 32), generator=generator).float()
    got = ops.select(q, weights, cache, context, k, budget_bytes=2**16, output="positions")
    assert torch.equal(got, reference.select(q, weights, cache, context, k, output="positions"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_sparse_mla_stays_within_its_budget(dtype: torch.dtype, phase: str) -> None:
    budget = 2 * MIB
    cache = torch.zeros(600, 1, 656 if dtype == torch.uint8 else 576, dtype=dtype)
    q = torch.zeros(40, 8, 576)
    slots = torch.randint(0, 600, (40, 256), generator=torch.Generator().manual_seed(0))
    with LargestTensor(q, cache, slots) as watch:
        ops.sparse_mla(q, cache, slots, scale=1.0, budget_bytes=budget, phase=phase)  # type: ignore[arg-type]
    assert watch.bytes <= budget, watch.shape
    assert watch.bytes < 4 * 40 * 256 * 576


def test_topk_works_in_blocks_of_rows() -> None:
    logits = torch.zeros(3000, 3000)
    lengths = torch.full((3000,), 3000, dtype=torch.int32)
    with LargestTensor(logits, lengths) as watch:
        got = ops.topk(logits, lengths, 2, kernel="torch")
    assert watch.bytes <= 20 * MIB, watch.shape
    assert torch.equal(got, torch.tensor([0, 1], dtype=torch.int32).expand(3000, 2))


def test_rows_no_longer_than_k_are_not_scored() -> None:
    """The cache holds nothing but NaN and too few pages: touching it would show."""
    context, _ = make_context((5, 1), (60, 64))
    cache = torch.full(INDEX_FP8.cache_shape(1, 64, 128), 0xFF, dtype=torch.uint8)
    q, weights = torch.randn(6, 4, 128), torch.rand(6, 4)
    got = ops.select(q, weights, cache, context, 64, output="positions")
    column = torch.arange(64)
    assert torch.equal(got, torch.where(column < context.lengths[:, None], column, -1).int())
