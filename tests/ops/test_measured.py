"""The table of measured times: how it is made, what it says, and that `auto` goes by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from topkapi.config import KERNEL_NAMES
from topkapi.device import DeviceInfo
from topkapi.dispatch import Kernel, Op, Problem
from topkapi.errors import KernelRefusedError
from topkapi.ops.measured import H200, Measured, Table, read_table, table_from_rows
from topkapi.ops.registry import OPS

DEVICE = DeviceInfo("cuda", 90, "NVIDIA H200", num_sms=132, shared_memory=232448, has_triton=True)
PROBLEM = Problem("sparse_mla", DEVICE, torch.bfloat16, num_heads=128, topk=2048, rows=64)
KERNELS = {op: {kernel.name for kernel in OPS[op].kernels} for op in OPS}


def row(kernel: str, seconds: float | None, op: str = "sparse_mla", **size: Any) -> dict[str, Any]:
    """A row as `topkapi bench ops` writes them."""
    sizes = {
        "rows": 64, "context": 65536, "requests": 64, "heads": 128, "index_heads": 64, "k": 2048,
        "cache": "bf16", "query": "",
    }  # fmt: skip
    made = {"bench": "ops", "op": op, "kernel": kernel, "size": {**sizes, **size}}
    made |= {"device": "NVIDIA H200", "date": "2026-11-30"}
    return made if seconds is None else {**made, "seconds": {"p50": seconds}}


def test_rows_of_the_benchmark_become_a_table() -> None:
    rows = [
        row("triton", 50e-6, context=8192),
        row("triton", 200e-6),
        row("fa3", 40e-6, context=8192),
        row("fa3", 160e-6),
        row("torch", 1e-6, context=8192),
        row("flashmla_sparse", None),
        row("torch.topk", 1e-6, op="topk"),
        row("triton", 9e-6, op="topk"),
        row("vllm", 8e-6, op="topk"),
        row("triton", 80e-6, op="select", query="e4m3", cache="fp8"),
        row("deep_gemm", 81e-6, op="select", query="e4m3", cache="fp8"),
        row("triton", 90e-6, op="select", requests=1, query="e4m3", cache="fp8"),
        row("deep_gemm", 70e-6, op="select", requests=1, query="e4m3", cache="fp8"),
        row("triton", 90e-6, op="select", requests=1, cache="fp8"),
        {**row("triton", 1e-9), "bench": "serve"},
    ]
    table = table_from_rows(rows, KERNELS)
    assert table == Table(
        "NVIDIA H200",
        "2026-11-30",
        (
            # `torch` lacks a size that the others have, and is last whatever its time.
            Measured("sparse_mla", "bf16", "", "", 64, 0, 128, 0,
                     (("fa3", 80.0), ("triton", 100.0), ("torch", 1.0))),
            Measured("topk", "", "", "", 64, 65536, 0, 2048, (("vllm", 8.0), ("triton", 9.0))),
            Measured("select", "fp8", "e4m3", "decode", 64, 65536, 64, 2048,
                     (("triton", 80.0), ("deep_gemm", 81.0))),
            Measured("select", "fp8", "e4m3", "prefill", 64, 65536, 64, 2048,
                     (("deep_gemm", 70.0), ("triton", 90.0))),
        ),
    )  # fmt: skip
    assert read_table(table.to_json()) == table
    with pytest.raises(ValueError, match="expected one device"):
        table_from_rows([*rows, {**rows[0], "device": "other"}], KERNELS)


def test_times_in_line_count_where_all_have_them() -> None:
    alone = [row("triton", 9e-6), row("fa3", 8e-6)]
    in_line = [{**alone[0], "steady_seconds": {"p50": 2e-6}}, alone[1]]
    both = [in_line[0], {**alone[1], "steady_seconds": {"p50": 3e-6}}]
    for rows, expected in (
        (alone, (("fa3", 8.0), ("triton", 9.0))),
        (in_line, (("fa3", 8.0), ("triton", 9.0))),
        (both, (("triton", 2.0), ("fa3", 3.0))),
    ):
        (entry,) = table_from_rows(rows, KERNELS).entries
        assert entry.kernels == expected


TABLE = Table(
    "NVIDIA H200",
    "2026-11-30",
    (
        Measured("sparse_mla", "bf16", "", "", 64, 0, 128, 0, (("fa3", 80.0), ("triton", 90.0))),
        Measured("sparse_mla", "bf16", "", "", 4096, 0, 128, 0, (("triton", 3.0),)),
        Measured("sparse_mla", "fp8", "", "", 64, 0, 128, 0, (("flashmla_kv", 1.0),)),
        Measured("select", "fp8", "e4m3", "decode", 8, 65536, 64, 2048, (("deep_gemm", 1.0),)),
        Measured("topk", "", "", "", 64, 65536, 0, 2048, (("vllm", 1.0), ("triton", 2.0))),
    ),
)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ("fa3", "triton")),
        ({"topk": 64}, ("fa3", "triton")),
        ({"rows": 16}, ("fa3", "triton")),
        ({"rows": 15}, ()),
        ({"rows": 256}, ("fa3", "triton")),
        ({"rows": 1024}, ("triton",)),
        ({"rows": 0}, ()),
        ({"num_heads": 16}, ()),
        ({"cache_format": "fp8"}, ("flashmla_kv",)),
        ({"cache_format": "fp32"}, ()),
        ({"device": replace(DEVICE, name="NVIDIA H100")}, ()),
        ({"op": "indexer_logits"}, ()),
    ],
)
def test_the_nearest_measured_size_speaks(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    assert TABLE.fastest(replace(PROBLEM, **changes)) == names


def test_queries_and_phase_are_exact() -> None:
    scored = Problem(
        "select", DEVICE, torch.float8_e4m3fn, phase="decode", cache_format="fp8", num_heads=64,
        topk=2048, rows=8, context=65536,
    )  # fmt: skip
    assert TABLE.fastest(scored) == ("deep_gemm",)
    assert TABLE.fastest(replace(scored, phase="prefill")) == ()
    assert TABLE.fastest(replace(scored, dtype=torch.bfloat16)) == ()
    assert TABLE.fastest(replace(scored, context=2**19)) == ()


def kernel(name: str, refuses: str | None = None, **options: Any) -> Kernel:
    return Kernel(name, "sparse_mla", lambda problem: refuses, print, **options)


def test_auto_goes_by_the_table_and_never_by_chance() -> None:
    ours, other = kernel("triton"), kernel("torch")
    fa3, unmeasured = kernel("fa3", peer=True), kernel("aiter", peer=True)
    op = Op("sparse_mla", (ours, fa3, unmeasured, other), TABLE.fastest)
    assert op.choose(PROBLEM).name == "fa3"
    assert op.choose(replace(PROBLEM, capture=True)).name == "fa3"
    assert op.choose(replace(PROBLEM, rows=4096)).name == "triton"
    assert op.choose(replace(PROBLEM, device=DeviceInfo("cuda", 80))).name == "triton"
    assert op.choose(PROBLEM, "aiter").name == "aiter"
    missing = Op("sparse_mla", (ours, kernel("fa3", "not installed", peer=True)), TABLE.fastest)
    assert missing.choose(PROBLEM).name == "triton"
    verdicts = {item.kernel: item.auto for item in op.explain(PROBLEM)}
    assert verdicts == {"fa3": True, "triton": True, "torch": True, "aiter": False}
    assert [item.name for item in op.preferred(PROBLEM)] == ["fa3", "triton", "torch"]


def test_an_inexact_kernel_runs_by_name_alone() -> None:
    op = Op("topk", (kernel("triton"), kernel("vllm", peer=True, exact=False)), TABLE.fastest)
    problem = Problem("topk", DEVICE, torch.float32, topk=2048, rows=64, context=65536)
    assert TABLE.fastest(problem)[0] == "vllm"
    assert op.choose(problem).name == "triton"
    assert op.choose(problem, "vllm").name == "vllm"
    with pytest.raises(KernelRefusedError, match="no usable kernel"):
        Op("topk", (kernel("vllm", exact=False), kernel("torch", "no"))).choose(problem)


def test_batch_invariance_is_asked_of_kernels_that_promise_it() -> None:
    slow, triton = kernel("torch", batch_invariant=True), kernel("triton", batch_invariant=True)
    op = Op("sparse_mla", (kernel("fa3", peer=True), slow, triton), TABLE.fastest)
    problem = replace(PROBLEM, features=frozenset({"batch_invariant"}))
    # One kernel for any number of rows: the table, which has another for 4096, is not asked.
    assert op.choose(replace(problem, rows=4096)).name == op.choose(problem).name == "torch"
    assert op.choose(replace(PROBLEM, rows=4096)).name == "triton"
    with pytest.raises(KernelRefusedError, match="fa3: a row's bits depend on its batch"):
        op.choose(problem, "fa3")


@pytest.mark.parametrize("op", ["select", "sparse_mla"])
def test_torch_promises_bits_on_a_host_alone(op: str) -> None:
    """A GPU's BLAS sums products of another shape in another order."""
    facts = {"cache_format": "fp32", "features": frozenset({"batch_invariant"}), "topk": 64}
    on_gpu = Problem(op, DEVICE, torch.float32, **facts)  # type: ignore[arg-type]
    with pytest.raises(KernelRefusedError, match=r"torch: .* depend on its batch on a GPU"):
        OPS[op].choose(on_gpu, "torch")
    assert OPS[op].choose(replace(on_gpu, device=DeviceInfo("cpu")), "torch").name == "torch"


