"""FlashInfer's top-k of ragged rows, in any order. It compiles with nvcc at first use.

INEXACT: without its own tie-breaking mode ties are broken by chance. Never chosen by `auto`.
NOT RUN here: the package does not travel to the machine that measurements were made on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.external.packages import Provider, loaded, provided_by, refuse_package
from topkapi.kernels.external.topk_order import refuse_topk, topk_in_order

# (logits [R, S], offsets [R] int32, lengths [R] int32, k) to positions [R, k] int32, -1 pads.
Call = Callable[..., torch.Tensor]


def _flashinfer() -> Call:
    return importlib.import_module("flashinfer.topk").top_k_ragged_transform  # type: ignore[no-any-return]


PROVIDERS = (Provider("flashinfer", ("flashinfer-python", "flashinfer"), _flashinfer),)


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    peer: Call | None = None,
) -> torch.Tensor:
    """See `reference.topk`. `peer` stands in for the package, for tests."""

    def fill(out: torch.Tensor, lengths: torch.Tensor) -> None:
        call = peer or loaded(PROVIDERS).call
        # It selects among columns: where there are fewer than k, it is asked for fewer.
        wanted = min(k, logits.shape[1])
        out[:, :wanted] = call(logits.contiguous(), torch.zeros_like(lengths), lengths, wanted)

    return topk_in_order(logits, lengths, k, fill)


def _refuse(problem: Problem) -> str | None:
    if "starts" in problem.features:
        return "ranks rows from their first column alone"
    if problem.capture:
        return "is not captured in a graph: it may compile and load a kernel at any call"
    return refuse_topk(problem, ()) or refuse_package(PROVIDERS)


TOPK = Kernel(
    "flashinfer",
    "topk",
    _refuse,
    topk,
    peer=True,
    exact=False,
    provider=provided_by(PROVIDERS),
    note="inexact; never run",
)
