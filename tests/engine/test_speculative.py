"""Speculation changes how many steps an answer takes, and nothing else about it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import free_pages, make_llm
from engine.drafting import GREEDY, PROMPTS, Oracle, run, runner_of, save_checkpoint, tokens
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams
from topkapi.errors import ConfigError, UnsupportedModelError


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
    told = llm.stats()
    assert told.speculation == stats
    length = told.to_json()["speculation"]["acceptance_length"]
    assert 1 < length == stats.acceptance_length <= 1 + steps
    assert stats.acceptance_length is not None
    assert stats.acceptance_length > 1.3
    stats.note(1, [1])
    assert told.speculation != stats  # as it was when it was asked for


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
