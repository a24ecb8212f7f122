"""`LLM` over a tiny model: a request's answer depends on nothing but itself."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.conftest import CONTEXT, free_pages, make_llm, make_model
from peers.tiny_models import BY_NAME
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams
from topkapi.errors import ConfigError, KernelRefusedError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
VOCAB = 290


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of([1, 7, 8, 9, 16, 17, 40, 63, 65, 100, 130])


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Greedy tokens of `PROMPTS` by Transformers' own generate, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.usefixtures("idle")
class TestAnswers:
    def test_batched_equals_transformers(self, llm: LLM, expected: list[list[int]]) -> None:
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected

    def test_alone_equals_batched(self, llm: LLM, expected: list[list[int]]) -> None:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
        assert tokens(alone) == expected

    def test_streaming_equals_generate(self, llm: LLM) -> None:
        [whole] = llm.generate(["Größe 🙂"], GREEDY, use_tqdm=False)
        updates = list(llm.stream("Größe 🙂", GREEDY))
        assert "".join(update.text for update in updates) == whole.text
        assert [token for update in updates for token in update.token_ids] == whole.token_ids
        assert [update.output is None for update in updates] == [True] * 11 + [False]
        assert updates[-1].finish_reason == "length"
        assert whole.text == llm.tokenizer.decode(whole.token_ids, skip_special_tokens=True)

    def test_streams_interleave(self, llm: LLM, expected: list[list[int]]) -> None:
        streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:4]]
        got: list[list[int]] = [[] for _ in streams]
        for _ in range(12):
            for answer, stream in zip(got, streams, strict=True):
                answer += next(stream).token_ids
        assert tokens(llm.generate(PROMPTS[4:6], GREEDY, use_tqdm=False)) == expected[4:6]
        assert all(next(stream, None) is None for stream in streams)
        assert got == expected[:4]

    def test_a_closed_stream_frees_its_request(self, llm: LLM) -> None:
        stream = llm.stream(PROMPTS[3], GREEDY)
        next(stream)
        assert llm.engine.has_work
        stream.close()

    def test_seeds_do_not_depend_on_the_batch(self, llm: LLM) -> None:
        params = [
            SamplingParams(temperature=1.2, top_p=0.9, max_tokens=9, seed=i, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        together = tokens(llm.generate(PROMPTS, params, use_tqdm=False))
        alone = [
            llm.generate([prompt], choice, use_tqdm=False)[0]
            for prompt, choice in zip(PROMPTS, params, strict=True)
        ]
        assert tokens(alone) == together
        same = llm.generate([PROMPTS[5]] * 6, SamplingParams(seed=3), use_tqdm=False)
        assert len({tuple(output.token_ids) for output in same}) == 1
        free = llm.generate([PROMPTS[5]] * 6, SamplingParams(), use_tqdm=False)
        assert len({tuple(output.token_ids) for output in free}) > 1

    def test_logprobs_are_the_models(self, llm: LLM, checkpoint: Path) -> None:
        params = SamplingParams(temperature=0.7, seed=1, logprobs=3, max_tokens=5, ignore_eos=True)
        output, bare = llm.generate([PROMPTS[4]] * 2, [params, GREEDY], use_tqdm=False)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        ids = torch.tensor([[*PROMPTS[4], *output.token_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(PROMPTS[4]) - 1 : -1].log_softmax(-1)
        assert bare.logprobs is None
        assert output.logprobs is not None
        assert [item.token_id for item in output.logprobs] == output.token_ids
        for item, row in zip(output.logprobs, logprobs, strict=True):
            assert item.logprob == pytest.approx(float(row[item.token_id]), abs=1e-4)
            assert list(item.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)

    def test_chat(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "the question"}]
        [answer] = llm.chat(messages, GREEDY, use_tqdm=False)
        text = "<user>the question<assistant>"
        assert answer.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
        both = llm.chat([messages, messages], GREEDY, use_tqdm=False)
        assert tokens(both) == [answer.token_ids] * 2
        bad = [{"role": "wizard", "content": "?"}]
        wrong, empty, fine = llm.chat([bad, [], messages], GREEDY, use_tqdm=False)
        assert "template" in str(wrong.error)
        assert "empty" in str(empty.error)
        assert fine.token_ids == answer.token_ids
        assert llm.chat([], GREEDY) == []


@pytest.mark.usefixtures("idle")
class TestEnds:
    def test_stop_strings_cut_the_text(self, llm: LLM) -> None:
        [whole] = llm.generate([PROMPTS[6]], GREEDY, use_tqdm=False)
        for start in range(0, len(whole.text) - 3):
            stop = whole.text[start : start + 3]
            place = whole.text.find(stop)
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
            [cut] = llm.generate([PROMPTS[6]], params, use_tqdm=False)
            assert (cut.text, cut.finish_reason, cut.stop_reason) == (
                whole.text[:place],
                "stop",
                stop,
            )
            assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
            streamed = "".join(update.text for update in llm.stream(PROMPTS[6], params))
            assert streamed == cut.text

    def test_stop_tokens_end_and_stay_out_of_the_text(self, llm: LLM) -> None:
        [whole] = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
        stop = whole.token_ids[4]
        place = whole.token_ids.index(stop)
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]
        )
        [cut] = llm.generate([PROMPTS[2]], params, use_tqdm=False)
        assert cut.token_ids == whole.token_ids[: place + 1]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert cut.text == llm.tokenizer.decode(cut.token_ids[:-1])

    def test_the_models_end_token_unless_ignored(self, checkpoint: Path) -> None:
        model = make_model(VOCAB)
        with torch.no_grad():  # every logit of the end token is far above the others
            model.model.norm.weight.zero_()
            model.lm_head.weight.zero_()
        model.generation_config.eos_token_id = [0, 5]
        ours = LLM(model, page_size=8, max_tokens_in_cache=64)
        greedy = SamplingParams(temperature=0, max_tokens=4)
        ended, goes_on = ours.generate([[3, 4], [3, 4]], [greedy, GREEDY], use_tqdm=False)
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([0], "stop", None)
        assert goes_on.token_ids == [0] * 12

    def test_the_context_bounds_the_answer(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        longest = prompts_of([CONTEXT - 1, CONTEXT - 9])
        outputs = llm.generate(longest, params, use_tqdm=False)
        assert [len(output.token_ids) for output in outputs] == [1, 9]
        assert [output.finish_reason for output in outputs] == ["length", "length"]

    def test_progress_goes_to_stderr(self, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        llm.generate(PROMPTS[:2], GREEDY)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "2/2" in captured.err


BAD: list[tuple[Any, SamplingParams, str]] = [
    ("", GREEDY, "empty"),
    ([], GREEDY, "empty"),
    ([VOCAB], GREEDY, "unknown token id"),
    ([3, -1], GREEDY, "unknown token id"),
    ([3, "a"], GREEDY, "token ids"),
    ([3] * CONTEXT, GREEDY, "159"),
    ("\ud800", GREEDY, "tokenizer"),
    ([3], SamplingParams(top_k=VOCAB + 1), "top_k"),
    ([3], SamplingParams(logprobs=VOCAB + 1), "logprobs"),
    ([3], SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
]


@pytest.mark.usefixtures("idle")
class TestErrors:
    def test_bad_requests_get_an_error_and_the_others_finish(
        self, llm: LLM, expected: list[list[int]]
    ) -> None:
        wanted: list[Any] = []
        params = []
        for i, (prompt, choice, _) in enumerate(BAD):
            wanted += [PROMPTS[i], prompt]
            params += [GREEDY, choice]
        outputs = llm.generate(wanted, params, use_tqdm=False)
        assert tokens(outputs[::2]) == expected[: len(BAD)]
        for output, (_, _, word) in zip(outputs[1::2], BAD, strict=True):
            assert output.finish_reason == "error"
            assert isinstance(output.error, RequestError)
            assert word in str(output.error)
        assert len({output.request_id for output in outputs}) == len(outputs)

    @pytest.mark.parametrize(("prompt", "params", "word"), BAD)
    def test_a_bad_stream_raises_at_once(
        self, llm: LLM, prompt: Any, params: SamplingParams, word: str
    ) -> None:
        with pytest.raises(RequestError, match=word):
            llm.stream(prompt, params)

    def test_a_wrong_call_is_a_config_error(self, llm: LLM) -> None:
        with pytest.raises(ConfigError, match="list of 2"):
            llm.generate(PROMPTS[:2], [GREEDY])
        with pytest.raises(ConfigError, match="sampling_params"):
            llm.generate(PROMPTS[:1], [{"top_k": 1}])  # type: ignore[list-item]
        assert llm.generate([], GREEDY) == []

    def test_an_interrupted_call_leaves_nothing_behind(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step, calls = llm.engine.step, []

        def interrupted() -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    def test_a_failed_step_harms_no_other_request(
        self, llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step is lost at every place of an answer; the stream beside it does not notice."""
        runner = llm.engine._runner
        run = runner.run

        def refuse(batch: Any) -> Any:
            raise KernelRefusedError("not now")

        stream, got = llm.stream(PROMPTS[2], GREEDY), []
        for _ in range(12):
            with monkeypatch.context() as patch:
                patch.setattr(runner, "run", refuse)
                with pytest.raises(KernelRefusedError):
                    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
            assert runner.run == run
            got += next(stream).token_ids
        assert next(stream, None) is None
        assert got == expected[2]


