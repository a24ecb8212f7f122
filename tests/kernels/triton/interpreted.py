"""Every case of every operation through the Triton kernels, in Triton's interpreter.

Run by `test_interpreter.py` in a process of its own, in which TRITON_INTERPRET=1 holds from the
start. The interpreter has no bfloat16: those cases wait for a GPU (tests/gpu).
"""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
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
from topkapi.attention.index_queries import quantize_index_query
from topkapi.attention.rope import apply_rope
from topkapi.attention.step_metadata import StepBuffers, step_metadata
from topkapi.context import Context
from topkapi.device import DeviceInfo
from topkapi.kernels.triton import sparse_mla, topk

warnings.filterwarnings("ignore", category=RuntimeWarning)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


TENSORS = [item.name for item in fields(StepBuffers) if item.type == "torch.Tensor"]


def named(case: Any) -> str:
    return str(case.name)


def without_bf16(cases: Any) -> list[Any]:
    return [case for case in cases if torch.bfloat16 not in (case.dtype, case.cache)]


def few_rows(cases: Any) -> list[Any]:
    """A row takes a second under load: the large batches but one wait for a GPU, too."""
    return [c for c in without_bf16(cases) if sum(c.q_lens) <= 40 or c.name == "mixed"]


@pytest.mark.parametrize("case", without_bf16(SPARSE_MLA_CASES), ids=named)
def test_sparse_mla(case: SparseMlaCase) -> None:
    inputs = case.make()
    with poisoned_memory():
        got = ops.sparse_mla(**inputs, kernel="triton")
    case.compare(got, inputs)


# Those of few heads, with queries that the interpreter has.
FP8_CASES = [
    replace(case, dtype=torch.float16)
    for case in SPARSE_MLA_CASES + EXACT_FP8_CASES
    if (case.cache, case.dtype) == (torch.uint8, torch.bfloat16) and case.heads < 20
]


