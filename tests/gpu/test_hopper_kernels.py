"""The sm90 kernels against the float64 definition, and what only they could get wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from cases import (
    EXACT_FP8_CASES,
    SPARSE_MLA_CASES,
    WIDE_SPARSE_MLA_CASES,
    SparseMlaCase,
    poisoned_memory,
)
from tolerances import OUTPUT, Tolerance, assert_close
from topkapi import ops
from topkapi.device import device_info
from topkapi.errors import KernelRefusedError

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or device_info(torch.device(DEVICE)).arch != 90,
        reason="needs sm90",
    ),
]

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.uint8
# Tiles of 64 tokens, two at a time; queries and records of any magnitude; every way to cut heads.
OWN_CASES = tuple(
    SparseMlaCase(f"{heads} heads, {k} slots, {name}", 6, heads=heads, k=k, num_slots=3000,
                  cache=cache, dtype=dtype, pattern=pattern)
    for heads in (1, 17, 33, 65)
    for k, pattern in ((1, "full"), (65, "full"), (191, "holes"), (2049, "tail"))
    for name, cache, dtype in (("bf16", BF16, BF16), ("fp8", FP8, BF16), ("fp16", FP16, FP16))
)  # fmt: skip
MAGNITUDES = tuple(
    SparseMlaCase(f"{heads} heads, fp8, magnitude {magnitude}", 5, heads=heads, k=300,
                  num_slots=3000, cache=FP8, dtype=BF16, magnitude=magnitude)
    for heads in (16, 128)
    for magnitude in (1e-6, 1e-3, 0.1, 4.0)
)  # fmt: skip
ATTENDED = SPARSE_MLA_CASES + EXACT_FP8_CASES + WIDE_SPARSE_MLA_CASES


def named(case: Any) -> str:
    return str(case.name)


def check(case: SparseMlaCase, inputs: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    want_out, want_lse = case.expected(inputs)
    tolerance = OUTPUT[case.dtype]
    lse = tolerance.lse
    if case.cache == FP8:
        # Weights and the query carry the rounding of fp16, above 32 heads a record's values, too.
        tolerance = replace(tolerance, relative=max(tolerance.relative, 2e-3))
        lse = 1e-4 if case.heads <= 32 else 1e-3
    assert_close("lse", got[1], want_lse, Tolerance(lse, lse, 0.0))
    assert_close("out", got[0], want_out, tolerance)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", ATTENDED, ids=named)
def test_cases(case: SparseMlaCase, phase: Any) -> None:
    inputs = case.make(DEVICE)
    taken = (case.latent, case.rope) == (512, 64)
    if not taken or (case.dtype, case.cache) not in ((BF16, BF16), (FP16, FP16), (BF16, FP8)):
        with pytest.raises(KernelRefusedError, match="hopper: "):
            ops.sparse_mla(**inputs, phase=phase, kernel="hopper")
        return
    with poisoned_memory():
        got = ops.sparse_mla(**inputs, phase=phase, kernel="hopper")
    check(case, inputs, got)


@pytest.mark.parametrize("case", OWN_CASES + MAGNITUDES, ids=named)
def test_cuts_and_magnitudes(case: SparseMlaCase) -> None:
    inputs = case.make(DEVICE)
    with poisoned_memory():
        got = ops.sparse_mla(**inputs, kernel="hopper")
    check(case, inputs, got)


@pytest.mark.parametrize("pattern", ["full", "holes", "tail"])
@pytest.mark.parametrize("heads", [16, 32])
def test_more_slots_than_a_program_lists_at_a_time(heads: int, pattern: str) -> None:
    """A list has 32 tiles of 64; rows that are not split need three of them here."""
    case = SparseMlaCase("listed", 5, heads=heads, k=4500, num_slots=6000, cache=FP8, dtype=BF16,
                         pattern=pattern)  # fmt: skip
    inputs = case.make(DEVICE)
    with poisoned_memory():
        got = ops.sparse_mla(**inputs, kernel="hopper", batch_invariant=True)
    check(case, inputs, got)


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("cache", [BF16, FP8])
def test_runs_give_the_same_bits_alone_and_together(heads: int, cache: torch.dtype) -> None:
    """No race, and with `batch_invariant` no trace of the batch."""
    case = SparseMlaCase("bits", 150, heads=heads, k=700, num_slots=9000, cache=cache, dtype=BF16,
                         pattern="holes")  # fmt: skip
    inputs = case.make(DEVICE)
    first = ops.sparse_mla(**inputs, kernel="hopper", batch_invariant=True)
    for _ in range(20):
        again = ops.sparse_mla(**inputs, kernel="hopper", batch_invariant=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for row in (0, 77, 149):
        alone = {**inputs, "q": inputs["q"][row : row + 1], "slots": inputs["slots"][row : row + 1]}
        got = ops.sparse_mla(**alone, kernel="hopper", batch_invariant=True)
        assert all(torch.equal(a[row], b[0]) for a, b in zip(first, got, strict=True))


@pytest.mark.parametrize("heads", [16, 33])
@pytest.mark.parametrize("cache", [BF16, FP8])
def test_int64_slots_and_a_query_anywhere(heads: int, cache: torch.dtype) -> None:
    case = SparseMlaCase("given", 4, heads=heads, k=200, num_slots=900, cache=cache, dtype=BF16,
                         pattern="holes")  # fmt: skip
    inputs = case.make(DEVICE)
    want = ops.sparse_mla(**inputs, kernel="hopper")
    odd = torch.empty(inputs["q"].numel() + 1, dtype=BF16, device=DEVICE)[1:].view_as(inputs["q"])
    odd.copy_(inputs["q"])
    for other in ({"slots": inputs["slots"].long()}, {"q": odd}):
        got = ops.sparse_mla(**{**inputs, **other}, kernel="hopper")
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_lengths_do_not_compile() -> None:
    from topkapi.kernels.hopper import sparse_mla

    kernels = (
        sparse_mla.attend_wide, sparse_mla.attend_wide_fp8, sparse_mla.attend_narrow,
        sparse_mla.attend_narrow_fp8,
    )  # fmt: skip

    def compiled() -> int:
        return sum(len(kernel.device_caches[0][0]) for kernel in kernels)

    records = torch.randn(9000, 1, 576, device=DEVICE).bfloat16()
    quantised = torch.zeros(9000, 1, 656, dtype=FP8, device=DEVICE)
    for heads, kv_cache in product((16, 128), (records, quantised)):
        before = 0
        for index in range(50):
            rows, k = 1 + index % 7 + 150 * (index % 2), 2048
            q = torch.randn(rows, heads, 576, device=DEVICE).bfloat16()
            slots = torch.randint(-1, 9000, (rows, k), device=DEVICE, dtype=torch.int32)
            slots[:, 65 + 37 * index :] = -1
            ops.sparse_mla(q, kv_cache, slots, scale=0.1, kernel="hopper")
            before = compiled() if index == 2 else before
        assert compiled() == before


def test_records_past_two_gigabytes() -> None:
    slots = torch.tensor([[3_400_000, 7, 3_399_999, -1]], dtype=torch.int32, device=DEVICE)
    for cache, width in ((FP8, 656), (BF16, 576)):
        kv_cache = torch.zeros(3_400_001, 1, width, dtype=cache, device=DEVICE)
        latent = torch.randn(3, 512, device=DEVICE).bfloat16()
        rope = torch.randn(3, 64, device=DEVICE).bfloat16()
        ops.write_latent(kv_cache, slots[0, :3].long(), latent, rope)
        small = torch.zeros(4, 1, width, dtype=cache, device=DEVICE)
        ops.write_latent(small, torch.arange(1, 4, device=DEVICE), latent, rope)
        near = torch.tensor([[1, 2, 3, -1]], dtype=torch.int32, device=DEVICE)
        for heads in (16, 128):
            q = torch.randn(1, heads, 576, device=DEVICE).bfloat16()
            far = ops.sparse_mla(q, kv_cache, slots, scale=0.1, kernel="hopper")
            want = ops.sparse_mla(q, small, near, scale=0.1, kernel="hopper")
            assert all(torch.equal(a, b) for a, b in zip(far, want, strict=True))
        del kv_cache
        torch.cuda.empty_cache()
