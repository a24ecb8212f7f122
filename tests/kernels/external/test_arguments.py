"""What peers' kernels are given, and that their untidy answers come out as the contract says.

The whole reference suite through every record that takes a case, with `recorders` in the packages'
place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import recorders
from cases import SELECT_CASES, SPARSE_MLA_CASES, TOPK_CASES, SelectCase, SparseMlaCase, TopkCase
from tolerances import OUTPUT, Tolerance, assert_close
from topkapi import reference
from topkapi.device import DeviceInfo
from topkapi.dispatch import Problem
from topkapi.kernels.external import (
    aiter,
    deep_gemm,
    fa3,
    flashmla_kv,
    flashmla_sparse,
    topk_flashinfer,
    topk_sgl_kernel,
    topk_vllm,
)
from topkapi.kernels.external.selected import compacted, flattened

BF16, FP8 = torch.bfloat16, torch.uint8


def named(case: Any) -> str:
    return str(case.name)


ATTENDED = (
    *(case for case in SPARSE_MLA_CASES if case.dtype == BF16 and case.latent + case.rope == 576),
    SparseMlaCase("bf16 63 heads", 3, heads=63, k=65, cache=BF16, dtype=BF16, pattern="holes"),
    SparseMlaCase("bf16 65 heads", 3, heads=65, k=1, cache=BF16, dtype=BF16, pattern="full"),
    SparseMlaCase("bf16 all empty", 3, heads=16, cache=BF16, dtype=BF16, pattern="all empty"),
    SparseMlaCase("bf16 leading", 3, heads=16, k=130, cache=BF16, dtype=BF16, pattern="leading"),
    SparseMlaCase("bf16 no rows", 0, heads=16, cache=BF16, dtype=BF16),
    SparseMlaCase("bf16 cap", 4, heads=16, cache=BF16, dtype=BF16, logit_cap=5.0, magnitude=3.0),
    SparseMlaCase("fp8 unpaged", 5, heads=3, k=7, cache=FP8, dtype=BF16, num_slots=101),
    SparseMlaCase("fp8 sinks", 5, heads=65, k=70, cache=FP8, dtype=BF16, sinks=True),
    SparseMlaCase("fp8 no slots", 3, heads=16, k=0, cache=FP8, dtype=BF16, pattern="full"),
)


def takes(case: SparseMlaCase, *, cache: tuple[torch.dtype, ...], sinks: bool, cap: bool) -> bool:
    return (
        case.cache in cache
        and (sinks or not case.sinks)
        and (cap or case.logit_cap == 0)
    )  # fmt: skip


def compare(case: SparseMlaCase, got: Any, inputs: dict[str, Any]) -> None:
    """As `case.compare`; an fp8 record that became bf16 rounded each latent value once more."""
    want_out, want_lse = case.expected(inputs)
    lse = 3e-3 if case.cache == FP8 else OUTPUT[BF16].lse
    assert_close("lse", got[1], want_lse, Tolerance(lse, lse, 0.0))
    assert_close("out", got[0], want_out, OUTPUT[BF16])


@pytest.mark.parametrize("case", ATTENDED, ids=named)
@pytest.mark.parametrize("heads", [(64, 128), (8, 16, 32, 64, 128)])
def test_flashmla_sparse(case: SparseMlaCase, heads: tuple[int, ...]) -> None:
    if not takes(case, cache=(BF16, FP8), sinks=True, cap=False):
        return
    inputs = case.make()
    peer: Any = recorders.FlashMlaPrefill(heads)
    compare(case, flashmla_sparse.sparse_mla(**inputs, peer=peer), inputs)


def test_flashmla_sparse_dequantises_within_its_budget_and_only_what_is_selected() -> None:
    case = SparseMlaCase("", 40, heads=16, k=128, cache=FP8, dtype=BF16, pattern="holes",
                         num_slots=5000)  # fmt: skip
    inputs = case.make()
    peer: Any = recorders.FlashMlaPrefill()
    budget = 3 * 128 * 576 * 2 + 100
    got = flashmla_sparse.sparse_mla(**inputs, peer=peer, budget_bytes=budget)
    compare(case, got, inputs)
    assert peer.largest_kv <= budget
    assert peer.calls == 14


@pytest.mark.parametrize("case", ATTENDED, ids=named)
def test_flashmla_kv(case: SparseMlaCase) -> None:
    if not takes(case, cache=(FP8,), sinks=True, cap=False):
        return
    inputs = case.make()
    peer: Any = recorders.FlashMlaDecode()
    case.compare(flashmla_kv.sparse_mla(**inputs, peer=peer), inputs)
    assert set(peer.pages) <= {64 if case.num_slots % 64 == 0 else 1}


def test_a_tile_schedule_is_made_once_a_step_and_kept_by_its_owner() -> None:
    case = SparseMlaCase("", 5, heads=16, cache=FP8, dtype=BF16)
    inputs = case.make()
    peer: Any = recorders.FlashMlaDecode()
    one, other = flashmla_kv.TileSchedule(), flashmla_kv.TileSchedule()
    for schedule in (one, one, other):
        flashmla_kv.sparse_mla(**inputs, peer=peer, prepared=schedule)
    first, second, third = peer.schedules
    assert first is second
    assert third is not first
    assert one.metadata is first
    assert other.metadata is third


def test_a_tile_schedule_is_never_replaced() -> None:
    """Not even where the package hands back another tensor: a graph may read the first."""
    decode = recorders.FlashMlaDecode()

    def copying(*arguments: Any) -> Any:
        out, lse, metadata, splits = decode(*arguments)
        return out, lse, metadata.clone(), splits.clone()

    inputs = SparseMlaCase("fp8", 3, heads=16, k=65, cache=FP8, dtype=BF16).make()
    schedule = flashmla_kv.TileSchedule()
    flashmla_kv.sparse_mla(**inputs, peer=copying, prepared=schedule)
    kept = schedule.metadata
    flashmla_kv.sparse_mla(**inputs, peer=copying, prepared=schedule)
    assert kept is not None
    assert schedule.metadata is kept


@pytest.mark.parametrize("case", ATTENDED, ids=named)
def test_fa3(case: SparseMlaCase) -> None:
    if not takes(case, cache=(BF16,), sinks=False, cap=True) or case.k == 0:
        return
    inputs = case.make()
    case.compare(fa3.sparse_mla(**inputs, peer=recorders.fa3), inputs)


@pytest.mark.parametrize("case", ATTENDED, ids=named)
def test_aiter(case: SparseMlaCase) -> None:
    if not takes(case, cache=(BF16,), sinks=False, cap=False) or case.k == 0:
        return
    inputs = case.make()
    case.compare(aiter.sparse_mla(**inputs, peer=recorders.aiter), inputs)


SLOTS = torch.tensor(
    [[5, -1, 7, 9, -1], [-1, -1, -1, -1, -1], [1, 2, 3, 4, 6], [-1, -1, -1, -1, 8]],
    dtype=torch.int32,
)


def test_a_selection_is_compacted_in_its_order() -> None:
    table, counts = compacted(SLOTS)
    assert counts.tolist() == [3, 0, 5, 1]
    assert table.tolist() == [[5, 7, 9, 9, 9], [0] * 5, [1, 2, 3, 4, 6], [8] * 5]
    table, counts = compacted(SLOTS.long())
    assert table.dtype == counts.dtype == torch.int32
    assert table.is_contiguous()


def test_a_selection_is_flattened_row_after_row() -> None:
    flat, begins = flattened(SLOTS)
    assert begins.tolist() == [0, 3, 3, 8, 9]
    assert flat.tolist() == [5, 7, 9, 1, 2, 3, 4, 6, 8] + [0] * 11
    assert flat.dtype == begins.dtype == torch.int32


SCORED = (
    *(replace(c, heads=32) for c in SELECT_CASES if c.cache == FP8 and c.index_dim == 128),
    SelectCase("decode", (1,) * 5, (1, 63, 64, 65, 700), heads=64, cache=FP8),
    SelectCase("verify", (2, 2, 2), (2, 64, 300), heads=32, cache=FP8, padded_rows=1),
    SelectCase("decode, starts", (1,) * 3, (9, 130, 70), heads=32, cache=FP8, addressing="starts"),
    SelectCase("requests without rows", (3, 0, 0, 65, 0, 1), (70, 0, 5, 129, 0, 9), heads=32,
               cache=FP8, padded_rows=4),
    SelectCase("nothing", (), (), heads=32, cache=FP8),
    SelectCase("all padding", (0,), (0,), heads=32, cache=FP8, padded_rows=2),
    SelectCase("NaN key, decode", (1, 1), (100, 300), heads=32, cache=FP8, values="nan key"),
    SelectCase("NaN row, decode", (1, 1), (100, 300), heads=32, cache=FP8, values="nan row"),
)  # fmt: skip


@pytest.mark.parametrize("case", SCORED, ids=named)
def test_deep_gemm(case: SelectCase) -> None:
    inputs = case.make(dtype=torch.float8_e4m3fn)
    peer = recorders.DeepGemm()
    scoring = deep_gemm._functions(peer)
    k = inputs.pop("k")
    case.compare_logits(deep_gemm.indexer_logits(**inputs, peer=scoring), inputs)
    one_row = case.addressing == "table" and max(case.q_lens, default=0) <= 2
    assert set(peer.calls) <= {"paged" if one_row else "ragged"}
    for budget in (2**28, 2**16):
        got = deep_gemm.select(**inputs, k=k, budget_bytes=budget, peer=scoring)
        case.compare(got, inputs)


def test_deep_gemm_gathers_within_its_budget() -> None:
    case = SelectCase("", (40, 3, 60), (700, 30, 900), heads=32, cache=FP8)
    inputs = case.make(dtype=torch.float8_e4m3fn)
    peer = recorders.DeepGemm()
    budget = 600_000
    got = deep_gemm.select(**inputs, budget_bytes=budget, peer=deep_gemm._functions(peer))
    case.compare(got, inputs)
    assert peer.most_keys * 132 <= budget
    assert len(peer.calls) > 1


RANKED: dict[str, Any] = {
    "sgl_kernel": topk_sgl_kernel,
    "vllm": topk_vllm,
    "flashinfer": topk_flashinfer,
}


@pytest.mark.parametrize("name", list(RANKED))
@pytest.mark.parametrize("case", TOPK_CASES, ids=named)
def test_topk(case: TopkCase, name: str) -> None:
    """With the reference's own choice in disorder, the wrapper must give its order back."""
    module = RANKED[name]
    gpu = DeviceInfo("cuda", 90, has_triton=True)
    features = frozenset({"starts"} if case.starts else ())
    problem = Problem("topk", gpu, torch.float32, topk=case.k, features=features)
    reason = module.TOPK.refuse(problem)
    if reason is not None and "package" not in reason:
        return
    inputs = case.make()
    case.compare(module.topk(**inputs, peer=getattr(recorders.Topk(), name)), inputs)


def test_the_recorders_can_tell_wrong_from_right() -> None:
    """A -1 inside a row, or a NaN read past its length, does not pass."""
    kv = torch.zeros(9, 1, 1, 576, dtype=BF16)
    q = torch.zeros(1, 1, 2, 576, dtype=BF16)
    table = torch.tensor([[1, -1, 2]], dtype=torch.int32)
    counts = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(AssertionError):
        recorders.fa3(
            q[..., 512:], kv[..., 512:], kv[..., :512], q[..., :512], table, counts, 1.0, 0.0
        )
    kv[0] = float("nan")
    table, counts = table.clamp_min(0), torch.tensor([1], dtype=torch.int32)
    out, _ = recorders.fa3(
        q[..., 512:], kv[..., 512:], kv[..., :512], q[..., :512], table, counts, 1.0, 0.0
    )
    assert bool(out.isnan().any())
    assert reference.topk(torch.zeros(1, 3), torch.tensor([2], dtype=torch.int32), 2).tolist() == [
        [0, 1]
    ]
