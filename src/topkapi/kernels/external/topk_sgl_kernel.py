"""The top-k of SGLang's kernel package: 2048 of a row, in any order.

INEXACT: ties at the last place are broken by chance, and its buffer of candidates can overflow
where values lie close together. Never chosen by `auto`.
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

K = 2048

# (logits [R, S], out [R, 2048] int32, lengths [R] int32, starts [R] int32 or None); fills `out`.
Call = Callable[..., None]


def _sgl_kernel() -> Call:
    arch = "sm90" if torch.cuda.get_device_capability() == (9, 0) else "sm100"
    load_library("sgl_kernel", f"{arch}/common_ops*.so")
    call: Call = torch.ops.sgl_kernel.fast_topk
    return call


PROVIDERS = (Provider("sgl_kernel", ("sglang-kernel", "sgl-kernel"), _sgl_kernel),)


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
        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        call(rows, out, lengths, None if starts is None else starts.to(torch.int32))

    return topk_in_order(logits, lengths, k, fill)


def _refuse(problem: Problem) -> str | None:
    return refuse_topk(problem, (K,)) or refuse_package(PROVIDERS)


TOPK = Kernel(
    "sgl_kernel",
    "topk",
    _refuse,
    topk,
    peer=True,
    exact=False,
    provider=provided_by(PROVIDERS),
    note="inexact",
)
