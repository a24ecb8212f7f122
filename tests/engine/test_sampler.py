"""Sampling: the right distribution, filters that keep what they should, whatever the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from topkapi.engine.request import SamplingParams
from topkapi.engine.sampler import SamplingBatch, sample, uniform

CPU = torch.device("cpu")
VOCABULARY = 37


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def draw(logits: torch.Tensor, rows: list[tuple[SamplingParams, int, int]]) -> list[int]:
    return sample(logits, SamplingBatch.build(rows, CPU)).token_ids.tolist()


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
    assert draw(logits, rows) == [clean[0], -1, clean[2], -1]


def test_logprobs_are_the_models_own() -> None:
    logits = logits_of(3)
    params = [SamplingParams(temperature=2.0, top_k=4, logprobs=n) for n in (0, 3)]
    rows = [(params[0], 1, 0), (params[1], 2, 0), (SamplingParams(), 3, 0)]
    result = sample(logits.half(), SamplingBatch.build(rows, CPU))
    expected = logits.half().float().log_softmax(-1)
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    torch.testing.assert_close(result.logprobs, expected[range(3), result.token_ids])
    torch.testing.assert_close(result.top_logprobs, expected.topk(3).values)
    torch.testing.assert_close(expected.gather(1, result.top_ids), result.top_logprobs)


def test_more_logprobs_than_tokens() -> None:
    rows = [(SamplingParams(logprobs=100), 1, 0)]
    result = sample(logits_of(1), SamplingBatch.build(rows, CPU))
    assert result.top_ids is not None
    assert result.top_ids.shape == (1, VOCABULARY)