@pytest.mark.parametrize(
    "case",
    [
        SparseMlaCase("72 heads", 3, heads=72, k=128, pattern="tail"),
        SparseMlaCase("72 heads, odd k", 3, heads=72, k=131, pattern="holes", sinks=True),
        SparseMlaCase("64 heads, cap", 4, heads=64, k=65, pattern="empty rows", logit_cap=9.0),
        SparseMlaCase("64 heads, all empty", 3, heads=64, k=64, pattern="all empty"),
        SparseMlaCase("64 heads, no rope", 3, heads=64, k=70, latent=128, rope=0, poison="query"),
        SparseMlaCase("16 heads", 4, heads=16, k=192, pattern="holes"),
        SparseMlaCase("3 heads, uneven dims", 5, heads=3, k=70, latent=100, rope=20),
        SparseMlaCase("64 heads, fp8", 3, heads=64, k=80, cache=torch.uint8, pattern="holes"),
        *FP8_CASES,
    ],
    ids=named,
)
@pytest.mark.parametrize("splits", [1, None, 5])
def test_sparse_mla_as_on_sm90(
    case: SparseMlaCase, splits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles that an sm90 gets; some of the programs that share a row get no slot of it."""
    sm90 = DeviceInfo("cuda", 90, "sm90", 132, 227 * 1024, has_triton=True)
    monkeypatch.setattr(sparse_mla, "target_of", lambda tensor: sm90)
    monkeypatch.setattr(sparse_mla, "native_fp8", lambda device: False)
    inputs = case.make(dtype=torch.float16)
    inputs["kv_cache"] = case_cache(inputs["kv_cache"])
    inputs["slots"] = inputs["slots"].to(torch.int32 if splits == 1 else torch.int64)
    with poisoned_memory():
        got = sparse_mla.sparse_mla(**inputs, splits=splits)
    case.compare(got, inputs)


def case_cache(cache: torch.Tensor) -> torch.Tensor:
    """Records in the query's dtype, so that tiles of matrix instructions are chosen."""
    return cache if cache.dtype == torch.uint8 else cache.half()


@pytest.mark.parametrize("case", TOPK_CASES, ids=named)
def test_topk(case: TopkCase) -> None:
    inputs = case.make()
    with poisoned_memory():
        got = ops.topk(**inputs, kernel="triton")
    case.compare(got, inputs)


@pytest.mark.parametrize("case", few_rows(SELECT_CASES), ids=named)
def test_indexer_logits(case: SelectCase) -> None:
    inputs = case.make()
    del inputs["k"]
    with poisoned_memory():
        got = ops.indexer_logits(**inputs, kernel="triton")
    case.compare_logits(got, inputs)


@pytest.mark.parametrize("case", few_rows(SELECT_CASES), ids=named)
def test_select(case: SelectCase) -> None:
    output: Any = "positions" if len(case.name) % 4 == 0 else "slots"
    inputs = case.make()
    with poisoned_memory():
        got = ops.select(**inputs, output=output, kernel="triton")
    case.compare(got, inputs, output)


def test_e4m3_queries() -> None:
    """The logits of the very values that the codes stand for."""
    case = SelectCase("e4m3 query", (9, 1), (200, 300), cache=torch.uint8)
    inputs = case.make(dtype=torch.float8_e4m3fn)
    del inputs["k"]
    for kernel in ("triton", "torch"):
        got = ops.indexer_logits(**inputs, kernel=kernel)
        want = reference.indexer_logits(**{**inputs, "q": inputs["q"].double()})
        finite = want.isfinite()
        assert torch.equal(finite, got.isfinite())
        assert (got - want)[finite].abs().max() < 1e-5 * want[finite].abs().max()


@pytest.mark.parametrize("case", without_bf16(RECORD_CASES), ids=named)
def test_index_queries_are_quantised(case: RecordCase) -> None:
    """Heads of odd count, and rows that lie apart in memory; the bits of the definition."""
    keys = case.make()["keys"]
    for heads in (1, 3):
        rows = keys.shape[0] // heads
        q = torch.stack((keys, keys), dim=1)[: rows * heads, 0].unflatten(0, (rows, heads))
        weights = torch.randn(rows, 2 * heads)[:, heads:]
        with poisoned_memory():
            got = quantize_index_query(q, weights, kernel="triton")
        want = quantize_index_query(q, weights, kernel="torch")
        case.compare("codes", *(values.view(torch.uint8) for values, _ in (got, want)))
        case.compare("weights", got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    "shape", [(5, 3, 24, 6), (70, 64, 0), (9, 40, 12), (3, 2, 8, 4), (0, 8, 2)]
)
def test_rope(shape: tuple[int, ...], style: Any, dtype: torch.dtype) -> None:
    """Slices of a projection, tables with rows apart; up to a rounding of fused products."""
    *leading, size, pairs = shape
    x = torch.randn(*leading, size + 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    angles = torch.randn(leading[0], 2 * pairs).to(dtype)
    cos, sin = angles.cos()[:, :pairs], angles.sin()[:, pairs:]
    with poisoned_memory():
        got = apply_rope(x[..., 8:], cos, sin, style, kernel="triton")
    want = reference.apply_rope(x[..., 8:], cos, sin, style)
    assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, dtype, True)
    exact = reference.apply_rope(x[..., 8:].double(), cos.double(), sin.double(), style)
    bound = (want - exact).abs().max() * 1.5 if want.numel() else 0.0
    assert ((got - exact).abs() <= bound).all()
    assert torch.equal(got[..., 2 * pairs :], x[..., 8 + 2 * pairs :])


@pytest.mark.parametrize("case", without_bf16(RECORD_CASES), ids=named)
def test_records_are_written(case: RecordCase) -> None:
    inputs = case.make()
    want = case.written(inputs)
    kv_cache, index_cache, slots = inputs["kv_cache"], inputs["index_cache"], inputs["slots"]
    ops.write_latent(kv_cache, slots, inputs["latent"], inputs["rope"], kernel="triton")
    ops.write_index_key(index_cache, slots, inputs["keys"], kernel="triton")
    for name, cache in want.items():
        case.compare(name, inputs[name], cache)


@pytest.mark.parametrize("case", without_bf16(RECORD_CASES), ids=named)
def test_latents_are_gathered(case: RecordCase) -> None:
    inputs = case.make()
    cache = case.written(inputs)["kv_cache"]
    slots = torch.cat((torch.tensor([-1]), inputs["slots"], torch.tensor([-1])))
    for dtype in (torch.float32, torch.float16):
        with poisoned_memory():
            got = ops.gather_latent(cache, slots, v_dim=case.latent, dtype=dtype, kernel="triton")
        want = reference.gather_latent(cache, slots, v_dim=case.latent, dtype=dtype)
        case.compare("gathered", got, want)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "more", "rows", "shift", "locations"),
    [
        ([1, 1, 1], [5, 1, 9], 0, 3, 0, False),
        ([3, 0, 5], [3, 0, 700], 2, 11, 0, True),
        (4, [0, 9, 3], 1, 20, 4, True),
        ([], [], 3, 4, 0, False),
        ([1] * 70, list(range(1, 71)), 3, 300, 1, True),
        ([300], [301], 0, 290, 0, False),
    ],
)
def test_step_metadata(
    q_lens: Any, kv_lens: list[int], more: int, rows: int, shift: int, locations: bool
) -> None:
    requests = len(kv_lens) + more
    made = []
    for kernel in ("triton", "torch"):
        out = StepBuffers.allocate(requests, rows, torch.device("cpu"))
        for name in TENSORS:
            getattr(out, name).fill_(-77)
        loc = torch.arange(rows - 1) % 5 if locations else None
        arguments = {
            "q_lens": q_lens if isinstance(q_lens, int) else torch.tensor(q_lens).int(),
            "kv_lens": torch.tensor(kv_lens).int(),
            "request_rows": torch.arange(len(kv_lens)) + 3,
            "topk": 64,
            "kv_shift": shift,
            "out_cache_loc": loc,
        }
        step_metadata(out, kernel=kernel, **arguments)
        made.append(out)
    for name in TENSORS:
        got, want = (getattr(out, name) for out in made)
        assert torch.equal(got, want), name


