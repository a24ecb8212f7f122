"""Rotary position embedding in its two styles: the definition.

The main attention of MLA is interleaved; DeepSeek-V3.2's indexer is half-split and turns the FIRST
dims, where the main query has them last. Knows nothing about how cos and sin were made (yarn).
"""

from __future__ import annotations

from typing import Literal

import torch


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    style: Literal["half", "interleaved"],
) -> torch.Tensor:
    """Turn the first P dims of `x [T, D]` or `[T, H, D]`; the others pass through.

    `cos` and `sin` are `[T, P/2]`, one angle a pair. `half` pairs dims (i, i + P/2), `interleaved`
    pairs (2i, 2i + 1); the result keeps the layout and dtype of the input, fp32 (or fp64) inside.
    Raises `ValueError` for another style or when P exceeds D. Capture-safe.
    """
    if style not in ("half", "interleaved"):
        raise ValueError(f"style: expected half or interleaved, got {style!r}")
    pairs = cos.shape[-1]
    if 2 * pairs > x.shape[-1]:
        raise ValueError(f"cos: expected at most {x.shape[-1] // 2} angles, got {pairs}")
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(compute), sin.to(compute)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    turned = x[..., : 2 * pairs].to(compute)
    if style == "half":
        first, second = turned[..., :pairs], turned[..., pairs:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    if style == "half":
        out = torch.cat(rotated, dim=-1)
    else:
        out = torch.stack(rotated, dim=-1).flatten(-2)
    return torch.cat((out.to(x.dtype), x[..., 2 * pairs :]), dim=-1)
