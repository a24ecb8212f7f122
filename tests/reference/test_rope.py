"""Both rope styles against multiplication by a complex number, and against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from topkapi import reference


def angles(tokens: int, pairs: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(tokens, pairs, dtype=torch.float64) * 6.28


@pytest.mark.parametrize("rope", [0, 32, 64])
@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_interleaved_turns_pairs_as_complex_numbers(tokens: int, rope: int) -> None:
    angle = angles(tokens, rope // 2)
    x = torch.randn(tokens, 3, 128, dtype=torch.float64)
    got = reference.apply_rope(x, angle.cos(), angle.sin(), "interleaved")
    pairs = torch.view_as_complex(x[..., :rope].reshape(tokens, 3, rope // 2, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None])
    torch.testing.assert_close(got[..., :rope], turned.reshape(tokens, 3, rope))
    assert torch.equal(got[..., rope:], x[..., rope:]), "dims beyond the rope part pass through"


def test_half_is_interleaved_after_reordering() -> None:
    angle = angles(7, 16)
    x = torch.randn(7, 32, dtype=torch.float64)
    order = torch.arange(32).view(2, 16).t().flatten()
    half = reference.apply_rope(x, angle.cos(), angle.sin(), "half")
    interleaved = reference.apply_rope(x[:, order], angle.cos(), angle.sin(), "interleaved")
    assert torch.equal(half[:, order], interleaved)
    assert not torch.allclose(
        half, reference.apply_rope(x, angle.cos(), angle.sin(), "interleaved")
    )


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_scores_depend_on_the_distance_alone(style: Any) -> None:
    frequency = 10000 ** -(torch.arange(32, dtype=torch.float64) / 32)
    angle = torch.arange(20)[:, None] * frequency
    q, k = torch.randn(1, 128, dtype=torch.float64), torch.randn(1, 128, dtype=torch.float64)
    turned_q = reference.apply_rope(q.expand(20, -1), angle.cos(), angle.sin(), style)
    turned_k = reference.apply_rope(k.expand(20, -1), angle.cos(), angle.sin(), style)
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[5:, 5:], scores[:-5, :-5])


def test_dtype_is_kept_and_bad_arguments_are_named() -> None:
    angle = angles(2, 4).float()
    x = torch.randn(2, 8).bfloat16()
    assert reference.apply_rope(x, angle.cos(), angle.sin(), "half").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="style: expected half or interleaved, got 'neox'"):
        reference.apply_rope(x, angle.cos(), angle.sin(), "neox")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 3 angles, got 4"):
        reference.apply_rope(x[:, :6], angle.cos(), angle.sin(), "half")
