"""Penalties by counts on the device: what a slow loop over the tokens would give, step by step."""

from __future__ import annotations

import gc
import random
from collections import Counter

import pytest
import torch

from topkapi.engine.penalties import Penalties
from topkapi.engine.request import Request, SamplingParams, SamplingRow

VOCABULARY = 33
CHOICES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(presence_penalty=-1.1),
    SamplingParams(repetition_penalty=0.8, frequency_penalty=-0.2, presence_penalty=0.4),
    SamplingParams(),
]


def slow(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """The definition, token by token."""
    params, request = row.request.params, row.request
    output = Counter([*request.output_token_ids, *row.drafts])
    result = logits.clone()
    for token in range(VOCABULARY):
        if token in output or token in request.token_ids[: request.num_prompt]:
            positive = result[token] > 0
            result[token] *= params.repetition_penalty ** (-1 if positive else 1)
        result[token] -= params.frequency_penalty * output[token]
        result[token] -= params.presence_penalty * (token in output)
    return result


def make_request(rng: random.Random, number: int) -> Request:
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]
    return Request(number, prompt, CHOICES[number % len(CHOICES)], 0, max_length=10**6)


def check(penalties: Penalties, rows: list[SamplingRow], seed: int) -> None:
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([slow(*pair) for pair in zip(logits, rows, strict=True)])
    penalties.apply_(logits, rows)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("seed", range(4))
def test_many_steps_of_changing_requests(seed: int) -> None:
    """Requests come and go, skip steps, run twice, and gain several tokens at once."""
    rng = random.Random(seed)
    penalties = Penalties()
    live: list[Request] = []
    for step in range(40):
        if len(live) < 12 and rng.random() < 0.7:
            live.append(make_request(rng, rng.randrange(100)))
        if live and rng.random() < 0.3:
            live.pop(rng.randrange(len(live)))
        chosen = [request for request in live if rng.random() < 0.8]
        if not chosen:
            continue
        rows = []
        for request in rng.sample(chosen, len(chosen)):
            drafts = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 0, 1, 3))))
            rows += [SamplingRow(request, drafts[:j]) for j in range(len(drafts) + 1)]
        check(penalties, rows, seed=step)
        if rng.random() < 0.2:
            check(penalties, rows, seed=step + 1)  # a step that failed comes again
        for request in chosen:
            request.token_ids += rng.choices(range(VOCABULARY), k=rng.choice((0, 1, 1, 3)))


def test_a_slot_is_empty_when_it_is_used_again() -> None:
    penalties = Penalties()
    request = Request(0, [1, 2, 3], CHOICES[3], 0, max_length=99)
    request.token_ids += [4, 4, 5]
    check(penalties, [SamplingRow(request)], seed=0)
    del request
    gc.collect()
    for number in range(3):
        check(penalties, [SamplingRow(Request(number, [9], CHOICES[3], 0, 99))], seed=number)


def test_rows_without_penalties_cost_nothing_and_stay_bit_equal() -> None:
    logits = torch.randn(2, VOCABULARY)
    before = logits.clone()
    penalties = Penalties()
    plain = Request(0, [1], SamplingParams(), 0, max_length=9)
    penalties.apply_(logits, [SamplingRow(plain), SamplingRow(plain)])
    assert torch.equal(logits, before)
    penalised = Request(1, [1], CHOICES[0], 0, max_length=9)
    penalties.apply_(logits, [SamplingRow(plain), SamplingRow(penalised)])
    assert torch.equal(logits[0], before[0])
    assert not torch.equal(logits[1], before[1])


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, 7] = 1.0
    request = Request(0, [1, 7], SamplingParams(repetition_penalty=0.5), 0, max_length=9)
    Penalties().apply_(logits, [SamplingRow(request)])
    assert logits.isneginf().sum() == VOCABULARY - 1
    assert logits[0, 7] == 2.0
