"""The number of drafts follows what was measured, and settles."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from topkapi.engine.draft_length import TRIAL_STEPS, DraftLength


def simulate(
    length: DraftLength,
    rate: dict[int, float],
    steps: int,
    *,
    batch_size: int = 4,
    noise: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Steps of `1 + drafts / 2` tokens a request that take as long as `rate` says."""
    rng, used = random.Random(seed), []
    for _ in range(steps):
        drafts = length.drafts(batch_size)
        used.append(drafts)
        tokens = (1 + drafts / 2) * batch_size
        seconds = tokens / batch_size / rate[drafts] * (1 + noise * rng.uniform(-1, 1))
        length.note(batch_size, drafts, round(tokens), seconds)
    return used


def share(used: list[int], drafts: int) -> float:
    return used.count(drafts) / len(used)


@pytest.mark.parametrize(
    ("rate", "best"),
    [
        ({0: 100, 1: 80, 2: 70, 3: 60, 4: 50}, 0),
        ({0: 100, 1: 130, 2: 120, 3: 100, 4: 90}, 1),
        ({0: 100, 1: 120, 2: 140, 3: 160, 4: 180}, 4),
        ({0: 100, 1: 110, 2: 140, 3: 120, 4: 90}, 2),
    ],
)
def test_it_settles_on_the_best_and_tries_others_less_and_less(
    rate: dict[int, float], best: int
) -> None:
    length = DraftLength(4, adapts=True)
    # Enough tokens a step that rounding them is no noise.
    simulate(length, rate, 400, batch_size=64)
    used = simulate(length, rate, 2000, batch_size=64)
    assert share(used, best) > 0.93


def test_noise_does_not_move_it() -> None:
    length = DraftLength(4, adapts=True)
    rate = dict.fromkeys(range(5), 100.0)
    used = simulate(length, rate, 4000, batch_size=64, noise=0.05)
    moves = sum(a != b for a, b in pairwise(used))
    assert share(used, 1) > 0.9
    assert moves < 100


def test_it_turns_off_and_on_again() -> None:
    length = DraftLength(4, adapts=True)
    bad, good = {0: 100, 1: 60, 2: 50, 3: 40, 4: 30}, {0: 100, 1: 150, 2: 200, 3: 150, 4: 100}
    assert share(simulate(length, bad, 300, batch_size=64)[100:], 0) > 0.8
    assert share(simulate(length, good, 3000, batch_size=64)[2000:], 2) > 0.9
    assert share(simulate(length, bad, 3000, batch_size=64)[2000:], 0) > 0.9


def test_sizes_of_batches_are_apart() -> None:
    length = DraftLength(4, adapts=True)
    for _ in range(40):
        simulate(length, {0: 100, 1: 150, 2: 200, 3: 150, 4: 100}, 20, batch_size=2)
        simulate(length, {0: 100, 1: 60, 2: 50, 3: 40, 4: 30}, 20, batch_size=64)
    assert length.drafts(2) >= 1
    assert share(simulate(length, {0: 100, 1: 60}, TRIAL_STEPS, batch_size=64), 0) > 0.8


def test_a_fixed_number_stays() -> None:
    length = DraftLength(3, adapts=False)
    assert set(simulate(length, {3: 1.0}, 50)) == {3}
