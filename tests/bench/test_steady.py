"""Is a call in line given inputs that no other one has, and is its time its share of the line?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from topkapi.bench import clock as clock_module
from topkapi.bench import ops, sizes, steady
from topkapi.bench.cases import BenchCase
from topkapi.bench.check import expect
from topkapi.bench.clock import interleaved, prepare_line
from topkapi.bench.contenders import Contender, contenders
from topkapi.bench.inputs import make_inputs, make_sets
from topkapi.bench.ops_page import page
from topkapi.bench.plain import plain_select

CPU = torch.device("cpu")
FEW: dict[str, Any] = {"index_heads": 4, "index_dim": 32, "k": 16, "phase": "decode"}
NARROW: dict[str, Any] = {"heads": 2, "latent": 64, "rope": 32, "k": 16, "phase": "decode"}
CACHED = (
    BenchCase("select", rows=4, context=200, requests=4, cache="fp8", **FEW),
    BenchCase("indexer_logits", rows=1, context=200, **FEW),
    BenchCase("sparse_mla", rows=2, context=100, requests=2, **NARROW),
    BenchCase("write_latent", rows=5, cache="fp16", dtype=torch.float16, **NARROW),
    BenchCase("write_index_key", rows=5, index_dim=32, cache="fp8", phase="decode"),
    BenchCase("gather_latent", rows=5, context=200, **NARROW),
)
TOPK = BenchCase("topk", rows=3, context=200, k=16, phase="decode")


def tensors(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return found | ({"table": arguments["context"].table} if "context" in arguments else {})


@pytest.mark.parametrize("case", [*CACHED, TOPK], ids=lambda case: case.name)
def test_sets_are_alike_and_share_nothing(case: BenchCase) -> None:
    first = make_inputs(case, CPU)
    sets = make_sets(case, first, 3, 2**30)
    assert all(one.keys() == first.keys() for one in sets)
    for name, value in tensors(first).items():
        of_sets = [tensors(one)[name] for one in sets]
        assert len({one.data_ptr() for one in of_sets}) == 3
        assert {(one.shape, one.dtype) for one in of_sets} == {(value.shape, value.dtype)}
        if name in ("slots", "q", "logits", "latent", "keys", "table"):
            assert not torch.equal(of_sets[0], of_sets[1])
            assert not torch.equal(of_sets[0], value)


@pytest.mark.parametrize("case", CACHED, ids=lambda case: case.name)
def test_large_caches_are_used_in_turn(case: BenchCase) -> None:
    name = "kv_cache" if case.op.endswith(("mla", "latent")) else "index_cache"
    first = make_inputs(case, CPU)
    given = first[name]

    def which(pool_bytes: int) -> list[int]:
        caches = [one[name] for one in make_sets(case, first, 5, pool_bytes)]
        assert all(torch.equal(cache, given) for cache in caches)
        places = [cache.data_ptr() for cache in caches]
        assert places[0] == given.data_ptr()
        return [places.index(place) for place in places]

    assert which(0) == which(given.nbytes) == [0, 0, 0, 0, 0]
    assert which(3 * given.nbytes - 1) == [0, 1, 0, 1, 0]
    assert which(9 * given.nbytes) == [0, 1, 2, 3, 4]


def test_a_call_in_line_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 6))
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(now))
    seen: list[int] = []
    line = prepare_line([lambda at=at: seen.append(at) for at in range(3)], CPU)
    assert interleaved({"line": line}, 2, CPU) == {"line": [2.0, 2.0]}
    assert seen == [0, 1, 2] * 3


def test_short_calls_of_a_decoding_step_are_timed_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[int]] = {"quick": [], "slow": [], "dies": []}

    def call(name: str, logits: torch.Tensor) -> None:
        if name == "dies":
            raise RuntimeError("no such symbol\nand a long trace")
        seen[name].append(logits.data_ptr())

    def three(_: Any, arguments: dict[str, Any], *__: Any) -> list[Contender]:
        logits = arguments["logits"]
        return [Contender(name, "peer", lambda name=name: call(name, logits)) for name in seen]

    monkeypatch.setattr(steady, "contenders", three)
    arguments = make_inputs(TOPK, CPU)

    def measure(case: BenchCase, **single: float) -> dict[str, dict[str, Any]]:
        return steady.steady_times(case, arguments, single, {"all"}, (), 0.0, CPU)

    found = measure(TOPK, quick=2e-5, slow=2e-3, dies=1e-5)
    assert found["dies"] == {"steady_failed": "RuntimeError: no such symbol"}
    times = found["quick"]["steady_seconds"]
    assert 0 < times["p20"] <= times["p50"] <= times["p80"]
    assert (found["quick"]["steady_calls"], found["quick"]["steady_rounds"]) == (40, 5)
    # Once to warm up, then every round, each time on 40 other logits.
    assert seen["quick"] == seen["quick"][:40] * 6
    assert len(set(seen["quick"])) == 40
    assert seen["slow"] == []
    assert measure(TOPK, quick=1e-6)["quick"]["steady_calls"] == 64
    assert measure(TOPK, quick=9e-4)["quick"]["steady_calls"] == 8
    assert measure(TOPK, quick=2e-3) == {}
    assert measure(replace(TOPK, phase="prefill"), quick=2e-5) == {}


def test_no_size_of_prefill_is_measured_in_line() -> None:
    for case in (*sizes.GPU_CASES, *sizes.GPU_QUICK):
        prefill = case.rows > 128 and case.op != "gather_latent"
        assert (case.phase == "prefill") == prefill, case.name


def test_both_clocks_have_their_best_peer() -> None:
    facts = {"op": "topk", "case": "topk, 8 x 65536", "device": "card", "timing": "graph"}
    facts |= {"floor_seconds": 1e-6}
    rows = []
    for name, role, single, between in (
        ("ours", "ours", 4e-6, 2e-6),
        ("early", "peer", 5e-6, 4.5e-6),
        ("late", "peer", 8e-6, 3e-6),
        ("slow", "baseline", 2e-3, None),
    ):
        row = {**facts, "kernel": name, "role": role, "seconds": {"p50": single}}
        rows.append({**row, "steady_seconds": {"p50": between} if between else None})
    ours, early, _, slow = ops.compared(rows)
    assert (ours["best_peer"], ours["steady_best_peer"]) == ("early", "late")
    assert (ours["over_best_peer"], ours["steady_over_best_peer"]) == (
        pytest.approx(1.25),
        pytest.approx(1.5),
    )
    assert (ours["fraction"], ours["steady_fraction"]) == (
        pytest.approx(0.25),
        pytest.approx(0.5),
    )
    assert "steady_over_best_peer" not in early
    assert "steady_fraction" not in slow
    text = page(rows)
    assert "`single / steady`" in text
    assert (
        "| topk, 8 x 65536 | 4.0 / 2.0 | 5.0 / 4.5 | 8.0 / 3.0 | 2000 | 1.0 | 25% | 1.25 | early | "
        "50% | 1.50 | late |" in text
    )


@pytest.mark.parametrize("budget_bytes", [0, 3 * 4 * 4 * 200, 2**28])
@pytest.mark.parametrize("rows", [4, 12])
def test_plain_torch_selects_the_best(rows: int, budget_bytes: int) -> None:
    """Whatever the blocks are: of some requests, or of some rows of one."""
    for cache, query in (("fp8", "e4m3"), ("fp32", "")):
        sizes_of = {**FEW, "index_dim": 128}
        case = BenchCase("select", rows, 200, 4, cache=cache, query=query, **sizes_of)
        arguments = make_inputs(case, CPU)
        got = plain_select(**arguments, budget_bytes=budget_bytes)
        # By value: where all weights of a row are negative, its best scores are many zeros.
        assert expect(case, arguments).judge((got,), False).wrong is None
        assert expect(case, arguments).judge((got.roll(1, 0),), False).wrong


def test_on_a_gpu_plain_torch_stands_beside_our_scores() -> None:
    case = CACHED[0]
    arguments = make_inputs(case, CPU)
    for device in ("cuda", "cpu"):
        found = {c.name: c for c in contenders(case, arguments, {"all"}, (), torch.device(device))}
        assert found["triton + torch.topk"].role == "baseline"
        plain = found["torch + torch.topk"]
        assert (plain.call.func is plain_select) == (device == "cuda")  # type: ignore[attr-defined]
        assert plain.call().shape == (4, 16)
