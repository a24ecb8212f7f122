"""The cases of `sparse_mla` that the TileLang kernel takes, at odd and at real sizes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from cases import SPARSE_MLA_CASES, SparseMlaCase
from tolerances import OUTPUT, Tolerance, assert_close
from topkapi import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang"),
]
DEVICE = "cuda"
_BF16 = torch.bfloat16


def in_bf16(case: SparseMlaCase) -> SparseMlaCase:
    """The same case over bf16 records, so that every pattern of it is met."""
    return replace(case, name=f"{case.name}, bf16", cache=_BF16, dtype=_BF16)


# One compilation for each head count, width and feature: few of them, and every pattern.
NARROW_CASES = tuple(
    in_bf16(case)
    for case in SPARSE_MLA_CASES
    if case.cache == torch.float32 and case.heads == 8 and case.latent == 512
)
WIDE_CASES = (
    SparseMlaCase("wide", 12, heads=128, k=2048, num_slots=5000),
    SparseMlaCase("wide holes", 20, heads=128, k=333, num_slots=5000, pattern="holes"),
    SparseMlaCase("wide, empty rows", 7, heads=128, pattern="empty rows"),
    SparseMlaCase("wide, all empty", 3, heads=128, pattern="all empty"),
    SparseMlaCase("wide, leading holes", 3, heads=128, k=300, pattern="leading"),
    SparseMlaCase("wide, NaN query row", 5, heads=128, poison="query"),
    SparseMlaCase("wide, inf query row", 5, heads=128, poison="query inf"),
    SparseMlaCase("wide, sharp", 5, heads=128, magnitude=12.0, pattern="full"),
    SparseMlaCase("wide, odd heads", 20, heads=72, k=300, sinks=True, logit_cap=20.0),
    SparseMlaCase("32 heads", 20, heads=32, k=333, num_slots=5000, pattern="holes"),
    SparseMlaCase("fp16", 4, heads=16, k=300, cache=torch.float16, dtype=torch.float16),
    SparseMlaCase("axk2", 4, heads=32, latent=128, rope=32, k=65),
    SparseMlaCase("32 heads, capped sinks", 5, heads=20, k=100, sinks=True, logit_cap=20.0),
    SparseMlaCase("no rope", 5, heads=5, latent=96, rope=0, k=17),
    SparseMlaCase("wide rope", 5, heads=5, latent=160, rope=96, k=33),
)
FP8_CASES = (
    *(case for case in SPARSE_MLA_CASES if (case.cache, case.dtype) == (torch.uint8, _BF16)),
    SparseMlaCase("fp8 wide", 20, heads=128, k=700, num_slots=5000, cache=torch.uint8,
                  dtype=_BF16, pattern="holes"),
)  # fmt: skip
CASES = NARROW_CASES + tuple(
    case if case.dtype == torch.float16 else in_bf16(case) for case in WIDE_CASES
)


def named(case: Any) -> str:
    return str(case.name)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_sparse_mla(case: SparseMlaCase, phase: Any) -> None:
    inputs = case.make(DEVICE)
    case.compare(ops.sparse_mla(**inputs, phase=phase, kernel="tilelang"), inputs)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", FP8_CASES, ids=named)
def test_fp8_records(case: SparseMlaCase, phase: Any) -> None:
    inputs = case.make(DEVICE)
    out, lse = ops.sparse_mla(**inputs, phase=phase, kernel="tilelang")
    want_out, want_lse = case.expected(inputs)
    # fp8 records become bf16 operands: a score carries one rounding of each latent value.
    assert_close("lse", lse, want_lse, Tolerance(3e-3, 3e-3, 0.0))
    assert_close("out", out, want_out, OUTPUT[_BF16])


@pytest.mark.parametrize("heads", [8, 128])
def test_a_row_has_the_same_bits_in_any_batch(heads: int) -> None:
    case = in_bf16(SparseMlaCase("batch", 40, heads=heads, k=700, num_slots=5000, pattern="holes"))
    inputs = case.make(DEVICE)
    whole = ops.sparse_mla(**inputs, kernel="tilelang", batch_invariant=True)
    for row in (0, 17, 39):
        alone = {**inputs, "q": inputs["q"][row : row + 1], "slots": inputs["slots"][row : row + 1]}
        out, lse = ops.sparse_mla(**alone, kernel="tilelang", batch_invariant=True)
        assert torch.equal(out[0], whole[0][row])
        assert torch.equal(lse[0], whole[1][row])


def test_addresses_past_two_gigabytes() -> None:
    """The last records of a cache that 32 bits cannot address."""
    kv_cache = torch.zeros(3_400_001, 1, 576, dtype=_BF16, device=DEVICE)
    slots = torch.tensor([[3_400_000, 7, 3_399_999, -1]], dtype=torch.int32, device=DEVICE)
    kv_cache[slots[0, :3].long()] = torch.randn(3, 1, 576, device=DEVICE).to(_BF16)
    small = torch.cat((kv_cache[:1], kv_cache[slots[0, :3].long()]))
    near = torch.tensor([[1, 2, 3, -1]], dtype=torch.int32, device=DEVICE)
    for heads in (8, 128):
        q = torch.randn(1, heads, 576, device=DEVICE).to(_BF16)
        far = ops.sparse_mla(q, kv_cache, slots, scale=0.1, kernel="tilelang")
        want = ops.sparse_mla(q, small, near, scale=0.1, kernel="tilelang")
        assert all(torch.equal(one, other) for one, other in zip(far, want, strict=True))


def test_a_graph_replays_on_new_contents() -> None:
    kv_cache = torch.randn(5000, 1, 576, device=DEVICE).to(_BF16)
    q = torch.randn(4, 128, 576, device=DEVICE).to(_BF16)
    slots = torch.randint(0, 5000, (4, 2048), device=DEVICE, dtype=torch.int32)

    def step() -> torch.Tensor:
        return ops.sparse_mla(q, kv_cache, slots, scale=0.1, kernel="tilelang")[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for width in (2048, 700, 0):
        slots[:, width:] = -1
        q.normal_()
        graph.replay()
        assert torch.equal(captured, step())
