"""Does the serving benchmark count every request, time it from its arrival, and compare fairly?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from engine.drafting import save_checkpoint
from engine.test_engine_faults import BAD, Countdown
from engine.test_scheduler import Source
from topkapi.bench import serve, serve_command
from topkapi.bench.command import app
from topkapi.bench.random_model import random_config, random_model
from topkapi.bench.record import quantiles, read_lines
from topkapi.bench.serve import (
    BASE,
    NO_GRAPHS,
    NO_PREFIX_CACHE,
    SPECULATION,
    ServeCase,
    Served,
    measure,
    ratios,
    report,
)
from topkapi.bench.traffic import PlannedRequest, Traffic
from topkapi.cache import PageAllocator, PageLeases, PrefixTree
from topkapi.config import BackendOptions, DsaConfig
from topkapi.engine.engine import Engine, EngineLimits
from topkapi.engine.scheduler import Batch, Scheduler, SchedulerLimits
from topkapi.errors import ConfigError, KernelRefusedError

TINY = {
    "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64,
    "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 16, "num_hidden_layers": 2, "max_position_embeddings": 256,
}  # fmt: skip


class Clock:
    """A time that only steps and sleeping move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Slow(Countdown):
    """A step takes a second."""

    def __init__(self, clock: Clock, fault: Exception | None = None) -> None:
        super().__init__(fault)
        self._clock = clock

    def run(self, batch: Batch) -> Any:
        self._clock.now += 1.0
        return super().run(batch)


def slow_engine(clock: Clock) -> Any:
    """An engine by the fake clock, in place of an LLM: contexts of 40, token 12 raises."""
    leases = PageLeases(PageAllocator(41, 4), PrefixTree(4))
    scheduler = Scheduler(SchedulerLimits(32, 8), leases, Source(8))
    runner = Slow(clock, RuntimeError("boom"))
    limits = EngineLimits(100, 40, frozenset({0}))
    return SimpleNamespace(engine=Engine(runner, scheduler, limits, clock=clock))


def asked(arrival: float, last: int, output: int, length: int = 3) -> PlannedRequest:
    return PlannedRequest(arrival, (50,) * (length - 1) + (last,), output)


def test_times_run_from_the_planned_arrival() -> None:
    clock = Clock()
    planned = [asked(0.0, 90, 3), asked(0.25, 80, 2), asked(10.5, 70, 1)]
    served, seconds = serve.serve(slow_engine(clock), planned, clock=clock, sleep=clock.sleep)
    assert [request.token_times for request in served] == [[1, 2, 3], [2, 3], [11.5]]
    assert [request.tokens for request in served] == [[89, 88, 87], [79, 78], [69]]
    assert [request.latencies()["first_token"] for request in served] == [[1.0], [1.75], [1.0]]
    assert [request.latencies()["between_tokens"] for request in served] == [[1, 1], [1], []]
    assert [request.latencies()["whole"] for request in served] == [[3.0], [2.75], [1.0]]
    assert seconds == 11.5


def test_every_request_is_counted_under_its_reason() -> None:
    clock = Clock()
    llm = slow_engine(clock)
    planned = [
        asked(0.0, 90, 4),
        asked(0.0, BAD + 2, 9),  # two tokens, then a step that raises
        asked(0.0, 60, 4, length=40),  # longer than the model
        asked(1.0, 95, 30),  # out of time after 8 seconds
        asked(1.0, 85, 4),
    ]
    before = llm.engine.stats()
    served, seconds = serve.serve(llm, planned, timeout=8.0, clock=clock, sleep=clock.sleep)
    assert [request.reason for request in served] == [
        "length", "error", "refused", "timeout", "length",
    ]  # fmt: skip
    figures = report(served, seconds, before, llm.engine.stats())
    assert figures["requests"] == 5
    assert figures["completed"] == 2
    assert sum(figures["reasons"].values()) == 5
    assert any("boom" in error for error in figures["errors"])
    assert any("40 tokens" in error for error in figures["errors"])
    assert figures["output_tokens_per_second"] == pytest.approx(8 / seconds)
    assert figures["output_tokens"] == 8 + 2 + len(served[3].tokens)
    assert figures["requests_per_second"] == pytest.approx(2 / seconds)
    assert serve.compare(served, served) == {"compared": 2, "differ": 0, "parted_after": []}
    other = [replace(request, tokens=[*request.tokens[:2], 1]) for request in served]
    same = {"compared": 2, "differ": 2, "parted_after": [2, 2]}
    assert serve.compare(other, served) == same


def test_a_refusal_that_is_nobodys_fault_is_raised() -> None:
    clock = Clock()
    llm = slow_engine(clock)
    llm.engine._runner.fault = KernelRefusedError("sparse_mla", {"torch": "no"})
    with pytest.raises(KernelRefusedError):
        serve.serve(llm, [asked(0.0, BAD, 4)], clock=clock, sleep=clock.sleep)