@pytest.mark.parametrize("name", ["deepseek_v32_yarn", "glm_full", "glm_shared", "axk2"])
def test_every_family_equals_transformers(name: str) -> None:
    model = BY_NAME[name].build()
    with torch.no_grad():
        # Padding's embedding is 0, so that all of its indexer scores tie; the models generate it.
        model.model.embed_tokens.weight[0] = model.model.embed_tokens.weight[3:6].mean(0)
    theirs = copy.deepcopy(model)
    prompts = [[id_ % 90 + 3 for id_ in prompt] for prompt in PROMPTS[3:8]]
    outputs = LLM(model, page_size=8, max_batch_tokens=64).generate(prompts, GREEDY, use_tqdm=False)
    for prompt, answer in zip(prompts, tokens(outputs), strict=True):
        whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert whole[0, len(prompt) :].tolist() == answer


class TestCache:
    @pytest.mark.parametrize("budget", [8, 9, 30, 64, 500])
    def test_chunks_of_any_size_give_the_same(
        self, checkpoint: Path, expected: list[list[int]], budget: int
    ) -> None:
        chunked = make_llm(checkpoint, max_batch_tokens=budget)
        assert tokens(chunked.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected

    @pytest.mark.parametrize("capacity", [144, 160, 200])
    def test_pressure_preempts_and_loses_nothing(
        self, checkpoint: Path, expected: list[list[int]], capacity: int
    ) -> None:
        tight = make_llm(checkpoint, max_tokens_in_cache=capacity)
        before = free_pages(tight)
        order = random.Random(capacity).sample(range(len(PROMPTS)), len(PROMPTS))
        outputs = tight.generate([PROMPTS[i] for i in order], GREEDY, use_tqdm=False)
        assert tokens(outputs) == [expected[i] for i in order]
        assert free_pages(tight) == before == capacity // 8

    def test_preemption_changes_no_sampled_token(self, checkpoint: Path, llm: LLM) -> None:
        tight = make_llm(checkpoint, max_tokens_in_cache=80)
        prompts = prompts_of([9, 10, 11, 12, 13, 14], seed=5)
        params = [SamplingParams(max_tokens=50, seed=i, ignore_eos=True) for i in range(6)]
        got = tokens(tight.generate(prompts, params, use_tqdm=False))
        assert tight.engine.scheduler.num_preemptions > 0
        assert got == tokens(llm.generate(prompts, params, use_tqdm=False))

    def test_a_prompt_larger_than_the_cache_is_an_error(self, checkpoint: Path) -> None:
        tight = make_llm(checkpoint, max_tokens_in_cache=30)
        assert tight.max_length == 32
        big, small = tight.generate([[3] * 32, [3] * 31], GREEDY, use_tqdm=False)
        assert "at most 31" in str(big.error)
        assert (len(small.token_ids), small.finish_reason) == (1, "length")

    @pytest.mark.parametrize("seed", range(3))
    def test_random_arrivals(self, checkpoint: Path, expected: list[list[int]], seed: int) -> None:
        """Requests come and go between steps, some are aborted."""
        rng = random.Random(seed)
        engine = make_llm(checkpoint, max_tokens_in_cache=240, max_running_requests=4).engine
        before = engine.scheduler.free_pages
        arriving = [rng.randrange(len(PROMPTS)) for _ in range(14)]
        prompt_of: dict[int, int] = {}
        finished: dict[int, list[int]] = {}
        while arriving or engine.has_work:
            while arriving and rng.random() < 0.3:
                prompt = arriving.pop()
                prompt_of[engine.add(PROMPTS[prompt], GREEDY)] = prompt
            if prompt_of and rng.random() < 0.02:
                aborted = engine.abort(rng.choice(list(prompt_of)))
                assert aborted is None or aborted.finish_reason == "abort"
            for update in engine.step():
                if update.output is not None:
                    finished[update.request_id] = update.output.token_ids
        assert len(finished) > 10
        for request_id, got in finished.items():
            assert got == expected[prompt_of[request_id]]
        assert engine.scheduler.free_pages == before

    @pytest.mark.parametrize("cache", ["bf16", "fp16", "fp8"])
    def test_cache_formats_run(self, checkpoint: Path, cache: str) -> None:
        ours = make_llm(checkpoint, kv_cache_dtype=cache)
        outputs = ours.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert all(len(answer) == 12 for answer in tokens(outputs))

    def test_options_are_checked(self, checkpoint: Path) -> None:
        for options in (
            {"max_tokens_in_cache": 0},
            {"memory_fraction": 0.0},
            {"max_context_len": 1},
            {"kv_cache_dtype": "int3"},
            {"max_batch_tokens": 2},
            {"page_size": 0},
            {"selection_stats_every": -1},
        ):
            with pytest.raises(ConfigError, match=next(iter(options))):
                make_llm(checkpoint, **options)

    def test_no_running_requests_are_no_lack_of_memory(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match="max_running_requests: expected at least 1"):
            make_llm(checkpoint, max_running_requests=0)

    def test_a_shorter_context_by_option(self, checkpoint: Path) -> None:
        ours = make_llm(checkpoint, max_context_len=20)
        [output] = ours.generate([[3] * 15], GREEDY, use_tqdm=False)
        assert len(output.token_ids) == 5
