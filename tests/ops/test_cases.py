"""Every case of every operation through the public functions, against the float64 definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import (
    EXACT_FP8_CASES,
    RECORD_CASES,
    SELECT_CASES,
    SPARSE_MLA_CASES,
    TOPK_CASES,
    RecordCase,
    SelectCase,
    SparseMlaCase,
    TopkCase,
    poisoned_memory,
)
from topkapi import ops, reference
from topkapi.context import Context
from where import DEVICE

pytestmark = pytest.mark.any_device


def named(case: Any) -> str:
    return str(case.name)


@pytest.mark.parametrize("case", SPARSE_MLA_CASES + EXACT_FP8_CASES, ids=named)
def test_sparse_mla(case: SparseMlaCase) -> None:
    inputs = case.make(DEVICE)
    with poisoned_memory():
        got = ops.sparse_mla(**inputs, kernel="torch")
    case.compare(got, inputs)


@pytest.mark.parametrize("case", TOPK_CASES, ids=named)
def test_topk(case: TopkCase) -> None:
    inputs = case.make(DEVICE)
    with poisoned_memory():
        got = ops.topk(**inputs, kernel="torch")
    case.compare(got, inputs)


@pytest.mark.parametrize("case", SELECT_CASES, ids=named)
def test_indexer_logits(case: SelectCase) -> None:
    inputs = case.make(DEVICE)
    del inputs["k"]
    with poisoned_memory():
        got = ops.indexer_logits(**inputs, kernel="torch")
    case.compare_logits(got, inputs)


@pytest.mark.parametrize("output", ["slots", "positions"])
@pytest.mark.parametrize("case", SELECT_CASES, ids=named)
def test_select(case: SelectCase, output: Any) -> None:
    inputs = case.make(DEVICE)
    with poisoned_memory():
        got = ops.select(**inputs, output=output, kernel="torch")
    case.compare(got, inputs, output)


@pytest.mark.parametrize("case", RECORD_CASES, ids=named)
def test_write_latent_and_write_index_key(case: RecordCase) -> None:
    inputs = case.make(DEVICE)
    want = case.written(inputs)
    ops.write_latent(
        inputs["kv_cache"], inputs["slots"], inputs["latent"], inputs["rope"], kernel="torch"
    )
    ops.write_index_key(inputs["index_cache"], inputs["slots"], inputs["keys"], kernel="torch")
    for name, cache in want.items():
        case.compare(name, inputs[name], cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", RECORD_CASES, ids=named)
def test_gather_latent(case: RecordCase, dtype: torch.dtype) -> None:
    inputs = case.make(DEVICE)
    cache = case.written(inputs)["kv_cache"].to(DEVICE)
    none = inputs["slots"].new_full((1,), -1)
    slots = torch.cat((none, inputs["slots"], none))
    got = ops.gather_latent(cache, slots, v_dim=case.latent, dtype=dtype, kernel="torch")
    want = reference.gather_latent(cache, slots, v_dim=case.latent, dtype=dtype)
    case.compare("gathered", got, want)
    assert got.shape == (case.tokens + 2, case.latent + case.rope)
    assert not got[[0, -1]].any(), "slot -1 must give zeros, though slot 0 holds NaN"


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("paged", [False, True])
def test_rows_of_no_request_see_nothing(kernel: str, paged: bool) -> None:
    """Padding alone, as in a step that only keeps other ranks company: no table to look into."""
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    context = Context(
        lengths=torch.zeros(5, dtype=torch.int32, device=DEVICE),
        request_of_row=torch.zeros(5, dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        max_seq_len_q=1,
        max_length=40,
        **({"table": none.view(0, 40), "table_rows": none} if paged else {"starts": none}),
    )
    q, weights = torch.randn(5, 4, 64, device=DEVICE), torch.randn(5, 4, device=DEVICE)
    cache = torch.randn(100, 64, device=DEVICE)
    with poisoned_memory():
        logits = ops.indexer_logits(q, weights, cache, context, kernel=kernel)
        slots = ops.select(q, weights, cache, context, 7, kernel=kernel)
    assert logits.shape == (5, 40)
    assert (logits == float("-inf")).all()
    assert slots.shape == (5, 7)
    assert slots.dtype == torch.int32
    assert (slots == -1).all()
