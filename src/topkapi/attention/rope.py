"""Rotary position embedding on the step's path: the definition on a host, one launch on a GPU.

Knows nothing about how cos and sin were made (yarn), or what is turned.
"""

from __future__ import annotations

from typing import Literal, cast

import torch

from topkapi import reference
from topkapi.dispatch import Kernel, Op, Problem
from topkapi.errors import ShapeError
from topkapi.kernels import triton as triton_kernels
from topkapi.ops.registry import problem_for


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    style: Literal["half", "interleaved"],
    *,
    kernel: str = "auto",
) -> torch.Tensor:
    """Turn the first P dims of `x [T, D]` or `[T, H, D]` by `cos`, `sin [T, P/2]`.

    See `reference.apply_rope` for the styles and the formula; a kernel may fuse multiply and add.
    The result is contiguous. Never synchronises; safe inside capture. Raises `ShapeError`.
    """
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != x.shape[0]:
        raise ShapeError(
            f"cos and sin: expected [T, P/2] with T={x.shape[0]}, got {list(cos.shape)} and "
            f"{list(sin.shape)}"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ShapeError(
            f"cos: expected at most {x.shape[-1] // 2} angles for vectors of {x.shape[-1]}, got "
            f"{cos.shape[1]}"
        )
    problem = problem_for("apply_rope", x, cache_format="none", rope_dim=2 * cos.shape[1])
    launch = APPLY_ROPE.choose(problem, kernel).launch
    return cast("torch.Tensor", launch(x, cos, sin, style))


def _take_all(problem: Problem) -> str | None:
    return None


APPLY_ROPE = Op(
    "apply_rope",
    (
        *(kernel for kernel in triton_kernels.KERNELS if kernel.op == "apply_rope"),
        Kernel("torch", "apply_rope", _take_all, reference.apply_rope),
    ),
)