def test_options_know_the_names_of_the_records() -> None:
    """config.py cannot import the registry: this holds its names to it."""
    operations = {
        "prefill_kernel": "sparse_mla",
        "decode_kernel": "sparse_mla",
        "indexer_kernel": "select",
        "topk_kernel": "topk",
    }
    assert set(operations) == set(KERNEL_NAMES)
    for option, op in operations.items():
        known = {"auto"} | KERNELS[op]
        if option == "prefill_kernel":
            known.discard("aiter")
        assert set(KERNEL_NAMES[option]) == known, option


def test_the_committed_table_names_records_of_its_operations() -> None:
    assert H200.device == "NVIDIA H200"
    for entry in H200.entries:
        names = {name for name, _ in entry.kernels}
        assert names <= KERNELS[entry.op], entry
        times = [time for _, time in entry.kernels]
        assert times
        assert min(times) > 0


def test_scores_come_from_one_kernel_whatever_the_batch() -> None:
    """Else what a row selects would depend on how many rows there are."""
    for op in ("select", "indexer_logits"):
        for rows in (1, 64, 4096):
            problem = Problem(
                op, DEVICE, torch.float8_e4m3fn, cache_format="fp8", num_heads=64, index_dim=128,
                topk=2048, rows=rows, context=65536,
            )  # fmt: skip
            assert [k.name for k in OPS[op].preferred(problem)] == ["triton", "torch"], op
