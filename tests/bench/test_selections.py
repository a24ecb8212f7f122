"""Do generated selections share what the demo model's share, and is that measured rightly?"""

from __future__ import annotations

import pytest
import torch

from topkapi.bench.overlap import shared
from topkapi.bench.selections import (
    LIFETIMES,
    SHARED,
    expected_share,
    keeping_probabilities,
    overlapping_positions,
    uniform_positions,
)
from topkapi.errors import ConfigError


def last_lengths(rows: int, context: int) -> torch.Tensor:
    return context - rows + 1 + torch.arange(rows)


def test_overlapping_selections_have_the_measured_statistic() -> None:
    measured = SHARED[0]
    rows, k, visible = 1500, 256, 8192
    context = visible + rows - 1
    generator = torch.Generator().manual_seed(1)
    positions = overlapping_positions(last_lengths(rows, context), k, context, generator)
    assert positions.shape == (rows, k)
    assert (positions[:, 1:] > positions[:, :-1]).all()
    assert 0 <= int(positions.min()) <= int(positions.max()) < visible
    found = shared(last_lengths(rows, context), positions)
    for distance, share in measured.shares.items():
        assert found[distance] == pytest.approx(share, abs=0.035), distance
        assert found[distance] == pytest.approx(expected_share(distance, k, visible), abs=0.02)


def test_the_lifetimes_are_shares_of_one_selection() -> None:
    assert sum(share for share, _ in LIFETIMES) == pytest.approx(1.0)
    keep = keeping_probabilities(100)
    assert (keep == 0).sum() == 29
    assert (keep > 0.99).sum() == 26


@pytest.mark.parametrize(("visible", "k"), [(16, 16), (17, 16), (31, 16), (100, 7)])
def test_tight_contexts_stay_distinct(visible: int, k: int) -> None:
    rows = 50
    context = visible + rows - 1
    generator = torch.Generator().manual_seed(2)
    positions = overlapping_positions(last_lengths(rows, context), k, context, generator)
    assert (positions[:, 1:] > positions[:, :-1]).all()
    assert int(positions.max()) < visible


def test_a_row_that_sees_fewer_than_k_is_refused() -> None:
    with pytest.raises(ConfigError, match="sees 15 tokens, fewer than k"):
        overlapping_positions(last_lengths(5, 19), 16, 19, torch.Generator())


def test_uniform_selections_are_distinct_and_inside() -> None:
    lengths = torch.tensor([3, 16, 17, 200])
    generator = torch.Generator().manual_seed(3)
    positions = uniform_positions(lengths, 16, 200, generator)
    for row, length in zip(positions.tolist(), lengths.tolist(), strict=True):
        kept = [position for position in row if position >= 0]
        assert len(kept) == min(16, length)
        assert row == [*sorted(set(kept)), *[-1] * (16 - len(kept))]
        assert max(kept) < length


def test_shares_are_of_neighbours_of_the_same_request() -> None:
    slots = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, -1, -1], [5, 6, 7, 8]])
    lengths = torch.tensor([10, 11, 12, 13])
    found = shared(lengths, slots)
    assert found[1] == pytest.approx((3 / 4 + 2 / 2 + 0) / 3)
    assert found[2] == pytest.approx((2 / 2 + 0) / 2)
    # Rows 1 and 2 belong to two requests: that pair does not count.
    assert shared(torch.tensor([10, 11, 40, 41]), slots)[1] == pytest.approx((3 / 4 + 0) / 2)
