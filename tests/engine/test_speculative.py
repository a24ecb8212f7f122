"""Speculation changes how many steps an answer takes, and nothing else about it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import free_pages, make_llm
from engine.drafting import Oracle, save_checkpoint
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams
from topkapi.engine.speculative import SpeculativeRunner
from topkapi.errors import ConfigError, UnsupportedModelError

VOCAB = 290
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of([1, 2, 7, 8, 9, 16, 17, 40, 63, 65, 100, 130])


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    """Complete, and leave nothing behind."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert not llm.engine.has_work
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def runner_of(llm: LLM) -> SpeculativeRunner:
    runner = llm.engine._runner
    assert isinstance(runner, SpeculativeRunner)
    return runner


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which most drafts are right."""
    return save_checkpoint(tmp_path_factory.mktemp("guessing"), guesses=True)


@pytest.fixture(scope="module")
def plain(guessing: Path) -> LLM:
    return make_llm(guessing)


@pytest.fixture(scope="module")
def drafting(guessing: Path) -> LLM:
    return make_llm(guessing, speculative_num_steps=3)


@pytest.fixture(scope="module")
def oracle(guessing: Path) -> Oracle:
    return Oracle(guessing)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return tokens(run(plain, PROMPTS, GREEDY))


@pytest.mark.parametrize("steps", [1, 2, 4, "auto"])
def test_greedy_tokens_are_those_of_plain_decoding(
    guessing: Path, expected: list[list[int]], steps: Any
) -> None:
    llm = make_llm(guessing, speculative_num_steps=steps)
    outputs = run(llm, PROMPTS, GREEDY)
    assert tokens(outputs) == expected
    rounds = [output.num_rounds for output in outputs]
    if steps == "auto":
        return
    assert all(0 < count < 24 for count in rounds)
    stats = runner_of(llm).stats
    assert stats.num_rounds == sum(rounds)
    assert stats.num_accepted == sum(output.num_accepted for output in outputs)
    assert stats.num_accepted == sum(stats.accepted_at)
    assert stats.acceptance_length is not None
    assert stats.acceptance_length > 1.3


def test_deterministic_bf16_gives_the_same_tokens(guessing: Path) -> None:
    """In bf16 near-ties are common: only equal bits of every logit keep the tokens equal."""
    options: dict[str, Any] = {
        "dtype": "bf16",
        "page_size": 8,
        "max_batch_tokens": 64,
        "max_tokens_in_cache": 1024,
        "backend_options": BackendOptions(deterministic=True),
    }
    plain = LLM(guessing, device="cpu", **options)
    drafting = LLM(guessing, device="cpu", speculative_num_steps=3, **options)
    outputs = run(drafting, PROMPTS, GREEDY)
    assert tokens(outputs) == tokens(run(plain, PROMPTS, GREEDY))
    assert sum(output.num_accepted for output in outputs) > 40


def test_drafts_that_are_mostly_wrong_cost_nothing_but_time(
    tmp_path: Path,
) -> None:
    path = save_checkpoint(tmp_path, guesses=False)
    outputs = run(make_llm(path, speculative_num_steps=4), PROMPTS, GREEDY)
    assert tokens(outputs) == tokens(run(make_llm(path), PROMPTS, GREEDY))
    assert sum(output.num_accepted for output in outputs) < 20


@pytest.mark.parametrize("steps", [1, 4])
def test_drafts_that_are_always_right_are_all_accepted(tmp_path: Path, steps: int) -> None:
    path = save_checkpoint(tmp_path, guesses=True, influence=0.0)
    outputs = run(make_llm(path, speculative_num_steps=steps), PROMPTS[:5], GREEDY)
    assert tokens(outputs) == tokens(run(make_llm(path), PROMPTS[:5], GREEDY))
    for output in outputs:
        assert output.acceptance_length == steps + 1
        # The first token comes out of the prompt, and nothing is drafted for the last one alone.
        assert output.num_rounds == 23 // (steps + 1) + (23 % (steps + 1) > 1)


class Watched:
    """An engine that drafts, and a record of the logits of every round's first draft."""

    def __init__(self, path: Path, oracle: Oracle, **options: Any) -> None:
        self.llm = make_llm(path, **{"speculative_num_steps": 2, **options})
        self._oracle = oracle
        self._drafts: list[tuple[int, int, torch.Tensor]] = []
        drafter = runner_of(self.llm)._drafter
        propose = drafter.propose

        def watched(chunks: Any, num_drafts: int, choose: Any) -> torch.Tensor:
            def seen(logits: torch.Tensor, place: int) -> torch.Tensor:
                if place == 0:
                    for chunk, row in zip(chunks, logits, strict=True):
                        self._drafts.append((chunk.request.request_id, chunk.start, row))
                return choose(logits, place)

            return propose(chunks, num_drafts, seen)

        drafter.propose = watched  # type: ignore[method-assign]

    def run(self, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
        outputs = run(self.llm, prompts, params)
        for output in outputs:
            self.check(output)
        return outputs

    def check(self, output: RequestOutput, least: int = 5) -> None:
        """Every first draft is what the layer says when it is run over the whole text at once."""
        text = [*output.prompt_token_ids, *output.token_ids]
        want = self._oracle.draft_logits(text)
        mine = [(start, row) for owner, start, row in self._drafts if owner == output.request_id]
        assert len(mine) >= least
        got = torch.stack([row for _, row in mine])
        torch.testing.assert_close(got, want[[start - 1 for start, _ in mine]], atol=1e-3, rtol=0)


class TestTheLayerSeesEverything:
    """Whatever the engine did, the layer's cache holds what it would after one long prompt."""

    @pytest.mark.parametrize("max_batch_tokens", [64, 27])
    def test_after_prompts_in_chunks(
        self, guessing: Path, oracle: Oracle, max_batch_tokens: int
    ) -> None:
        Watched(guessing, oracle, max_batch_tokens=max_batch_tokens).run(PROMPTS)

    def test_behind_a_shared_prefix(self, guessing: Path, oracle: Oracle) -> None:
        """The record beside a page's last token must not depend on who asked first."""
        watched = Watched(guessing, oracle)
        prompts = [PROMPTS[9][:64] + tail for tail in prompts_of([1, 3, 9, 30], seed=1)]
        watched.run(prompts[:1])
        # All at once: each reads the page while the others do.
        for output in watched.run(prompts):
            assert output.num_cached_tokens == 64

    def test_behind_an_answer_that_was_drafted(self, guessing: Path, oracle: Oracle) -> None:
        """Wherever the answer ended: its last tokens may lie in a page that is not yet sound."""
        watched = Watched(guessing, oracle)
        for length, prompt in enumerate(prompts_of([40] * 9, seed=5), start=13):
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            [first] = run(watched.llm, [prompt], params)
            text = [*prompt, *first.token_ids]
            [second] = watched.run([[*text, 5, 6]])
            assert second.num_cached_tokens >= (len(text) - 4) // 8 * 8

    def test_behind_pages_that_were_on_the_host(self, guessing: Path, oracle: Oracle) -> None:
        watched = Watched(guessing, oracle, max_tokens_in_cache=160, host_cache_tokens=320)
        watched.run([PROMPTS[10]])
        watched.run(prompts_of([120], seed=3))  # takes nearly all of the cache
        [again] = watched.run([PROMPTS[10]])
        assert again.num_cached_tokens == 96

    def test_after_preemption(self, guessing: Path, oracle: Oracle, plain: LLM) -> None:
        watched = Watched(guessing, oracle, max_tokens_in_cache=160)
        prompts = prompts_of([50, 55, 60, 20], seed=2)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = watched.run(prompts, params)
        assert watched.llm.engine.scheduler.num_preemptions > 0
        assert tokens(outputs) == tokens(run(plain, prompts, params))

    def test_when_drafting_begins_late(self, guessing: Path, oracle: Oracle) -> None:
        """Hidden states wait while nobody drafts, and some rows are computed in between."""
        watched = Watched(guessing, oracle)
        length = runner_of(watched.llm).length
        length.most = 0
        stream = watched.llm.stream(PROMPTS[7], SamplingParams(temperature=0, max_tokens=60))
        for _ in range(21):
            next(stream)
        length.most = 2
        *_, last = stream
        assert last.output is not None
        watched.check(last.output)


class TestEnds:
    """An end inside an accepted run cuts exactly where plain decoding stops."""

    def same(self, plain: LLM, drafting: LLM, prompt: Any, params: SamplingParams) -> None:
        [want], [got] = run(plain, [prompt], params), run(drafting, [prompt], params)
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(got, name) == getattr(want, name), name
        updates = list(drafting.stream(prompt, params))
        assert "".join(update.text for update in updates) == want.text
        assert [token for update in updates for token in update.token_ids] == want.token_ids

    def test_stop_tokens(self, plain: LLM, drafting: LLM, expected: list[list[int]]) -> None:
        for place in range(12):
            params = SamplingParams(
                temperature=0, ignore_eos=True, stop_token_ids=[expected[7][place]]
            )
            self.same(plain, drafting, PROMPTS[7], params)

    def test_stop_strings(self, plain: LLM, drafting: LLM) -> None:
        [whole] = run(plain, [PROMPTS[7]], GREEDY)
        assert len(whole.text) > 12
        for start in range(0, len(whole.text) - 3, 2):
            stop = whole.text[start : start + 3]
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop)
            self.same(plain, drafting, PROMPTS[7], params)

    def test_lengths(self, plain: LLM, drafting: LLM) -> None:
        for length in (1, 2, 3, 4, 5, 6, 11):
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            self.same(plain, drafting, PROMPTS[6], params)
            assert run(drafting, [PROMPTS[6]], params)[0].finish_reason == "length"

    def test_the_end_of_the_context(self, plain: LLM, drafting: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        self.same(plain, drafting, PROMPTS[11], params)
        assert len(run(drafting, [PROMPTS[11]], params)[0].token_ids) == 30

    def test_an_abort_gives_everything_back(self, drafting: LLM) -> None:
        before = free_pages(drafting)
        stream = drafting.stream(PROMPTS[8], GREEDY)
        next(stream), next(stream)
        stream.close()
        assert not drafting.engine.has_work
        assert free_pages(drafting) == before


class TestChoices:
    def test_seeded_sampling_gives_the_same_tokens(self, plain: LLM, drafting: LLM) -> None:
        params = [
            SamplingParams(temperature=0.8, top_p=0.9, top_k=9, seed=i, max_tokens=20)
            for i in range(len(PROMPTS))
        ]
        outputs = run(drafting, PROMPTS, params)
        assert tokens(outputs) == tokens(run(plain, PROMPTS, params))
        assert sum(output.num_accepted for output in outputs) > 20

    @pytest.mark.parametrize(
        "change",
        [
            {"repetition_penalty": 1.7},
            {"frequency_penalty": 1.5, "presence_penalty": 0.5},
            {"logit_bias": {7: 4.0, 8: -30.0}},
            {"min_tokens": 9, "stop_token_ids": tuple(range(2, 200))},
            {"regex": "[a-e]{3,9}(x|yy)*z"},
        ],
    )
    def test_processing_sees_the_drafts(
        self, plain: LLM, drafting: LLM, change: dict[str, Any]
    ) -> None:
        if "regex" in change:
            pytest.importorskip("llguidance")
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=5, max_tokens=16, **change)
            # Beside requests that ask for nothing of the kind.
            prompts = PROMPTS[3:9]
            mixed = [params if i % 2 else GREEDY for i in range(len(prompts))]
            assert tokens(run(drafting, prompts, mixed)) == tokens(run(plain, prompts, mixed))

    def test_logprobs(self, plain: LLM, drafting: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2)
        for want, got in zip(
            run(plain, PROMPTS[:8], params), run(drafting, PROMPTS[:8], params), strict=True
        ):
            assert got.logprobs is not None
            assert want.logprobs is not None
            assert [item.token_id for item in got.logprobs] == got.token_ids == want.token_ids
            for a, b in zip(got.logprobs, want.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert list(a.top) == list(b.top)
            assert got.prompt_logprobs is not None
            assert len(got.prompt_logprobs) == len(got.prompt_token_ids)

    def test_rejected_tokens_have_their_own_logprobs(self, drafting: LLM, oracle: Oracle) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=12, logprobs=1)
        for output in run(drafting, PROMPTS[:8], params):
            assert output.logprobs is not None
            text = [*output.prompt_token_ids, *output.token_ids]
            want = oracle.logprobs(text)[len(output.prompt_token_ids) - 1 : -1]
            for item, row in zip(output.logprobs, want, strict=True):
                assert item.logprob == pytest.approx(float(row[item.token_id]), abs=1e-3)


