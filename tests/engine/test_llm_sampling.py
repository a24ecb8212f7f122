"""Sampling choices through `LLM`: what a caller asks for is what comes out, in any batch."""

from __future__ import annotations

import json
import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.conftest import free_pages, make_llm
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams
from topkapi.errors import RequestError

VOCAB = 290
PROMPTS = [
    [random.Random(length).randrange(2, VOCAB) for _ in range(length)] for length in (1, 9, 40, 130)
]


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.mark.usefixtures("idle")
class TestPlain:
    def test_repetition_penalty_equals_transformers(self, llm: LLM, reference: Any) -> None:
        params = SamplingParams(
            temperature=0, repetition_penalty=1.7, max_tokens=12, ignore_eos=True
        )
        for prompt, output in zip(PROMPTS, run(llm, PROMPTS, params), strict=True):
            ids = torch.tensor([prompt])
            expected = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                repetition_penalty=1.7,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert output.token_ids == expected[0, len(prompt) :].tolist()

    def test_penalties_and_bias_in_a_batch_and_alone(self, llm: LLM) -> None:
        choices = [
            SamplingParams(temperature=0, frequency_penalty=2, max_tokens=20, ignore_eos=True),
            SamplingParams(temperature=0, presence_penalty=2, max_tokens=20, ignore_eos=True),
            SamplingParams(temperature=0, logit_bias={7: 100}, max_tokens=20),
            SamplingParams(seed=3, repetition_penalty=1.2, max_tokens=20, min_tokens=20),
        ]
        together = run(llm, [PROMPTS[1]] * 4, choices)
        for output, choice in zip(together, choices, strict=True):
            assert run(llm, [PROMPTS[1]], choice)[0].token_ids == output.token_ids
        assert together[2].token_ids == [7] * 20
        assert len(together[3].token_ids) == 20

    def test_prompt_logprobs_are_the_models(self, llm: LLM, reference: Any) -> None:
        asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
        bare = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        outputs = run(llm, PROMPTS * 2, [asked] * 4 + [bare] * 4)  # 130 tokens: several chunks
        for prompt, output, without in zip(PROMPTS, outputs[:4], outputs[4:], strict=True):
            assert output.token_ids == without.token_ids
            assert without.prompt_logprobs is None
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            with torch.no_grad():
                logprobs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
            assert len(output.prompt_logprobs) == len(prompt)
            for place, item in enumerate(output.prompt_logprobs[1:]):
                row = logprobs[place]
                assert item is not None
                assert item.token_id == prompt[place + 1]
                assert item.logprob == pytest.approx(float(row[item.token_id]), abs=1e-4)
                best = row.topk(2).values.tolist()
                assert list(item.top.values()) == pytest.approx(best, abs=1e-4)

    def test_n_completions_follow_each_other(self, llm: LLM) -> None:
        params = SamplingParams(temperature=1.5, seed=11, n=3, max_tokens=6, ignore_eos=True)
        outputs = run(llm, PROMPTS[:2], params)
        assert [output.prompt_token_ids for output in outputs] == [
            prompt for prompt in PROMPTS[:2] for _ in range(3)
        ]
        assert len({tuple(output.token_ids) for output in outputs[:3]}) == 3
        [single] = run(llm, [PROMPTS[0]], SamplingParams(temperature=1.5, seed=11, max_tokens=6))
        assert single.token_ids == outputs[0].token_ids[: len(single.token_ids)]
        with pytest.raises(RequestError, match="n: "):
            llm.stream(PROMPTS[0], params)

    def test_min_tokens_holds_every_end_back(self, llm: LLM) -> None:
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        [free] = run(llm, [PROMPTS[2]], greedy)
        first, letter = free.token_ids[0], free.text[0]
        for stopping in ({"stop_token_ids": [first]}, {"stop": [letter, letter * 30]}):
            [early] = run(llm, [PROMPTS[2]], SamplingParams(temperature=0, **stopping))
            assert early.finish_reason == "stop"
            least = len(early.token_ids) + 3
            held = SamplingParams(temperature=0, min_tokens=least, max_tokens=12, **stopping)
            [late] = run(llm, [PROMPTS[2]], held)
            assert len(late.token_ids) >= least
            assert first not in late.token_ids[: least - 1] or "stop" in stopping
        eos = SamplingParams(temperature=0, logit_bias={1: 100}, min_tokens=4, max_tokens=9)
        [output] = run(llm, [PROMPTS[2]], eos)
        assert (len(output.token_ids), output.token_ids[-1]) == (5, 1)
        assert output.finish_reason == "stop"

    def test_unknown_tokens_are_refused_alone(self, llm: LLM) -> None:
        bad = [SamplingParams(logit_bias={VOCAB: 1}), SamplingParams(prompt_logprobs=VOCAB + 1)]
        outputs = llm.generate(
            [PROMPTS[0]] * 3, [*bad, SamplingParams(max_tokens=2)], use_tqdm=False
        )
        assert [output.finish_reason == "error" for output in outputs] == [True, True, False]
        assert "logit_bias" in str(outputs[0].error)
        assert "prompt_logprobs" in str(outputs[1].error)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bc"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
