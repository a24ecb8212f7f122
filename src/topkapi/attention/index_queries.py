"""When are index queries quantised, and how?

As in DeepSeek-V3.2's public inference code: e4m3, one ue8m0 scale a (row, head), multiplied into
the head's weight. Scoring e4m3 queries against e4m3 keys then runs on fp8 products. Knows no
caches; the formula of a vector is `reference.quantize_index_key`.
"""

from __future__ import annotations

from typing import cast

import torch

from topkapi.config import BackendOptions
from topkapi.device import device_info
from topkapi.dispatch import Kernel, Op, Problem
from topkapi.kernels import triton as triton_kernels
from topkapi.ops.registry import problem_for
from topkapi.reference.records import quantize_index_key


def quantizes_queries(options: BackendOptions, index_cache: torch.Tensor) -> bool:
    """Whether a layer with this index cache quantises its queries, too.

    `auto` does where keys are fp8 and the device has fp8 products: elsewhere it would lose digits
    and gain nothing. Float keys always take the queries as they are.
    """
    if index_cache.dtype != torch.uint8 or options.index_queries == "full":
        return False
    return options.index_queries == "fp8" or device_info(index_cache.device).multiplies_fp8


def quantize_index_query(
    q: torch.Tensor, weights: torch.Tensor, *, kernel: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q [R, Hi, Di]` fp32, bf16 or fp16 and `weights [R, Hi]` fp32 to e4m3 and fp32 of the same
    shapes, with `relu(q . k) * weights` kept but for q's rounding.

    An inf or NaN spoils its own (row, head) alone. Never synchronises; safe inside capture.
    """
    problem = problem_for(
        "quantize_index_query", q, cache_format="none", num_heads=q.shape[1], index_dim=q.shape[2]
    )
    launch = QUANTIZE_INDEX_QUERY.choose(problem, kernel).launch
    return cast("tuple[torch.Tensor, torch.Tensor]", launch(q, weights))


def _torch_quantize(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantize_index_key(q.reshape(-1, q.shape[-1]))
    return values.view(q.shape), weights * scales.view(weights.shape)


def _take_all(problem: Problem) -> str | None:
    return None


QUANTIZE_INDEX_QUERY = Op(
    "quantize_index_query",
    (
        *(kernel for kernel in triton_kernels.KERNELS if kernel.op == "quantize_index_query"),
        Kernel("torch", "quantize_index_query", _take_all, _torch_quantize),
    ),
)
