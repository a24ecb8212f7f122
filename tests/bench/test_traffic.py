"""Is the traffic the same for the same seed, and does it look as it was asked for?"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

import pytest

from topkapi.bench.traffic import (
    MIXES,
    LengthRange,
    PlannedRequest,
    Traffic,
    plan,
    random_tokens,
    windows_of,
)
from topkapi.errors import ConfigError

TOKENS = random_tokens(500, frozenset({0, 7}))
MANY = Traffic(mix="short-chat", requests=2000, rate=8.0, prefixes=5, prefix_tokens=20, seed=3)


def made(traffic: Traffic, longest: int = 8192) -> list[PlannedRequest]:
    return plan(traffic, TOKENS, longest)


def test_a_seed_says_everything() -> None:
    assert made(MANY) == made(MANY)
    other = made(replace(MANY, seed=4))
    assert [item.prompt for item in other] != [item.prompt for item in made(MANY)]


def test_another_rate_sends_the_same_requests() -> None:
    at_once = made(replace(MANY, rate=math.inf))
    assert {item.arrival for item in at_once} == {0.0}
    assert [replace(item, arrival=0.0) for item in made(MANY)] == at_once
    slower = made(replace(MANY, rate=4.0))
    for fast, slow in zip(made(MANY), slower, strict=True):
        assert slow.arrival == pytest.approx(2 * fast.arrival)


def test_arrivals_are_poisson() -> None:
    times = [item.arrival for item in made(MANY)]
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    # Mean 1/8 s, standard error 1/8/sqrt(2000): five of them are allowed.
    assert mean(gaps) == pytest.approx(1 / 8, rel=5 / math.sqrt(2000))
    assert median(gaps) == pytest.approx(math.log(2) / 8, rel=0.15)
    squares = mean((gap - 1 / 8) ** 2 for gap in gaps)
    assert math.sqrt(squares) == pytest.approx(1 / 8, rel=0.15)


def test_lengths_are_log_uniform() -> None:
    rng = random.Random(0)
    lengths = [LengthRange(32, 511).draw(rng, 1.0) for _ in range(4000)]
    assert min(lengths) == 32
    assert max(lengths) <= 511
    for low in (32, 64, 128, 256):
        share = sum(low <= length < 2 * low for length in lengths) / len(lengths)
        assert share == pytest.approx(1 / 4, abs=0.04)


def test_a_mix_holds_its_shares() -> None:
    planned = made(replace(MANY, mix="mixed", prefixes=0))
    long = [item for item in planned if len(item.prompt) >= 2048]
    assert len(long) / len(planned) == pytest.approx(0.2, abs=0.04)
    for kind in MIXES["mixed"]:
        assert kind.prompt.low <= kind.prompt.high
    assert all(1 <= item.max_tokens <= 128 for item in planned)
    assert all(item.group is None for item in planned)


def test_system_prompts_are_shared_and_differ() -> None:
    groups: dict[int | None, set[tuple[int, ...]]] = {}
    for item in made(MANY):
        groups.setdefault(item.group, set()).add(item.prompt[:20])
    assert set(groups) == {0, 1, 2, 3, 4}
    assert all(len(prompts) == 1 for prompts in groups.values())
    assert len(set.union(*groups.values())) == 5
    assert not {0, 7} & {token for prompts in groups.values() for p in prompts for token in p}


def test_everything_fits_the_model() -> None:
    planned = plan(replace(MANY, mix="long-document", requests=200), TOKENS, 300)
    assert all(len(item.prompt) + item.max_tokens <= 300 for item in planned)
    assert max(len(item.prompt) + item.max_tokens for item in planned) == 300
    with pytest.raises(ConfigError, match="prefix_tokens"):
        made(replace(MANY, prefix_tokens=400), longest=300)


def test_lengths_scale() -> None:
    planned = plan(replace(MANY, mix="long-document", length_scale=1 / 64, prefixes=0), TOKENS, 300)
    assert {len(item.prompt) for item in planned} <= set(range(32, 97))
    assert {item.max_tokens for item in planned} == {1}


def test_windows_go_round() -> None:
    tokens = windows_of([1, 2, 3])(random.Random(0), 7)
    assert len(tokens) == 7
    assert all(after == before % 3 + 1 for before, after in pairwise(tokens))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mix": "spam"}, "short-chat"),
        ({"rate": 0.0}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"requests": 0}, "requests"),
        ({"prefixes": -1}, "prefixes"),
        ({"prefix_tokens": 0}, "prefix_tokens"),
        ({"length_scale": -1.0}, "length_scale"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        replace(MANY, **change)  # type: ignore[arg-type]
