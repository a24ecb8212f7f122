"""Steps replayed over static inputs give what eager steps give, whatever comes and goes.

On a CPU a replay calls the captured function again (`rerunning`); tests/gpu has CUDA graphs.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import make_llm
from engine.drafting import GREEDY, PROMPTS, run, runner_of, save_checkpoint, tokens
from engine.rerunning import replaying
from peers.tiny_models import BY_NAME
from topkapi.config import BackendOptions
from topkapi.engine.graphs import GraphStats, PaddedSizes
from topkapi.engine.llm import LLM
from topkapi.engine.request import Request, RequestOutput, SamplingParams, SamplingRow
from topkapi.engine.sampler import NOT_FINITE, NOTHING_ALLOWED, Sampler, best_tokens
from topkapi.errors import ConfigError
from topkapi.models.experts import over_all_rows, over_chosen_rows, prepare_row_invariant
from topkapi.models.row_invariant import RowInvariant


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("guessing"), guesses=True)


@pytest.mark.parametrize(
    ("most", "wanted", "sizes"),
    [
        (1, None, (1,)),
        (6, None, (1, 2, 4, 6)),
        (8, None, (1, 2, 4, 8)),
        (64, None, (1, 2, 4, 8, 16, 32, 64)),
        (8, [5, 3, 5], (3, 5)),
        (8, [100, 2], (2, 8)),
    ],
)
def test_padded_sizes(most: int, wanted: list[int] | None, sizes: tuple[int, ...]) -> None:
    padded = PaddedSizes(most, wanted)
    assert padded.sizes == sizes
    for count in range(most + 2):
        holding = [size for size in sizes if size >= count > 0]
        assert padded.holding(count) == (min(holding) if holding else None)


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_sizes_that_cannot_be(checkpoint: Path, sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="cuda_graph_batch_sizes"):
        make_llm(checkpoint, cuda_graph_batch_sizes=sizes)


def test_a_cpu_says_why_there_are_none(checkpoint: Path) -> None:
    assert make_llm(checkpoint).stats().graphs == GraphStats(off="the device is cpu")
    asked_not = make_llm(checkpoint, cuda_graphs=False).stats()
    assert asked_not.to_json()["graphs"]["off"] == "cuda_graphs=False"


def drive(llm: LLM, seed: int, num_requests: int = 13) -> list[RequestOutput]:
    """Requests that arrive between steps, some of which are aborted; outputs by arrival."""
    rng = random.Random(seed)
    engine, outputs = llm.engine, {}
    ids: list[int] = []
    while len(ids) < num_requests or engine.has_work:
        while len(ids) < num_requests and rng.random() < 0.4:
            prompt = [rng.randrange(3, 90) for _ in range(rng.choice((1, 2, 7, 8, 9, 30, 70)))]
            params = SamplingParams(
                temperature=rng.choice((0, 0, 0.8)),
                seed=rng.randrange(99),
                max_tokens=rng.randrange(1, 30),
                ignore_eos=True,
                logprobs=2,
                presence_penalty=rng.choice((0, 0, 0.5)),
            )
            ids.append(engine.add(prompt, params))
        if ids and rng.random() < 0.05:
            victim = rng.choice(ids)
            aborted = engine.abort(victim)
            if aborted is not None:
                outputs[victim] = aborted
        for update in engine.step() if engine.has_work else ():
            if update.output is not None:
                outputs[update.request_id] = update.output
    return [outputs[request_id] for request_id in ids]


def bits(outputs: list[RequestOutput]) -> list[Any]:
    assert all(output.error is None for output in outputs)
    return [
        (o.finish_reason, [(item.token_id, item.logprob, item.top) for item in o.logprobs or []])
        for o in outputs
    ]


WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preempted, from the host": {"max_tokens_in_cache": 128, "host_cache_tokens": 600},
    "fp8": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("deepseek_v32_yarn", "roomy"),
        ("glm_shared", "preempted, from the host"),
        ("axk2", "fp8"),
    ],
)
def test_bits_are_those_of_eager_steps(name: str, way: str) -> None:
    def make() -> LLM:
        return LLM(
            BY_NAME[name].build(),
            page_size=8,
            max_running_requests=6,
            max_batch_tokens=64,
            backend_options=BackendOptions(deterministic=True),
            **WAYS[way],
        )

    eager, replayed = make(), make()
    recorder = replaying(replayed, [1, 3, 6])
    assert bits(drive(replayed, 1)) == bits(drive(eager, 1))
    assert set(recorder.rows) == {1, 3, 6}
    stats = replayed.stats()
    assert stats.graphs.num_graphs == 3
    assert stats.graphs.num_replays > 10
    assert stats.graphs.static_bytes > 0
    assert stats.preemptions == eager.stats().preemptions
    assert stats.preemptions > 0 or way != "preempted, from the host"


def test_contexts_that_never_choose(checkpoint: Path) -> None:
    """Nothing is longer than k, so that captured steps do not score at all."""
    short = [prompt[:6] for prompt in PROMPTS[:5]]
    eager, replayed = (make_llm(checkpoint, max_context_len=16) for _ in "ab")
    recorder = replaying(replayed)
    assert tokens(run(replayed, short, GREEDY)) == tokens(run(eager, short, GREEDY))
    assert recorder.rows[0] == 8


def test_larger_batches_run_eagerly(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    recorder = replaying(llm, [2])
    want = tokens(run(make_llm(checkpoint), PROMPTS[:6], GREEDY))
    assert tokens(run(llm, PROMPTS[:6], GREEDY)) == want
    assert recorder.rows in ([], [2])
    assert tokens(run(llm, PROMPTS[:2], GREEDY)) == want[:2]
    assert recorder.rows == [2]


def test_named_sizes_are_captured_at_once_the_largest_first(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    recorder = replaying(llm, [1, 5, 2])
    llm.engine._runner.warm_up()
    assert recorder.rows == [5, 2, 1]
    assert llm.stats().graphs.num_replays == 0
    run(llm, PROMPTS[:5], GREEDY)
    assert recorder.rows == [5, 2, 1]


class TestSpeculation:
    @pytest.mark.parametrize("steps", [1, 2, 4, "auto"])
    def test_tokens_and_acceptance_are_those_of_eager_steps(
        self, guessing: Path, steps: Any
    ) -> None:
        eager, replayed = (make_llm(guessing, speculative_num_steps=steps) for _ in range(2))
        recorder = replaying(replayed)
        want, got = (run(llm, PROMPTS, GREEDY) for llm in (eager, replayed))
        assert tokens(got) == tokens(want)
        if steps != "auto":  # which goes by the clock
            assert runner_of(replayed).stats == runner_of(eager).stats
            # Verifying steps have 1 + drafts rows a request, rounds of drafting give a row each.
            assert {2 * (1 + steps), 2} <= set(recorder.rows)

    @pytest.mark.parametrize("steps", [1, 3])
    def test_drafts_are_drawn_between_replays(self, guessing: Path, steps: int) -> None:
        params = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)
        eager, replayed = (make_llm(guessing, speculative_num_steps=steps) for _ in range(2))
        recorder = replaying(replayed, [3])
        want, got = (run(llm, PROMPTS[:3], params) for llm in (eager, replayed))
        assert tokens(got) == tokens(want)
        assert runner_of(replayed).stats == runner_of(eager).stats
        # A recording a draft, one that verifies, and perhaps one without drafts at the end.
        assert recorder.rows.count(3) in (steps, steps + 1)
        assert recorder.rows.count(3 * (1 + steps)) == 1

    def test_drafts_drawn_without_a_seed_keep_the_distribution(self, guessing: Path) -> None:
        """Rejection reads the logits that drafts were drawn from, replayed ones among them."""
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
        eager, replayed = (make_llm(guessing, speculative_num_steps=3) for _ in range(2))
        recorder = replaying(replayed)
        for llm in (eager, replayed):
            numbers = random.Random(3)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("secrets.randbits", numbers.getrandbits)
                outputs = run(llm, PROMPTS[:5], params)
            if llm is eager:
                want = tokens(outputs)
        assert tokens(outputs) == want
        assert runner_of(replayed).stats == runner_of(eager).stats
        assert len(recorder.rows) > 4

    def test_drafts_outlive_graphs_captured_before_theirs(self, guessing: Path) -> None:
        """A verifying step captured for greedy requests computes where the drafts of those that
        draw, captured later, lie; and the other way round.
        """
        greedy = replace(GREEDY, max_tokens=15)
        drawn = replace(GREEDY, max_tokens=15, temperature=1.0)
        for first, second in ((greedy, drawn), (drawn, greedy)):
            eager, replayed = (make_llm(guessing, speculative_num_steps=3) for _ in range(2))
            replaying(replayed)
            got = []
            for llm in (eager, replayed):
                numbers = random.Random(3)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("secrets.randbits", numbers.getrandbits)
                    got.append([tokens(run(llm, PROMPTS[:4], way)) for way in (first, second)])
            assert got[0] == got[1]
            assert runner_of(replayed).stats == runner_of(eager).stats

    def test_what_comes_and_goes(self, guessing: Path) -> None:
        def make(**options: Any) -> LLM:
            return LLM(
                guessing,
                device="cpu",
                dtype="fp32",
                page_size=8,
                max_running_requests=5,
                backend_options=BackendOptions(deterministic=True),
                **options,
            )

        eager, replayed = (make(speculative_num_steps=3, max_tokens_in_cache=240) for _ in "ab")
        replaying(replayed)
        assert bits(drive(replayed, 7)) == bits(drive(eager, 7))
        assert replayed.stats().graphs.num_replays > 10

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_the_layers_experts_can_be_captured(
        self, guessing: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The layer's are not the model's, which have their own loop where it is deterministic."""
        prepared: list[Any] = []
        monkeypatch.setattr("topkapi.engine.draft_graphs.prepare_capturable", prepared.append)
        options = BackendOptions(deterministic=deterministic)
        llm = LLM(guessing, device="cpu", speculative_num_steps=1, backend_options=options)
        replaying(llm)
        assert prepared == [runner_of(llm)._drafter._mtp.layer]

    def test_a_layer_that_cannot_be_captured_leaves_the_model_its_graphs(
        self, guessing: Path
    ) -> None:
        llm = make_llm(guessing, speculative_num_steps=2)
        recorder = replaying(llm)
        runner_of(llm)._drafter._mtp.layer.mlp.register_forward_hook(refuses(recorder))
        with pytest.warns(RuntimeWarning, match="a round of drafting cannot be captured"):
            got = run(llm, PROMPTS, GREEDY)
        assert tokens(got) == tokens(run(make_llm(guessing), PROMPTS, GREEDY))
        stats = llm.stats().graphs
        assert stats.off.startswith("a round of drafting")
        assert stats.num_graphs > 0
        assert stats.num_replays > 5


