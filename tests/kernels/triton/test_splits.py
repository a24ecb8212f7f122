"""How many programs share a row of the portable attention and of `hopper`."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from topkapi.kernels.triton.sparse_mla_tiles import choose_splits

SMS = 132


def splits(
    rows: int, heads: int, selected: int = 2048, budget: int = 2**28, per_sm: int = 1
) -> int:
    block = min(heads, 64)
    return choose_splits(
        SMS, rows * (heads // block), selected, heads=block, tokens=64,
        bytes_each=4 * rows * heads * 513, budget=budget, per_sm=per_sm,
    )  # fmt: skip


@pytest.mark.parametrize("per_sm", [1, 2])
def test_few_heads_get_one_tile_each_while_every_program_has_an_sm(per_sm: int) -> None:
    assert [splits(rows, 16, per_sm=per_sm) for rows in (1, 2, 4)] == [32, 32, 32]
    assert [splits(1, 16, selected=few, per_sm=per_sm) for few in (100, 128, 255)] == [1, 1, 1]
    assert splits(1, 16, selected=512, per_sm=per_sm) == 8


def test_otherwise_two_tiles_fill_the_device() -> None:
    assert [splits(rows, 16) for rows in (8, 32, 64, 128, 4096)] == [16, 4, 2, 1, 1]
    assert [splits(rows, 16, per_sm=2) for rows in (8, 32, 64, 128, 4096)] == [16, 8, 4, 2, 1]
    assert [splits(rows, 128) for rows in (1, 8, 32, 64)] == [16, 8, 2, 1]


def test_partial_results_stay_within_the_budget() -> None:
    for budget in (0, 10**5, 10**6):
        assert max(1, budget // (4 * 16 * 513)) >= splits(1, 16, budget=budget)
