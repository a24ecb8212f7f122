"""Index queries to e4m3, their scales folded into the head weights: one small launch a layer.

    scale[r, h] = 2^ceil(log2(max(amax(|q[r, h]|), 1e-4) / 448))
    codes[r, h] = e4m3(q[r, h] / scale[r, h])          weights'[r, h] = weights[r, h] * scale[r, h]

A scale is a power of two, so that folding it in loses nothing: relu(s x) = s relu(x). One program
takes a few of the R * Hi vectors; bits are those of `reference.quantize_index_key`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.e4m3 import encode
from topkapi.kernels.triton.records import largest, power_of_two_scale
from topkapi.kernels.triton.target import refuse_device

# Values that a program of 4 warps takes: 16 for each thread.
_VALUES = 2048


@triton.jit(do_not_specialize=["num_vectors", "row_stride", "head_stride", "weights_stride"])
def _quantize(
    q, weights, codes, scaled, num_vectors, row_stride, head_stride, weights_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    vector = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    there = vector < num_vectors
    row, head = vector // HEADS, vector % HEADS
    dim = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (dim < D)[None, :]
    place = row * row_stride + head * head_stride
    value = tl.load(q + place[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = power_of_two_scale(largest(value, 1, "inf"))  # [BLOCK_V]
    tl.store(codes + vector[:, None] * D + dim[None, :], encode(value / scale[:, None]), mask=mask)
    weight = tl.load(weights + row * weights_stride + head, mask=there, other=0.0)
    tl.store(scaled + vector, weight * scale, mask=there)


def quantize_index_query(
    q: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention.index_queries`. One launch; never synchronises; safe inside capture."""
    rows, heads, index_dim = q.shape
    codes = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    scaled = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    block_d = triton.next_power_of_2(index_dim)
    block_v = max(1, _VALUES // block_d)
    if rows:
        _quantize[(triton.cdiv(rows * heads, block_v),)](
            q, weights, codes, scaled, rows * heads, q.stride(0), q.stride(1), weights.stride(0),
            HEADS=heads, D=index_dim, BLOCK_D=block_d, BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scaled


def _refuse(problem: Problem) -> str | None:
    return refuse_device(problem)


QUANTIZE_INDEX_QUERY = Kernel("triton", "quantize_index_query", _refuse, quantize_index_query)