def test_the_best_tokens_are_the_samplers() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = -float("inf")
    logits[4, [9, 30]] = 90.0
    rows = [SamplingRow(Request(i, [1], GREEDY, 0, 99)) for i in range(6)]
    sampled = Sampler().sample(logits, rows)
    assert best_tokens(logits).tolist() == sampled.token_ids.tolist()
    assert sampled.token_ids[1:5].tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_ALLOWED, 9]
    given = torch.arange(6)
    assert Sampler().sample(logits, rows, given).token_ids is given
    drawn = SamplingRow(Request(9, [1], SamplingParams(logprobs=0, temperature=0), 0, 99))
    mixed = Sampler().sample(logits, [*rows[:5], drawn], given)
    assert mixed.token_ids.tolist() == sampled.token_ids.tolist()
    for options, token in (({"logit_bias": {3: 100.0}}, 3), ({"min_tokens": 1}, 30)):
        other = Request(9, [1], replace(GREEDY, **options), 0, 99, end_token_ids=(9,))
        changed = Sampler().sample(logits[4:5], [SamplingRow(other)], given[:1])
        assert changed.token_ids.tolist() == [token]


def refuses(recorder: Any) -> Callable[..., None]:
    """A hook that fails while something is captured, as a wait for the device does."""

    def hook(*_: Any) -> None:
        if recorder.recording:
            raise RuntimeError("called a synchronizing operation")

    return hook


