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
from topkapi.kernels.external.topk_order import ascending, refuse_topk

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
    out = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    if out.numel() == 0 or logits.shape[1] == 0:
        return out
    peer = peer or loaded(PROVIDERS).call
    lengths = lengths.to(torch.int32)
    begins = torch.zeros_like(lengths) if starts is None else starts.to(torch.int32)
    peer(logits, begins, begins + lengths, out, out.shape[0], *logits.stride(), k)
    return ascending(out, lengths)


def _refuse(problem: Problem) -> str | None:
    return refuse_topk(problem, ()) or refuse_package(PROVIDERS)


TOPK = Kernel(
    "vllm", "topk", _refuse, topk, peer=True, exact=False, provider=provided_by(PROVIDERS)
)
