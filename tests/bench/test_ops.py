"""Does `bench ops` check before it times, and are its floors, ratios and pages right?"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from topkapi import ops as topkapi_ops
from topkapi.bench import ceilings as ceilings_module
from topkapi.bench import contenders as contenders_module
from topkapi.bench import ops, sizes
from topkapi.bench.cases import BenchCase
from topkapi.bench.ceilings import Ceilings
from topkapi.bench.clock import Timed, interleaved
from topkapi.bench.command import app
from topkapi.bench.inputs import make_inputs
from topkapi.bench.ops_page import page
from topkapi.bench.ops_plot import plot_ops, plot_roofline
from topkapi.bench.record import read_lines
from topkapi.cli import app as command_line
from topkapi.dispatch import Kernel, Op
from topkapi.errors import ConfigError, DeviceFailedError, KernelRefusedError
from topkapi.reference.topk import topk as reference_topk

CPU = torch.device("cpu")
FEW: dict[str, Any] = {"index_heads": 4, "index_dim": 32, "k": 16}
NARROW: dict[str, Any] = {"heads": 2, "latent": 64, "rope": 32, "k": 16}
SMALL = (
    BenchCase("select", rows=3, context=300, **FEW),
    BenchCase("select", rows=4, context=200, requests=2, cache="fp8", **FEW),
    BenchCase("sparse_mla", rows=3, context=200, **NARROW),
    BenchCase("sparse_mla", rows=9, context=200, selection="overlap", **NARROW),
    BenchCase("sparse_mla", rows=2, context=100, requests=2, phase="decode", k=16, cache="fp8"),
    BenchCase("topk", rows=3, context=200, k=16),
    BenchCase("topk", rows=3, context=200, k=16, values="plateau"),
    BenchCase("indexer_logits", rows=3, context=200, **FEW),
    BenchCase("write_latent", rows=5, cache="fp8", **NARROW),
    BenchCase("write_latent", rows=5, cache="fp16", dtype=torch.float16, **NARROW),
    BenchCase("write_index_key", rows=5, index_dim=32, cache="fp8"),
    BenchCase("gather_latent", rows=5, context=200, cache="fp8", **NARROW),
)
TOPK = SMALL[5]
QUICK = ops.Plan(seconds=0.0)
CEILINGS = Ceilings(bytes_per_second=1e9, fp32=1e9, bf16=2e9, fp8=4e9, fp8_from="twice bf16")


@pytest.fixture(autouse=True)
def _ceilings_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "measure_ceilings", lambda device: CEILINGS)


def with_kernels(monkeypatch: pytest.MonkeyPatch, *kernels: Kernel) -> None:
    """Let `topk` have these kernels alone."""
    given = {"topk": Op("topk", kernels)}
    for module in (contenders_module, __import__("topkapi.ops.indexer", fromlist=["OPS"])):
        monkeypatch.setattr(module, "OPS", given)


def kernel(name: str, launch: Callable[..., Any], refusal: str | None = None) -> Kernel:
    return Kernel(name, "topk", lambda problem: refusal, launch, peer=name != "triton")


def right(logits: torch.Tensor, lengths: torch.Tensor, k: int, **_: object) -> torch.Tensor:
    return reference_topk(logits, lengths, k)


def shifted(logits: torch.Tensor, lengths: torch.Tensor, k: int, **_: object) -> torch.Tensor:
    """Wrong in one place of one row."""
    found = reference_topk(logits, lengths, k)
    found[-1, -1] = found[-1, -2]
    return found


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_right_kernel_is_timed(case: BenchCase) -> None:
    rows = {row["kernel"]: row for row in ops.run([case], CPU, QUICK)}
    assert "refused" in rows["triton"]
    row = rows["torch"]
    assert row["seconds"]["p20"] <= row["seconds"]["p50"] <= row["seconds"]["p80"]
    assert row["rounds"] == ops.MIN_ROUNDS
    assert row["fraction"] == pytest.approx(row["floor_seconds"] / row["seconds"]["p50"], rel=1e-4)
    assert row["timing"] == "wall clock"


def test_a_wrong_kernel_gets_a_row_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch, kernel("broken", shifted), kernel("triton", right))
    broken, good, plain = ops.run([TOPK], CPU, QUICK)
    assert broken["wrong"] == "1 of 3 rows differ"
    assert broken["role"] == "peer"
    assert not {"seconds", "fraction", "error"} & set(broken)
    assert good["best_peer"] == plain["kernel"] == "torch.topk"
    ratio = plain["seconds"]["p50"] / good["seconds"]["p50"]
    assert good["over_best_peer"] == pytest.approx(ratio, rel=1e-4)
    assert "**wrong**: broken at topk, 3 x 200: 1 of 3 rows differ" in page([broken, good, plain])


def test_a_kernel_that_refuses_or_dies_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no such symbol\nand a long trace")

    with_kernels(monkeypatch, kernel("peer", right, "needs | sm90"), kernel("other", dies))
    rows = list(ops.run([TOPK, replace(TOPK, rows=4)], CPU, ops.Plan(frozenset({"peer", "other"}))))
    assert [row["refused"] for row in rows[::2]] == ["needs | sm90"] * 2
    assert rows[1]["failed"] == "RuntimeError: no such symbol"
    text = page(rows)
    assert "- peer refused 2 cases: needs \\| sm90" in text
    assert text.count("**failed**: other") == 2


def test_a_kernel_that_breaks_the_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before is given, and the message says whom to run apart."""

    def dies(logits: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if logits.shape[0] == 4:
            raise RuntimeError("an illegal memory access")
        return reference_topk(logits, torch.full((3,), logits.shape[1]), 16)

    with_kernels(monkeypatch, kernel("peer", dies))
    monkeypatch.setattr(ops, "_alive", lambda device: False)
    run = ops.run([TOPK, replace(TOPK, rows=4)], CPU, ops.Plan(frozenset({"peer"}), seconds=0.0))
    assert "seconds" in next(run)
    with pytest.raises(DeviceFailedError, match=r"topk, 4 x 200: .*illegal.* one of peer: measure"):
        next(run)

    def interrupted(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(ops, "interleaved", interrupted)
    with pytest.raises(DeviceFailedError, match="one of peer: measure"):
        list(ops.run([TOPK], CPU, ops.Plan(frozenset({"peer"}))))


@pytest.mark.parametrize(
    "op", ["select", "sparse_mla", "indexer_logits", "write_latent", "gather_latent"]
)
def test_no_wrong_answer_passes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right values, in wrong places."""
    case = next(case for case in SMALL if case.op == op)
    real = ops.answer

    def spoiled(*args: Any) -> Any:
        first, *rest = (tensor.clone() for tensor in real(*args))
        return (first.flip(0, -1), *rest)

    monkeypatch.setattr(ops, "answer", spoiled)
    (row,) = (row for row in ops.run([case], CPU, QUICK) if row["kernel"] == "torch")
    assert "seconds" not in row
    assert "wrong" in row


def test_a_selection_of_the_worst_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def worst(case: BenchCase, contender: Any, arguments: dict[str, Any]) -> Any:
        return (topkapi_ops.select(**{**arguments, "weights": -arguments["weights"]}),)

    monkeypatch.setattr(ops, "answer", worst)
    (row,) = (row for row in ops.run([SMALL[0]], CPU, QUICK) if row["kernel"] == "torch")
    assert row["wrong"].startswith("not the best")


def test_floors_are_the_larger_of_bytes_and_flops() -> None:
    assert CEILINGS.floor(2e9, 1e9, "fp32") == 2.0
    assert CEILINGS.floor(1e9, 8e9, "bf16") == CEILINGS.floor(1e9, 8e9, "fp16") == 4.0
    assert CEILINGS.floor(1e9, 8e9, "fp8") == 2.0


def test_work_counts_each_input_once() -> None:
    case = BenchCase(
        "sparse_mla", rows=8, context=1000, requests=4, heads=16, k=100, cache="fp8",
        dtype=torch.bfloat16,
    )  # fmt: skip
    moved, flops = case.work(distinct=700)
    queries, outputs, lse, slots = 8 * 16 * 576 * 2, 8 * 16 * 512 * 2, 8 * 16 * 4, 8 * 100 * 4
    assert moved == queries + outputs + lse + slots + 700 * 656
    assert flops == 2 * 8 * 100 * 16 * (576 + 512)
    assert case.work()[0] - moved == (800 - 700) * 656
    score = BenchCase("select", rows=4, context=100, requests=2, index_heads=3, cache="fp8", k=16)
    assert score.visible() == 99 + 100 + 99 + 100
    assert score.work() == (4 * 3 * (128 * 4 + 4) + 200 * 132 + 4 * 4 * 16, 2 * 398 * 3 * 128)
    assert replace(score, query="e4m3").arithmetic == "fp8"
    assert replace(score, query="e4m3", cache="bf16").arithmetic == "fp32"


def test_each_decoding_request_has_tokens_of_its_own() -> None:
    arguments = make_inputs(SMALL[4], CPU)
    assert arguments["slots"].unique().numel() == 2 * 16
    context = make_inputs(SMALL[1], CPU)["context"]
    assert context.table.unique().numel() == context.table.numel()
    assert context.lengths.tolist() == [199, 200, 199, 200]


def timed_rows() -> list[dict[str, Any]]:
    facts = {"device": "card", "driver": "1.2", "torch": "2", "ceilings": CEILINGS.facts()}
    rows = []
    for context in (65536, 131072):
        group = []
        size = {"phase": "decode"}
        for name, role, seconds in (("hopper", "ours", 2e-6), ("triton", "ours", 4e-6),
                                    ("fa3", "peer", 3e-6), ("aiter", "peer", 9e-6)):  # fmt: skip
            times = {"p20": seconds, "p50": seconds, "p80": seconds}
            row = {"op": "sparse_mla", "group": "sparse_mla decode", "size": size, **facts}
            row |= {"case": f"sparse_mla decode, 8 x {context}", "kernel": name, "role": role}
            row |= {"seconds": times, "floor_seconds": 1e-6, "bytes": 1000, "flops": 2000}
            group.append({**row, "arithmetic": "bf16", "timing": "graph"})
        rows += ops.compared(group)
    moving = {"op": "topk", "group": "topk", "case": "topk, 8 x 65536", "flops": 0}
    return [*rows, *ops.compared([{**rows[0], **moving}])]


def test_ours_are_set_against_the_best_peer() -> None:
    hopper, triton, fa3, *_ = timed_rows()
    assert (hopper["best_peer"], hopper["over_best_peer"]) == ("fa3", pytest.approx(1.5))
    assert triton["over_best_peer"] == pytest.approx(0.75)
    assert "best_peer" not in fa3
    assert (hopper["fraction"], fa3["fraction"]) == (pytest.approx(1 / 2), pytest.approx(1 / 3))


def test_the_page_and_the_plots_come_from_the_lines(tmp_path: Path) -> None:
    rows = timed_rows()
    text = page(rows)
    assert "| case | **hopper** | **triton** | fa3 | aiter | floor | floor % | over peer |" in text
    assert "decode, 8 x 65536 | 2.0 | 4.0 | 3.0 | 9.0 | 1.0 | 50% | 1.50 | fa3 |" in text
    assert "card, driver 1.2" in text
    written = plot_ops(rows, tmp_path / "ops.jsonl")
    assert [path.name for path in written] == ["ops_sparse_mla.png", "ops_topk.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    plot_roofline(rows, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_roofline([row for row in rows if row["op"] == "topk"], tmp_path / "moving.png")


def test_calls_take_turns() -> None:
    seen: list[str] = []
    calls = {name: Timed(lambda name=name: seen.append(name), "wall clock") for name in "ab"}
    times = interleaved(calls, 3, CPU)
    assert seen == ["a", "b"] * 3
    assert [len(values) for values in times.values()] == [3, 3]


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_module, "_seconds", lambda call, *_: call() is None or 0.5)
    found = ceilings_module.measure_ceilings(CPU)
    assert found.bytes_per_second > 0
    assert found.fp8 == 2 * found.bf16
    assert found.fp8_from == "twice bf16"


def test_checking_alone_says_what_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no such symbol")

    monkeypatch.setattr(sizes, "CPU_CASES", SMALL[5:6])
    arguments = ["ops", "--device", "cpu", "--op", "topk", "--check-only"]
    for role, status in (("peer", 0), ("triton", 1)):
        with_kernels(monkeypatch, kernel("torch", right), kernel(role, dies))
        result = CliRunner().invoke(command_line, ["bench", *arguments])
        assert result.exit_code == status, result.output
        assert "cpu: 2 right, 0 wrong, 1 failed, 0 refused" in result.output


def test_the_command_writes_lines_page_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "CPU_CASES", SMALL[5:7])
    out = tmp_path / "ops.jsonl"
    arguments = ["ops", "--device", "cpu", "--op", "topk", "--seconds", "0", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--commit", "abc1234"])
    assert result.exit_code == 0, result.output
    assert "cpu: 4 right, 0 wrong, 0 failed, 8 refused" in result.output
    rows = read_lines(out)
    assert {row["commit"] for row in rows} == {"abc1234"}
    assert {row["kernel"] for row in rows} >= {"torch", "triton", "torch.topk"}
    assert all("torch" in row and "commit" in row for row in rows)
    assert (tmp_path / "ops_topk.png").exists()
    assert (tmp_path / "ops.md").read_text() == page(rows)
    result = CliRunner().invoke(app, ["ops-report", str(out), "--out", str(tmp_path / "again.md")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "again_topk.png").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--op", "softmax"],
        ["--vs", "mystery"],
        ["--without", "mystery"],
        ["--part", "2/2"],
        ["--part", "x"],
        ["--part", "²/3"],
    ],
)
def test_arguments_are_checked_before_any_work(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["ops", "--device", "cpu", *arguments])
    assert isinstance(result.exception, ConfigError)


def test_a_kernel_named_by_vs_runs_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch, *(kernel(name, right) for name in ("triton", "peer", "other")))

    def names(*vs: str, without: str = "") -> list[str]:
        plan = ops.Plan(frozenset(vs), seconds=0.0, without=frozenset({without}))
        return [row["kernel"] for row in ops.run([TOPK], CPU, plan)]

    assert names("all") == ["triton", "peer", "other", "torch.topk"]
    assert names("none") == ["triton"]
    assert names("all", without="other") == ["triton", "peer", "torch.topk"]
    assert names("peer", "torch.topk") == ["triton", "peer", "torch.topk"]


def test_parts_make_the_whole_and_every_size_is_one_case() -> None:
    names = [case.name for case in sizes.GPU_CASES]
    assert len(set(names)) == len(names)
    whole = ops.chosen_cases(CPU, names=["sparse_mla", "topk"])
    parts = [ops.chosen_cases(CPU, names=["sparse_mla", "topk"], part=(i, 4)) for i in range(4)]
    assert [case for part in parts for case in part] == whole
    assert {len(part) for part in parts} <= {len(whole) // 4, len(whole) // 4 + 1}
    assert {case.op for case in whole} == {"sparse_mla", "topk"}
    for big in (c for c in sizes.GPU_CASES if c.requests == 128 and c.context == 131072):
        small = sizes.shrunk(big, 2**21)
        # How a selection is cut goes by the context.
        assert (small.context, small.rows) == (16384 if big.op == "sparse_mla" else 131072, 128)


def test_refusals_are_errors_of_ours() -> None:
    assert KernelRefusedError not in ops.FAILURES
    assert issubclass(KernelRefusedError, ops.FAILURES)  # caught before, as a refusal