PLANS = {
    "one program a row": topk.Plan(1024, 4096, 512, 8, 1024, 8, 1, 3, 0),
    "three programs a row": topk.Plan(1024, 1024, 512, 4, 1024, 8, 3, 12, 0),
    "four stretches held": topk.Plan(1024, 1024, 512, 8, 512, 4, 4, 16, 0, True, 4),
}
LONG = 9000


def long_rows(kind: str) -> torch.Tensor:
    """Rows of which a sample says too little, one way or another."""
    x = torch.randn(4, LONG, generator=torch.Generator().manual_seed(3))
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1.0])
    return {
        "normal": lambda: x,
        "plateau": lambda: x.clamp_min(1.0),
        "plateau above": lambda: x.clamp_max(1.5),
        "close": lambda: 1.0 + 1e-6 * x,
        "ascending": lambda: x.sort(dim=1).values,
        "descending": lambda: x.sort(dim=1, descending=True).values,
        "special": lambda: special[x.mul(1000).long() % 6],
        "only NaN and -inf": lambda: special[1 + x.mul(1000).long() % 2],
        "few numbers": lambda: torch.where(x > 1.8, x, float("nan")),
        "all in one place": lambda: torch.where((torch.arange(LONG) // 1500) == 2, x + 50, x),
    }[kind]()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "kind",
    ["normal", "plateau", "plateau above", "close", "ascending", "descending", "special",
     "only NaN and -inf", "few numbers", "all in one place"],
)  # fmt: skip
def test_topk_whatever_the_sample_says(kind: str, plan: str) -> None:
    logits = long_rows(kind)
    lengths = torch.tensor([LONG, 1025, 5000, 300], dtype=torch.int32)
    got = torch.full((4, 500), -7, dtype=torch.int32)
    topk.launch_topk(logits, lengths, 500, got, plan=PLANS[plan])
    assert torch.equal(got, reference.topk(logits, lengths, 500))


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("kind", ["normal", "ascending", "close", "few numbers"])
def test_topk_of_few_rows_as_slots(kind: str, paged: bool) -> None:
    """Rows 1 to 4 of a context whose last row is padding."""
    lengths = torch.tensor([1, LONG, 1025, 499, 0], dtype=torch.int32)
    context = Context(
        lengths=lengths,
        request_of_row=torch.tensor([0, 1, 2, 0, 0], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        max_length=LONG,
        max_seq_len_q=1,
        table=torch.randperm(4 * LONG).int().view(4, LONG) if paged else None,
        table_rows=torch.tensor([3, 0, 2]) if paged else None,
        starts=None if paged else torch.tensor([7, 20000, 3]),
    )
    logits = long_rows(kind)
    plan = PLANS["four stretches held"]
    got = torch.full((4, 500), -7, dtype=torch.int32)
    topk.launch_topk(logits, lengths[1:], 500, got, plan=plan, slots_of=context, first_row=1)
    chosen = torch.full((5, 500), -1)
    chosen[1:] = reference.topk(logits, lengths[1:], 500)
    assert torch.equal(got, context.slots(chosen)[1:])


@pytest.mark.parametrize("starting", [False, True])
def test_topk_of_few_rows_that_lie_anywhere(starting: bool) -> None:
    """A row's stride is odd, and it may begin within its columns. Around what is held, and k."""
    logits = torch.randn(5, LONG + 1, generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([LONG - 700, 1025, 1024, 501, 500], dtype=torch.int32)
    starts = torch.tensor([701, 3, 2, 1, 0], dtype=torch.int32) if starting else None
    got = torch.full((5, 500), -7, dtype=torch.int32)
    plan = replace(PLANS["four stretches held"], programs=20)
    topk.launch_topk(logits, lengths, 500, got, plan=plan, starts=starts)
    assert torch.equal(got, reference.topk(logits, lengths, 500, starts=starts))


def test_topk_of_a_row_as_an_h200_takes_it() -> None:
    """As many programs, as large lists and samples."""
    h200 = DeviceInfo("cuda", 90, "sm90", 132, 227 * 1024, has_triton=True)
    width, k = 32769, 2048
    plan = topk.choose_plan(h200, 1, width, k)
    assert plan.few
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(6))
    lengths = torch.tensor([width], dtype=torch.int32)
    got = torch.full((1, k), -7, dtype=torch.int32)
    topk.launch_topk(logits, lengths, k, got, plan=plan)
    assert torch.equal(got, reference.topk(logits, lengths, k))
