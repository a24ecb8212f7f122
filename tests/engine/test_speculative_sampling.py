"""Tokens sampled with drafts have the distribution of tokens sampled without: chi-square, through
the whole engine, over every outcome of three tokens of a tiny vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafting import Oracle, save_checkpoint
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams

VOCAB = 6
PROMPT = [2, 3, 5, 4, 2, 2, 5, 3]
LENGTH = 3
DRAWS = 2400


@dataclass(frozen=True)
class Case:
    name: str
    temperature: float = 1.0
    steps: int = 2
    filters: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("one", temperature=3.0, steps=1),
    Case("biased", temperature=2.0, steps=2, filters={"logit_bias": {2: 1.5, 3: -1.0}}),
    Case("filtered", temperature=2.0, steps=3, filters={"top_k": 4, "top_p": 0.9}),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-vocabulary")
    return save_checkpoint(path, guesses=True, vocab_size=VOCAB, influence=0.5)


@pytest.fixture(scope="module")
def outcomes(tiny: Path) -> dict[tuple[int, ...], torch.Tensor]:
    """The model's log-probabilities after the prompt and each text of up to two tokens."""
    oracle = Oracle(tiny)
    texts = [text for size in range(LENGTH) for text in product(range(VOCAB), repeat=size)]
    return {text: oracle.logprobs([*PROMPT, *text])[-1].double() for text in texts}


def probabilities(
    outcomes: dict[tuple[int, ...], torch.Tensor], case: Case
) -> dict[tuple[int, ...], float]:
    """Of every text of three tokens, written out from the definition of each filter."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        chances = {
            (*text, token): chance * share
            for text, chance in chances.items()
            for token, share in enumerate(filtered(outcomes[text], case))
        }
    return chances


def filtered(logprobs: torch.Tensor, case: Case) -> list[float]:
    logits = logprobs.clone()
    for token, bias in case.filters.get("logit_bias", {}).items():
        logits[token] += bias
    shares = (logits / case.temperature).softmax(-1)
    order = shares.argsort(descending=True, stable=True).tolist()
    kept = order[: case.filters.get("top_k", VOCAB)]
    total, running, chosen = sum(float(shares[t]) for t in kept), 0.0, []
    for token in kept:
        if running < case.filters.get("top_p", 1.0) * total:
            chosen.append(token)
        running += float(shares[token])
    total = sum(float(shares[t]) for t in chosen)
    return [float(shares[t]) / total if t in chosen else 0.0 for t in range(VOCAB)]


def chi_square(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """How many standard deviations above its mean the statistic is (Wilson and Hilferty 1931).

    Outcomes expected fewer than 5 times are taken together; impossible ones must not happen.
    """
    total = sum(counts.values())
    assert all(chances[text] > 0 for text in counts)
    cells, rest = [], [0.0, 0.0]
    for text, chance in chances.items():
        if chance * total >= 5:
            cells.append((counts[text], chance * total))
        else:
            rest = [rest[0] + counts[text], rest[1] + chance * total]
    if rest[1] >= 5:
        cells.append((rest[0], rest[1]))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def drawn(llm: LLM, case: Case) -> Counter[tuple[int, ...]]:
    params = [
        SamplingParams(
            temperature=case.temperature, max_tokens=LENGTH, ignore_eos=True, **case.filters
        )
    ] * DRAWS
    outputs = llm.generate([PROMPT] * DRAWS, params, use_tqdm=False)
    return Counter(tuple(output.token_ids) for output in outputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_distribution_is_the_models(
    tiny: Path,
    outcomes: dict[tuple[int, ...], torch.Tensor],
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The engine draws a seed for a request that has none: the test must not depend on luck.
    seeds = iter(range(10**6))
    monkeypatch.setattr("secrets.randbits", lambda _: next(seeds))
    llm = LLM(
        tiny,
        device="cpu",
        dtype="fp32",
        page_size=8,
        max_tokens_in_cache=4096,
        max_running_requests=128,
        speculative_num_steps=case.steps,
        backend_options=BackendOptions(),
    )
    counts = drawn(llm, case)
    assert chi_square(counts, probabilities(outcomes, case)) < 3.5
    stats = llm.engine._runner.stats
    # Both branches have been taken often, in the first place and after an accepted draft.
    assert 0.2 < stats.accepted_at[0] / stats.num_rounds < 0.99
    # The statistic sees a difference as small as this.
    other = Case("", case.temperature * 1.2, case.steps, case.filters)
    assert chi_square(counts, probabilities(outcomes, other)) > 3.5
