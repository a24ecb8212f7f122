"""Rotary position embedding of the first P dims, in both styles: one launch for any layout of x.

    out[a] = x[a] cos[i] - x[b] sin[i]
    out[b] = x[b] cos[i] + x[a] sin[i]       i < P/2;  half: a, b = i, i + P/2
    out[P:] = x[P:]                                    interleaved: a, b = 2 i, 2 i + 1

One program takes a few of the T * H vectors, which may lie anywhere in a projection's output; the
result is contiguous. fp32 inside, as `reference.apply_rope`, but for fused multiply-adds.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.target import refuse_device

# Values that a program of 4 warps takes.
_VALUES = 2048


@triton.jit(do_not_specialize=["num_vectors", "row_stride", "head_stride", "cos_stride",
                               "sin_stride"])  # fmt: skip
def _turn(
    x, cos, sin, out, num_vectors, row_stride, head_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    vector = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    there = vector < num_vectors
    row, head = vector // HEADS, vector % HEADS
    source = x + (row * row_stride + head * head_stride)[:, None]
    target = out + (vector * D)[:, None]
    element: tl.constexpr = out.dtype.element_ty
    pair = tl.arange(0, BLOCK_P)
    mask = there[:, None] & (pair < PAIRS)[None, :]
    step: tl.constexpr = 1 if HALF else 2
    apart: tl.constexpr = PAIRS if HALF else 1
    place = (pair * step)[None, :]
    first = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + place + apart, mask=mask, other=0.0).to(tl.float32)
    angle = row[:, None]
    c = tl.load(cos + angle * cos_stride + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle * sin_stride + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + place, (first * c - second * s).to(element), mask=mask)
    tl.store(target + place + apart, (second * c + first * s).to(element), mask=mask)
    if D > 2 * PAIRS:
        dim = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        kept = there[:, None] & (dim < D)[None, :]
        rest = tl.load(source + dim[None, :], mask=kept, other=0.0)
        tl.store(target + dim[None, :], rest, mask=kept)


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    style: Literal["half", "interleaved"],
) -> torch.Tensor:
    """See `reference.apply_rope`. One launch; never synchronises; safe inside capture."""
    size, pairs = x.shape[-1], cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos = cos if cos.stride(-1) == 1 else cos.contiguous()
    sin = sin if sin.stride(-1) == 1 else sin.contiguous()
    heads = x.shape[1] if x.dim() == 3 else 1
    vectors = x.shape[0] * heads
    block_v = max(1, _VALUES // triton.next_power_of_2(max(size, 1)))
    if vectors:
        _turn[(triton.cdiv(vectors, block_v),)](
            x, cos, sin, out, vectors, x.stride(0), x.stride(1) if x.dim() == 3 else 0,
            cos.stride(0), sin.stride(0),
            HEADS=heads, D=size, PAIRS=pairs, HALF=style == "half", BLOCK_V=block_v,
            BLOCK_P=triton.next_power_of_2(max(pairs, 1)),
            BLOCK_REST=triton.next_power_of_2(max(size - 2 * pairs, 1)), num_warps=4,
        )  # fmt: skip
    return out


def _refuse(problem: Problem) -> str | None:
    reason = refuse_device(problem)
    if reason is None and problem.dtype == torch.float64:
        return "computes in fp32, and x is fp64"
    return reason


APPLY_ROPE = Kernel("triton", "apply_rope", _refuse, apply_rope)