def test_tokens_that_come_together_share_the_time() -> None:
    request = Served(asked(1.0, 5, 9))
    request.add([7], 2.0)
    request.add([], 2.5)
    request.add([8, 9, 10], 5.0)
    assert request.token_times == [2.0, 3.0, 4.0, 5.0]
    assert request.latencies()["between_tokens"] == [1.0, 1.0, 1.0]
    together = Served(asked(1.0, 5, 9))
    together.add([7, 8], 2.0)
    assert together.token_times == [2.0, 2.0]


def test_percentiles_are_by_nearest_rank() -> None:
    hundred = [float(value) for value in range(101)][::-1]
    assert quantiles(hundred, (50, 90, 99)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert quantiles([4.0, 1.0], (0, 49, 51, 100)) == {"p0": 1, "p49": 1, "p51": 4, "p100": 4}
    assert quantiles([2.0], (50, 99)) == {"p50": 2.0, "p99": 2.0}
    assert quantiles([], (50, 99)) == {}


def row(variant: str, repeat: int, first: float, rate: float, differ: int = 0) -> dict[str, Any]:
    times = dict.fromkeys(("p50", "p90", "p99"), first)
    figures = {"first_token": times, "between_tokens": {}, "whole": times}
    rates = {"output_tokens_per_second": rate, "requests_per_second": rate}
    return {
        "variant": variant,
        "repeat": repeat,
        "compared": 4,
        "differ": differ,
        **figures,
        **rates,
    }


def test_ratios_say_what_a_feature_is_worth() -> None:
    rows = [row(BASE, 0, 2.0, 10.0), row(NO_PREFIX_CACHE, 0, 6.0, 5.0, differ=1)]
    rows += [row(BASE, 1, 1.0, 10.0), row(NO_PREFIX_CACHE, 1, 10.0, 5.0)]
    rows += [row(SPECULATION, 1, 4.0, 5.0), {"variant": NO_GRAPHS, "failed": "x", "repeat": 0}]
    cache, speculation = ratios(rows)
    assert cache["feature"] == "prefix cache"
    assert cache["repeats"] == 2
    assert cache["first_token_p50"] == 6.5  # of 3 and 10
    assert cache["output_tokens_per_second"] == 2.0
    assert cache["between_tokens_p99"] is None
    assert (cache["differ"], cache["compared"]) == (1, 8)
    assert speculation["first_token_p99"] == 0.25  # drafting was slower here
    assert speculation["requests_per_second"] == 0.5


def test_the_table_says_after_how_many_tokens_answers_part() -> None:
    told = serve_command._other_tokens({"differ": 2, "compared": 4, "parted_after": [3, 17]})
    assert told == "2 of 4, after 3 to 17"
    assert serve_command._other_tokens({"differ": 0, "compared": 4, "parted_after": []}) == "0 of 4"


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("drafting"), guesses=True)


CPU = {"device": "cpu", "dtype": "fp32", "page_size": 8, "max_batch_tokens": 64}
TRAFFIC = Traffic(
    mix="short-chat", requests=7, rate=200.0, prefixes=2, prefix_tokens=24, length_scale=0.2
)


def test_every_variant_serves_the_same_tokens(drafting: Path) -> None:
    case = ServeCase(str(drafting), TRAFFIC, {**CPU, "speculative_num_steps": 2})
    rows = {row["variant"]: row for row in measure(case, repeats=1)}
    assert list(rows) == [BASE, NO_PREFIX_CACHE, SPECULATION]
    for served in rows.values():
        assert served["reasons"] == {"length": 7}, served["errors"]
        assert (served["compared"], served["differ"]) == (7, 0)
        assert served["output_tokens"] == rows[BASE]["output_tokens"] > 20
        assert served["graphs"]["off"]
        for name in serve.LATENCIES:
            found = served[name]
            assert 0 <= found["p50"] <= found["p90"] <= found["p99"]
            assert len(served[f"{name}_curve"]) == 51
    assert rows[BASE]["prefix_hit_rate"] > 0.1
    assert rows[NO_PREFIX_CACHE]["prefix_hit_rate"] == 0
    assert rows[BASE]["acceptance_length"] is None
    assert rows[SPECULATION]["acceptance_length"] > 1
    assert [line["feature"] for line in ratios(list(rows.values()))] == [
        "prefix cache",
        "speculation",
    ]


def test_a_small_cache_preempts_and_loses_nobody(drafting: Path) -> None:
    traffic = replace(TRAFFIC, requests=24, rate=float("inf"), prefixes=0, length_scale=0.4)
    # A fixed number of drafts: `auto` goes by the clock, and so would what is preempted.
    cache = {"page_size": 4, "max_tokens_in_cache": 100, "enable_prefix_cache": False}
    options = {**CPU, **cache, "speculative_num_steps": 2}
    rows = list(measure(ServeCase(str(drafting), traffic, options, warm_up=0)))
    assert [row["variant"] for row in rows] == [BASE, SPECULATION]
    assert [(row["completed"], row["differ"]) for row in rows] == [(24, 0), (24, 0)]
    assert all(row["preemptions"] > 0 for row in rows)


