"""`check` binds letters, compares sizes, and says what it expected."""

from __future__ import annotations

import pytest
import torch

from topkapi.errors import ShapeError, TopkapiError
from topkapi.shapes import check


def test_letters_are_bound_at_first_sight_and_compared_afterwards() -> None:
    sizes: dict[str, int] = {}
    check("q", torch.zeros(3, 2, 8), "R H D", sizes)
    assert sizes == {"R": 3, "H": 2, "D": 8}
    check("sinks", torch.zeros(2), "H", sizes)
    message = r"out: expected \[R, H, V\] with R=3, H=2, got shape \[3, 4, 8\] \(H is 4\)"
    with pytest.raises(ShapeError, match=message):
        check("out", torch.zeros(3, 4, 8), "R H V", sizes)


def test_numbers_and_stars() -> None:
    sizes: dict[str, int] = {}
    check("kv", torch.zeros(9, 1, 5), "* 1 *", sizes)
    assert sizes == {}
    with pytest.raises(ShapeError, match=r"kv: expected \[\*, 1, \*\], got shape \[9, 2, 5\]"):
        check("kv", torch.zeros(9, 2, 5), "* 1 *", sizes)


def test_rank_dtype_device_and_kind() -> None:
    with pytest.raises(ShapeError, match=r"x: expected \[A\], got shape \[1, 1\]"):
        check("x", torch.zeros(1, 1), "A", {})
    with pytest.raises(ShapeError, match=r"x: expected dtype int32, int64, got torch\.float32"):
        check("x", torch.zeros(1), "A", {}, dtypes=(torch.int32, torch.int64))
    with pytest.raises(ShapeError, match="x: expected device meta, got cpu"):
        check("x", torch.zeros(1), "A", {}, like=torch.zeros(1, device="meta"))
    with pytest.raises(ShapeError, match=r"x: expected a tensor \[A\], got list"):
        check("x", [1.0], "A", {})  # type: ignore[arg-type]
    assert issubclass(ShapeError, TopkapiError)
    assert issubclass(ShapeError, ValueError)
