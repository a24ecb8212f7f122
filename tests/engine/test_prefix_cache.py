"""Does the prefix cache change what a request costs, and nothing else?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import CONTEXT, TOPK, free_pages, make_llm
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams
from topkapi.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
PAGE = 8


def conversations(count: int, turns: int, seed: int) -> list[list[list[int]]]:
    """Prompts `[conversation][turn]` that begin alike; turns' own tokens come on top of answers."""
    rng = random.Random(seed)
    system = [rng.randrange(2, 290) for _ in range(37)]
    return [
        [
            (system if turn == 0 else []) + [rng.randrange(2, 290) for _ in range(9)]
            for turn in range(turns)
        ]
        for _ in range(count)
    ]


def talk(llm: LLM, talks: list[list[list[int]]]) -> list[RequestOutput]:
    """All turns of all conversations, each turn of all of them together."""
    outputs = []
    said = [list[int]() for _ in talks]
    for turn in range(len(talks[0])):
        prompts = [[*said[i], *talk[turn]] for i, talk in enumerate(talks)]
        answers = llm.generate(prompts, GREEDY, use_tqdm=False)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.error is None
            said[i] = [*prompt, *answer.token_ids]
        outputs += answers
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def without(checkpoint: Path) -> list[list[int]]:
    llm = make_llm(checkpoint, enable_prefix_cache=False)
    outputs = talk(llm, conversations(6, 4, seed=1))
    assert {output.num_cached_tokens for output in outputs} == {0}
    assert llm.stats().cache.hit_rate == 0
    return tokens(outputs)


@pytest.mark.parametrize("cache", [{}, {"kv_cache_dtype": "fp8"}, {"max_tokens_in_cache": 400}])
def test_answers_are_equal_and_turns_start_behind_the_last_answer(
    checkpoint: Path, without: list[list[int]], cache: dict[str, Any]
) -> None:
    llm = make_llm(checkpoint, **cache)
    pages = free_pages(llm)
    outputs = talk(llm, conversations(6, 4, seed=1))
    if "kv_cache_dtype" not in cache:
        assert tokens(outputs) == without
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert max(lengths) > 4 * TOPK
    roomy = "max_tokens_in_cache" not in cache
    for output, length in zip(outputs[6:], lengths[6:], strict=True):
        # All but the newest turn's 9 tokens and the answer's last: whole pages of it.
        expected = (length - 10) // PAGE * PAGE
        assert output.num_cached_tokens == expected if roomy else True
    assert [output.num_cached_tokens for output in outputs[1:6]] == [32] * 5
    stats = llm.stats().cache
    assert stats.found_tokens == sum(output.num_cached_tokens for output in outputs) or not roomy
    assert 0 < stats.hit_rate < 1
    assert (stats.held_pages, free_pages(llm)) == (0, pages)
    assert stats.kept_pages > 0


def test_prompt_logprobs_come_whole_from_a_cached_prompt(llm: LLM) -> None:
    [prompt] = conversations(1, 1, seed=7)[0]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    assert len(second.prompt_logprobs) == len(prompt)
    [bare] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert bare.num_cached_tokens == 40


@pytest.mark.parametrize("cache_format", ["fp32", "fp8"])
def test_conversations_larger_than_the_cache_come_back_from_the_host(
    checkpoint: Path, without: list[list[int]], cache_format: str
) -> None:
    """Six conversations of 90 tokens go through a cache of 184, turn by turn."""
    options = {"max_tokens_in_cache": 184, "kv_cache_dtype": cache_format}
    small = make_llm(checkpoint, **options)
    hosted = make_llm(checkpoint, host_cache_tokens=2000, **options)
    talks = conversations(6, 4, seed=1)
    plain, back = talk(small, talks), talk(hosted, talks)
    assert tokens(plain) == tokens(back)
    if cache_format == "fp32":
        assert tokens(back) == without
    stats = hosted.stats().cache
    assert stats.restored_pages > 20
    assert stats.hit_rate > small.stats().cache.hit_rate + 0.2
    for output in back[6:]:
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 10) // PAGE * PAGE


def test_the_host_keeps_what_its_limit_allows(checkpoint: Path, without: list[list[int]]) -> None:
    llm = make_llm(checkpoint, max_tokens_in_cache=184, host_cache_tokens=100)
    assert tokens(talk(llm, conversations(6, 4, seed=1))) == without
    assert 0 < llm.stats().cache.host_pages <= 13


def test_completions_of_one_prompt_share_it(llm: LLM) -> None:
    [prompt] = conversations(1, 1, seed=11)[0]
    before = llm.stats().cache.found_tokens
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=4)
    outputs = llm.generate([prompt], params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 40, 40, 40]
    assert llm.stats().cache.found_tokens == before + 120


def test_the_host_tier_needs_the_prefix_cache(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_cache"):
        make_llm(checkpoint, enable_prefix_cache=False, host_cache_tokens=10)
    with pytest.raises(ConfigError, match="host_cache_tokens"):
        make_llm(checkpoint, host_cache_tokens=-1)


def test_an_answer_as_long_as_the_context_is_kept(llm: LLM) -> None:
    [prompt] = conversations(1, 1, seed=12)[0]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [whole] = llm.generate([prompt], params, use_tqdm=False)
    everything = [*prompt, *whole.token_ids]
    assert len(everything) == CONTEXT
    [again] = llm.generate([everything[:-1]], params, use_tqdm=False)
    assert again.num_cached_tokens == (CONTEXT - 2) // PAGE * PAGE
    assert again.token_ids == everything[-1:]
