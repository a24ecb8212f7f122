"""What `attention.rope` refuses; its formula is `tests/reference/test_rope.py`'s."""

from __future__ import annotations

import pytest
import torch

from topkapi import reference
from topkapi.attention.rope import apply_rope
from topkapi.errors import ShapeError


def test_it_is_the_definition_on_a_host() -> None:
    x, angles = torch.randn(5, 3, 24), torch.randn(5, 6)
    got = apply_rope(x, angles.cos(), angles.sin(), "half")
    assert torch.equal(got, reference.apply_rope(x, angles.cos(), angles.sin(), "half"))


@pytest.mark.parametrize(
    ("cos", "sin", "message"),
    [
        ((5, 6), (5, 5), r"got \[5, 6\] and \[5, 5\]"),
        ((4, 6), (4, 6), r"expected \[T, P/2\] with T=5"),
        ((5, 13), (5, 13), "expected at most 12 angles for vectors of 24, got 13"),
    ],
)
def test_wrong_angles_are_named(cos: tuple[int, int], sin: tuple[int, int], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        apply_rope(torch.zeros(5, 3, 24), torch.zeros(cos), torch.zeros(sin), "interleaved")
