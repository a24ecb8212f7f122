"""Sampling: the right distribution, filters that keep what they should, whatever the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from topkapi.engine.request import Request, SamplingParams, SamplingRow
from topkapi.engine.sampler import ACCEPT, NOT_FINITE, SampledTokens, Sampler, uniform

VOCABULARY = 37


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def sampling_row(params: SamplingParams, seed: int, index: int) -> SamplingRow:
    request = Request(0, [0], params, seed, max_length=10**6)
    request.token_ids += [0] * index
    return SamplingRow(request)


def sample(logits: torch.Tensor, rows: list[tuple[SamplingParams, int, int]]) -> SampledTokens:
    return Sampler().sample(logits, [sampling_row(*row) for row in rows])


def draw(logits: torch.Tensor, rows: list[tuple[SamplingParams, int, int]]) -> list[int]:
    return sample(logits, rows).token_ids.tolist()


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """How often each token is drawn in `count` draws from one row of logits."""
    tokens = draw(logits.expand(count, -1), [(params, 7, index) for index in range(count)])
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def test_uniform_is_spread_and_repeatable() -> None:
    values = torch.tensor([uniform(seed, index) for seed in range(40) for index in range(100)])
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values, bins=10, min=0, max=1)
    assert (counts - 400).abs().max() < 5 * 19
    assert uniform(3, 5) == uniform(3, 5)
    assert uniform(3, 5) != uniform(5, 3)
    assert uniform(-1, 0) != uniform(1, 0)


def test_greedy_takes_the_lowest_of_equal_best() -> None:
    logits = torch.zeros(2, 9)
    logits[0, [4, 6]] = 2.0
    assert draw(logits, [(SamplingParams(temperature=0), 0, 0)] * 2) == [4, 0]


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, float("-inf")]])
    counts = draws(logits, SamplingParams(temperature=0.8), 4000)
    expected = (logits[0] / 0.8).softmax(-1) * 4000
    chi2 = ((counts - expected)[:4] ** 2 / expected[:4]).sum()
    assert chi2 < 16.3  # 99.9 % of chi-squared with 3 degrees of freedom
    assert counts[4] == 0


@dataclasses.dataclass(frozen=True)
class FilterCase:
    params: SamplingParams
    kept: set[int]


FILTERS = [  # probabilities 0.4 0.3 0.15 0.1 0.05, tokens in this order: 2 0 4 1 3
    FilterCase(SamplingParams(top_k=1), {2}),
    FilterCase(SamplingParams(top_k=3), {2, 0, 4}),
    FilterCase(SamplingParams(top_p=0.39), {2}),
    FilterCase(SamplingParams(top_p=0.41), {2, 0}),
    FilterCase(SamplingParams(top_p=0.86), {2, 0, 4, 1}),
    FilterCase(SamplingParams(min_p=0.3), {2, 0, 4}),
    FilterCase(SamplingParams(min_p=1.0), {2}),
    FilterCase(SamplingParams(top_k=2, top_p=0.5), {2}),  # 0.4 / 0.7 reaches 0.5
    FilterCase(SamplingParams(top_k=4, min_p=0.3), {2, 0, 4}),
]


@pytest.mark.parametrize("case", FILTERS, ids=str)
def test_filters_keep_exactly(case: FilterCase) -> None:
    logits = torch.tensor([[0.3, 0.1, 0.4, 0.05, 0.15]]).log()
    counts = draws(logits, case.params, 600)
    assert {token for token in range(5) if counts[token]} == case.kept


def test_top_k_among_equals_keeps_the_lowest_ids() -> None:
    counts = draws(torch.zeros(1, 8), SamplingParams(top_k=3), 300)
    assert {token for token in range(8) if counts[token]} == {0, 1, 2}


def test_a_row_does_not_depend_on_its_batch() -> None:
    choices = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.9, top_p=0.7, logprobs=2),
        SamplingParams(min_p=0.2),
    ]
    rows = [(choices[i % 5], 100 + i, i) for i in range(23)]
    logits = logits_of(23)
    together = draw(logits, rows)
    assert together == [draw(logits[i : i + 1], rows[i : i + 1])[0] for i in range(23)]
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    shuffled = draw(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_seeds_and_places_differ() -> None:
    logits = torch.zeros(1, 1000).expand(64, -1)
    params = SamplingParams()
    by_index = draw(logits, [(params, 5, index) for index in range(64)])
    by_seed = draw(logits, [(params, seed, 5) for seed in range(64)])
    assert len(set(by_index)) > 50
    assert len(set(by_seed)) > 50


@pytest.mark.parametrize("temperature", [1e-9, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 9.9e3, float("-inf")]])
    counts = draws(logits, SamplingParams(temperature=temperature), 50)
    assert counts[3] == 0
    assert temperature > 1 or counts[0] == 50


def test_nan_spoils_only_its_own_row() -> None:
    logits = logits_of(4)
    rows = [(SamplingParams(temperature=t), i, 0) for i, t in enumerate([0, 1.0, 1.0, 0])]
    clean = draw(logits, rows)
    logits[1, 5] = logits[3, 0] = float("nan")
    assert draw(logits, rows) == [clean[0], NOT_FINITE, clean[2], NOT_FINITE]
    logits[0, 3] = logits[1, 5] = float("inf")
    assert draw(logits, rows) == [NOT_FINITE, NOT_FINITE, clean[2], NOT_FINITE]


def test_logprobs_are_the_models_own() -> None:
    logits = logits_of(3)
    params = [SamplingParams(temperature=2.0, top_k=4, logprobs=n) for n in (0, 3)]
    rows = [(params[0], 1, 0), (params[1], 2, 0), (SamplingParams(), 3, 0)]
    result = sample(logits.half(), rows)
    expected = logits.half().float().log_softmax(-1)
    assert result.logprobs is not None
    torch.testing.assert_close(result.logprobs.chosen, expected[range(3), result.token_ids])
    torch.testing.assert_close(result.logprobs.top, expected.topk(3).values)
    torch.testing.assert_close(expected.gather(1, result.logprobs.top_ids), result.logprobs.top)


def test_more_logprobs_than_tokens() -> None:
    rows = [(SamplingParams(logprobs=100), 1, 0)]
    result = sample(logits_of(1), rows)
    assert result.logprobs is not None
    assert result.logprobs.top_ids.shape == (1, VOCABULARY)


MIXED = [
    SamplingParams(temperature=0, frequency_penalty=1.5),
    SamplingParams(temperature=0.5, logit_bias={3: 5.0, 30: -100.0}),
    SamplingParams(temperature=1.3, top_k=5, repetition_penalty=1.4),
    SamplingParams(temperature=0.9, top_p=0.7, presence_penalty=2),
    SamplingParams(min_p=0.2, min_tokens=200),
    SamplingParams(),
]


def mixed_rows(count: int) -> list[SamplingRow]:
    rows = []
    for i in range(count):
        request = Request(i, [1, 2, 3 + i], MIXED[i % len(MIXED)], 100 + i, max_length=10**6)
        request.token_ids += [(7 * i + j * j) % VOCABULARY for j in range(i)]
        request.end_token_ids = (0, 36)
        rows.append(SamplingRow(request))
    return rows


def with_seed(request: Request, seed: int) -> Request:
    """The same request, prompt and output, under another seed."""
    prompt = request.token_ids[: request.num_prompt]
    other = Request(0, prompt, request.params, seed, max_length=10**6)
    other.token_ids, other.end_token_ids = request.token_ids, request.end_token_ids
    return other


def test_a_row_with_everything_does_not_depend_on_its_batch() -> None:
    rows, logits = mixed_rows(23), logits_of(23)
    untouched = logits.clone()
    sampler = Sampler()
    together = sampler.sample(logits, rows).token_ids.tolist()
    assert torch.equal(logits, untouched)
    alone = [sampler.sample(logits[i : i + 1], rows[i : i + 1]).token_ids for i in range(23)]
    assert torch.cat(alone).tolist() == together
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    shuffled = sampler.sample(logits[order], [rows[i] for i in order]).token_ids
    assert shuffled.tolist() == [together[i] for i in order]


def test_probabilities_are_what_sample_draws_from() -> None:
    rows, sampler = mixed_rows(6), Sampler()
    logits = logits_of(6)
    probabilities = sampler.probabilities(logits, rows)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(6))
    draws = 3000
    for i, row in enumerate(rows):
        request = row.request
        many = [SamplingRow(with_seed(request, seed)) for seed in range(draws)]
        tokens = sampler.sample(logits[i].expand(draws, -1), many).token_ids
        share = torch.bincount(tokens, minlength=VOCABULARY) / draws
        assert (share - probabilities[i]).abs().max() < 5 * 0.5 / draws**0.5
        assert (share[probabilities[i] == 0] == 0).all()
    assert probabilities[0].max() == 1
    assert (probabilities[2] > 0).sum() == 5
    assert probabilities[4, [0, 36]].tolist() == [0, 0]


def test_probabilities_of_a_spoilt_row_are_zero() -> None:
    logits = logits_of(3)
    logits[0, 3] = float("nan")
    logits[1] = float("-inf")
    probabilities = Sampler().probabilities(logits, mixed_rows(3))
    assert probabilities.sum(1).tolist() == pytest.approx([0, 0, 1])


def test_bias_adds_to_logits() -> None:
    logits = torch.zeros(2, 8)
    rows = [(SamplingParams(temperature=0, logit_bias={5: 1.0, 0: -1}), 0, 0)]
    assert draw(logits, [*rows, (SamplingParams(temperature=0), 0, 0)]) == [5, 0]
    counts = draws(torch.zeros(1, 8), SamplingParams(logit_bias={2: -100}), 200)
    assert counts[2] == 0


def test_the_streams_of_uniforms_are_independent() -> None:
    pairs = torch.tensor(
        [(uniform(s, i), uniform(s, i, ACCEPT)) for s in range(30) for i in range(100)],
        dtype=torch.float64,
    )
    assert torch.corrcoef(pairs.T)[0, 1].abs() < 0.07
    assert len(set(pairs.flatten().tolist())) == 6000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_chooses_the_same_without_waiting() -> None:
    rows, logits = mixed_rows(23), logits_of(23)
    expected = Sampler().sample(logits, rows).token_ids
    sampler, on_gpu = Sampler(), logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = sampler.sample(on_gpu, rows)
        again = sampler.sample(on_gpu, rows)
        probabilities = sampler.probabilities(on_gpu, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first.token_ids.tolist() == expected.tolist()
    assert again.token_ids.tolist() == expected.tolist()
    torch.testing.assert_close(probabilities.cpu(), Sampler().probabilities(logits, rows))