# No spaces between the tokens of JSON: a random model would fill the page with them.
TIGHT = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
STRUCTURES: list[dict[str, Any]] = [
    {"json_schema": TIGHT},
    {"regex": r"[a-f]{3}-\d{2}(ß|ü){1,4}"},
    {"grammar": 'root ::= "<" item+ ">"\nitem ::= [a-c] | "日" item?'},
]


def follows(structure: dict[str, Any], text: str) -> bool:
    if "regex" in structure:
        return re.fullmatch(structure["regex"], text) is not None
    if "grammar" in structure:
        return re.fullmatch("<([a-c]|日)+>", text) is not None
    value = json.loads(text)
    assert list(value) == ["name", "size", "kind"]
    return len(value["name"]) <= 8 and 0 <= value["size"] <= 99 and value["kind"] in ("a", "bc")


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
@pytest.mark.usefixtures("idle")
class TestStructured:
    def test_a_mixed_batch_follows_its_structures(self, llm: LLM) -> None:
        params = [
            SamplingParams(temperature=1.1, seed=i, max_tokens=None, **STRUCTURES[i % 3])
            for i in range(12)
        ] + [SamplingParams(temperature=1.1, seed=0, max_tokens=9, ignore_eos=True)]
        outputs = run(llm, [PROMPTS[i % 2] for i in range(13)], params)
        ended = 0
        for i, output in enumerate(outputs[:12]):
            if output.finish_reason == "stop":  # else the context was full
                assert follows(STRUCTURES[i % 3], output.text), output.text
                ended += 1
        assert ended >= 8
        [alone] = run(llm, [PROMPTS[0]], params[12])
        assert alone.token_ids == outputs[12].token_ids
        for i in (0, 1, 5):
            [alone] = run(llm, [PROMPTS[i % 2]], params[i])
            assert alone.token_ids == outputs[i].token_ids

    def test_it_survives_preemption(self, llm: LLM, checkpoint: Path) -> None:
        params = [
            SamplingParams(temperature=1.1, seed=i, frequency_penalty=0.3, regex="([a-f]|ß){30}")
            for i in range(6)
        ]
        expected = run(llm, [PROMPTS[1]] * 6, params)
        tight = make_llm(checkpoint, max_tokens_in_cache=72)
        outputs = run(tight, [PROMPTS[1]] * 6, params)
        assert tight.engine.scheduler.num_preemptions > 0
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert not tight.engine.has_work

    def test_the_end_of_the_grammar_ends_the_request(self, llm: LLM) -> None:
        for ignore_eos in (False, True):
            params = SamplingParams(temperature=0, regex="abc", ignore_eos=ignore_eos)
            [output] = run(llm, ["x"], params)
            assert (output.text, output.finish_reason) == ("abc", "stop")
        [cut] = run(llm, ["x"], SamplingParams(temperature=0, regex="a{50}", max_tokens=3))
        assert cut.finish_reason == "length"
        assert set(cut.text) == {"a"}

    def test_what_cannot_be_followed_is_refused_before_it_runs(self, llm: LLM) -> None:
        bad = SamplingParams(json_schema={"type": "objekt"})
        good = SamplingParams(regex="ab")
        pages = free_pages(llm)
        first, second = llm.generate(["x", "x"], [bad, good], use_tqdm=False)
        assert first.finish_reason == "error"
        assert "objekt" in str(first.error)
        assert second.text == "ab"
        with pytest.raises(RequestError, match="json_schema"):
            llm.stream("x", bad)
        assert free_pages(llm) == pages