def test_what_cannot_be_captured_runs_eagerly_and_is_said_once(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    recorder = replaying(llm)
    llm.model.model.layers[1].mlp.register_forward_hook(refuses(recorder))
    want = tokens(run(make_llm(checkpoint), PROMPTS, GREEDY))
    with pytest.warns(RuntimeWarning, match=r"test_graphs.py:\d+") as said:
        assert tokens(run(llm, PROMPTS, GREEDY)) == want
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(run(llm, PROMPTS, GREEDY)) == want
    stats = llm.stats().graphs
    assert "called a synchronizing operation" in stats.off
    assert (stats.num_graphs, stats.num_replays, stats.static_bytes) == (0, 0, 0)


def test_who_watches_the_modules_sees_what_is_run(checkpoint: Path) -> None:
    """Selections are looked at as often as without graphs; captures are neither seen nor timed."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    looked = []
    for graphs in (False, True):
        llm = make_llm(checkpoint, selection_stats_every=3, enable_prefix_cache=False)
        recorder = replaying(llm) if graphs else None
        run(llm, [list(range(3, 90)), [3, 4, 5]], params)
        looked.append(llm.stats().selection)
        if recorder is not None:
            assert recorder.rows == [2]
            seconds = llm.stats().seconds
            assert seconds["graph"] > 0
            assert seconds["attention"] > 0
    assert looked[0] == looked[1]


def test_experts_with_scales_or_biases_keep_their_loop() -> None:
    model = BY_NAME["deepseek_v32"].build()
    first, second = (model.model.layers[i].mlp.experts for i in (1, 2))
    first.has_bias = True
    prepare_row_invariant(model)
    assert "forward" not in first.__dict__
    assert "forward" in second.__dict__
    assert model.get_experts_implementation()[""] == "eager"


class Gated(torch.nn.Module):
    """Experts as Transformers has them."""

    def __init__(self, count: int, hidden: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(count)

        def weight(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return torch.nn.Parameter(values.to(dtype), requires_grad=False)

        self.gate_up_proj = weight(count, 2 * width, hidden)
        self.down_proj = weight(count, hidden, width)
        self.act_fn = torch.nn.SiLU()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "count"), [(1, 4), (3, 32), (17, 4), (63, 9)])
def test_experts_give_the_same_bits_without_asking_who_was_chosen(
    rows: int, count: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    experts = Gated(count, 24, 20, dtype)
    x = torch.randn(rows, 24, generator=generator).to(dtype)
    index = torch.rand(rows, count, generator=generator).topk(2).indices
    weights = torch.rand(rows, 2, generator=generator)
    index[0, 0] = count  # somebody else's, where experts are split
    if rows > 1:
        x[1] = float("nan")
    with RowInvariant():
        got = over_all_rows(experts, x, index, weights)
        want = over_chosen_rows(experts, x, index, weights)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert got.isnan().any(1).tolist() == [row == 1 for row in range(rows)]
    plain = torch.zeros(rows, 24)
    for row in range(rows):
        for expert, weight in zip(index[row].tolist(), weights[row], strict=True):
            if expert < count:
                gate, up = (experts.gate_up_proj[expert].float() @ x[row].float()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                plain[row] += weight * (experts.down_proj[expert].float() @ inner)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.float(), plain, rtol=tolerance, atol=tolerance, equal_nan=True)
