"""vLLM's top-k of each row's own range, in any order.

INEXACT: ties at the last place are broken by chance. Never chosen by `auto`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.external.packages import (
    Provider,
    load_library,
    loaded,
    provided_by,
    refuse_package,
)
from topkapi.kernels.external.topk_order import refuse_topk, topk_in_order

# (logits [R, S], begins [R] int32, ends [R] int32, out [R, k] int32, R, strides, k); fills `out`
# with positions relative to `begins`.
Call = Callable[..., None]


def _vllm() -> Call:
    load_library("vllm", "_C_stable_libtorch*.so")
    call: Call = torch.ops._C.top_k_per_row_prefill
    return call


PROVIDERS = (Provider("vllm", ("vllm",), _vllm),)


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    peer: Call | None = None,
) -> torch.Tensor:
    """See `reference.topk`. Never synchronises. `peer` stands in for the package, for tests."""

    def fill(out: torch.Tensor, lengths: torch.Tensor) -> None:
        call = peer or loaded(PROVIDERS).call
        begins = torch.zeros_like(lengths) if starts is None else starts.to(torch.int32)
        call(logits, begins, begins + lengths, out, out.shape[0], *logits.stride(), k)

    return topk_in_order(logits, lengths, k, fill)


def _refuse(problem: Problem) -> str | None:
    return refuse_topk(problem, ()) or refuse_package(PROVIDERS)


TOPK = Kernel(
    "vllm",
    "topk",
    _refuse,
    topk,
    peer=True,
    exact=False,
    provider=provided_by(PROVIDERS),
    note="inexact",
)