def test_a_variant_that_dies_is_a_row(drafting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: str, options: Any) -> Any:
        if not options.get("enable_prefix_cache", True):
            raise RuntimeError("out of memory")
        return serve_make_llm(model, options)

    serve_make_llm = serve.make_llm
    monkeypatch.setattr(serve, "make_llm", make)
    rows = list(measure(ServeCase(str(drafting), TRAFFIC, CPU, 0), [BASE, NO_PREFIX_CACHE]))
    assert "completed" in rows[0]
    assert rows[1]["options"] == {**CPU, "enable_prefix_cache": False}
    assert rows[1]["failed"] == "RuntimeError: out of memory"
    assert ratios(rows) == []


def test_variants_are_those_that_can_be(drafting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ServeCase("random", TRAFFIC, {"device": "cpu", "enable_prefix_cache": False})
    assert list(serve.variants(case)) == [BASE]
    with pytest.raises(ConfigError, match="no CUDA graphs"):
        list(measure(case, [NO_GRAPHS]))
    monkeypatch.setattr(serve, "resolve_device", lambda name: torch.device("cuda"))
    options = serve.variants(ServeCase(str(drafting), TRAFFIC))
    assert list(options) == [BASE, NO_PREFIX_CACHE, NO_GRAPHS, SPECULATION]
    assert options[NO_GRAPHS]["cuda_graphs"] is False
    assert options[SPECULATION]["speculative_num_steps"] == "auto"
    assert options[BASE]["speculative_num_steps"] == 0


def test_options_are_told_where_they_are_not_the_defaults() -> None:
    backend = BackendOptions(deterministic=True, topk_kernel="torch")
    options = {"dtype": "auto", "page_size": 8, "trace": Path("t.json"), "backend_options": backend}
    assert serve.changed_options(options) == {
        "page_size": 8, "trace": "t.json", "deterministic": True, "topk_kernel": "torch",
    }  # fmt: skip


def test_every_variant_writes_its_own_trace(drafting: Path, tmp_path: Path) -> None:
    case = ServeCase(str(drafting), TRAFFIC, {**CPU, "trace": tmp_path / "trace.json"}, 0)
    assert all("failed" not in row for row in measure(case))
    names = ("engine", "no-prefix-cache", "speculation")
    assert {file.name for file in tmp_path.iterdir()} == {f"trace-{name}.json" for name in names}


def test_the_random_model_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "random_model", partial(random_model, **TINY))
    options = {"device": "cpu", "dtype": "fp32", "page_size": 8, "max_tokens_in_cache": 1024}
    rows = list(measure(ServeCase("random", TRAFFIC, options)))
    assert [row["variant"] for row in rows] == [BASE, NO_PREFIX_CACHE]
    assert all(row["completed"] == 7 and row["differ"] == 0 for row in rows)
    changed = serve.make_llm("random", {**options, "config_overrides": {"index_topk": 8}})
    assert changed.config.index_topk == 8
    assert random_config(first_k_dense_replace=1).mlp_layer_types[1:] == ["sparse"] * 3
    with pytest.raises(ConfigError, match=r"index_top$"):
        serve.make_llm("random", {**options, "config_overrides": {"index_top": 8}})
    with pytest.raises(ConfigError, match=r"config_overrides: .*index_topk"):
        serve.make_llm("random", {**options, "config_overrides": {"index_topk": "x"}})
    with pytest.raises(ConfigError, match="fp16"):
        serve.make_llm("random", {"device": "cpu", "dtype": "fp16"})


def test_the_random_model_has_the_real_sizes() -> None:
    config = DsaConfig.from_hf(random_config())
    assert config.num_hidden_layers == 4
    assert (config.num_attention_heads, config.latent_width, config.v_head_dim) == (128, 576, 128)
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (64, 128, 2048)
    assert set(random_config().mlp_layer_types) == {"dense"}
    assert random_config().hidden_size == 7168


def test_the_command_prints_writes_and_draws(drafting: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "serve.jsonl"
    words = ["serve", "--model", str(drafting), "--device", "cpu", "--dtype", "fp32"]
    words += ["--mix", "short-chat", "--requests", "3", "--length-scale", "0.1", "--out", str(out)]
    result = CliRunner().invoke(app, [*words, "--rate", "500", "--prefix-tokens", "100"])
    assert result.exit_code == 0, result.output
    for word in ("prefix cache", "speculation", "first token", "3 of 3", "other tokens"):
        assert word in result.output
    rows = read_lines(out)
    assert [row["variant"] for row in rows if row["bench"] == "serve"] == [
        BASE, NO_PREFIX_CACHE, SPECULATION,
    ]  # fmt: skip
    assert [row["feature"] for row in rows if row["bench"] == "serve-ratios"] == [
        "prefix cache", "speculation",
    ]  # fmt: skip
    assert out.with_suffix(".png").stat().st_size > 1000