class TestFaults:
    def test_drafts_from_nan_are_refused(self, guessing: Path, expected: list[list[int]]) -> None:
        llm = make_llm(guessing, speculative_num_steps=2)
        with torch.no_grad():
            runner_of(llm)._drafter._mtp._parts["eh_proj"].weight.fill_(float("nan"))
        params = [GREEDY, *[SamplingParams(max_tokens=9)] * 2]
        outputs = run(llm, PROMPTS[6:9], params)
        assert outputs[0].token_ids == expected[6]
        assert sum(output.num_accepted for output in outputs[1:]) <= 2

    def test_nan_logits_end_their_own_request(
        self, guessing: Path, expected: list[list[int]]
    ) -> None:
        llm = make_llm(guessing, speculative_num_steps=2)
        bad = 3
        assert not any(bad in text for text in (*PROMPTS[6:9], *expected[6:9]))
        with torch.no_grad():
            llm.model.model.embed_tokens.weight[bad] = float("nan")
        outputs = llm.generate([*PROMPTS[6:9], [5, bad, 6]], GREEDY, use_tqdm=False)
        assert tokens(outputs[:3]) == expected[6:9]
        assert "NaN" in str(outputs[3].error)

    def test_a_failing_draft_ends_its_own_request(
        self, guessing: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_llm(guessing, speculative_num_steps=2)
        drafter = runner_of(llm)._drafter
        propose = drafter.propose

        def failing(chunks: Any, *args: Any) -> torch.Tensor:
            if any(chunk.request.num_prompt == 40 for chunk in chunks):
                raise RuntimeError("no memory")
            return propose(chunks, *args)

        monkeypatch.setattr(drafter, "propose", failing)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert "no memory" in str(outputs[7].error)
        others = [i for i in range(len(PROMPTS)) if i != 7]
        assert [outputs[i].token_ids for i in others] == [expected[i] for i in others]

    def test_a_step_that_failed_once_comes_again(
        self, guessing: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = make_llm(guessing, speculative_num_steps=3)
        runner, calls = runner_of(llm), iter(range(10**6))
        for name in ("_propose", "_verify", "_choose"):
            whole = getattr(runner, name)

            def failing(*args: Any, whole: Any = whole) -> Any:
                result = whole(*args)
                if next(calls) % 7 == 3:
                    raise RuntimeError("a fault of the moment")
                return result

            monkeypatch.setattr(runner, name, failing)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert next(calls) > 100
        assert max(len(output.token_ids) for output in outputs) > 12
        for output, want in zip(outputs, expected, strict=True):
            assert output.token_ids == want[: len(output.token_ids)]


@pytest.mark.parametrize("cache", ["fp32", "fp8"])
def test_random_traffic(guessing: Path, cache: str) -> None:
    """Arrivals, aborts, a cache too small: answers as alone, and no page is lost."""
    rng = random.Random(4)
    options = {"kv_cache_dtype": cache}
    llm = make_llm(guessing, speculative_num_steps=2, max_tokens_in_cache=240, **options)
    alone = make_llm(guessing, enable_prefix_cache=False, **options)
    before = free_pages(llm)
    prompts = [rng.choice(PROMPTS[4:10])[: rng.randrange(1, 66)] for _ in range(14)]
    params = [
        SamplingParams(temperature=rng.choice([0, 1.0]), seed=i, max_tokens=rng.randrange(1, 40))
        for i in range(len(prompts))
    ]
    want = tokens(run(alone, prompts, params))
    waiting, live, got = list(range(len(prompts))), {}, {}
    for _ in range(400):
        if waiting and rng.random() < 0.4:
            number = waiting.pop()
            live[llm.engine.add(prompts[number], params[number])] = number
        if live and rng.random() < 0.02:
            request_id = rng.choice(list(live))
            output = llm.engine.abort(request_id)
            assert output is not None
            number = live.pop(request_id)
            assert output.token_ids == want[number][: len(output.token_ids)]
        if not llm.engine.has_work:
            continue
        for update in llm.engine.step():
            if update.output is not None:
                got[live.pop(update.request_id)] = update.output.token_ids
    assert not waiting
    assert not live
    assert len(got) >= 8
    assert got == {number: want[number] for number in got}
    assert free_pages(llm) == before


def test_what_cannot_be(guessing: Path, checkpoint: Path) -> None:
    for steps in (-1, 5, True, "3", 1.5):
        with pytest.raises(ConfigError, match="speculative_num_steps"):
            make_llm(guessing, speculative_num_steps=steps)
    with pytest.raises(UnsupportedModelError, match="no MTP layer"):
        make_llm(checkpoint, speculative_num_steps=2)
    output = run(make_llm(checkpoint, speculative_num_steps="auto"), [[3, 4]], GREEDY)[0]
    assert output.acceptance_length is None
