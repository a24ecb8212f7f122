"""AITER's MLA decode over bf16 records, on AMD's gfx942 and gfx950.

NOT RUN: no AMD machine was at hand. What it is given is held by tests with a recorder, to the calls
that the package documents; what it answers was never seen.

Its quirks: one flat list of pages (one token each) for all rows, without -1; where each row begins
in it; an output buffer that a row without pages leaves as it was.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.external.packages import Provider, loaded, provided_by, refuse_package
from topkapi.kernels.external.selected import emptied, flattened

Decode = Callable[..., tuple[torch.Tensor, ...]]


def _aiter() -> Decode:
    function = importlib.import_module("aiter.mla").mla_decode_fwd
    if "return_lse" not in inspect.signature(function).parameters:
        raise ImportError("its mla_decode_fwd does not return the log-sum-exp")
    return function  # type: ignore[no-any-return]


PROVIDERS = (Provider("aiter", ("amd-aiter", "aiter"), _aiter),)


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    v_dim: int = 512,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    phase: str = "decode",
    budget_bytes: int = 256 * 2**20,
    peer: Decode | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. `peer` stands in for the installed package, for tests."""
    peer = peer or loaded(PROVIDERS).call
    rows, heads, width = q.shape
    out = q.new_zeros(rows, heads, v_dim)
    if rows == 0:
        return out, q.new_empty(0, heads, dtype=torch.float32)
    pages, begins = flattened(slots)
    one = torch.ones(rows, dtype=torch.int32, device=q.device)
    answer = peer(
        q.contiguous(),
        kv_cache.view(-1, 1, 1, width),
        out,
        torch.arange(rows + 1, dtype=torch.int32, device=q.device),
        begins,
        pages,
        one,
        1,
        sm_scale=scale,
        logit_cap=logit_cap,
        return_lse=True,
    )
    lse = answer[-1].view(rows, heads).to(torch.float32)
    return emptied(out, lse, begins[1:] == begins[:-1])


def _refuse(problem: Problem) -> str | None:
    if problem.device.backend != "hip" or problem.device.arch not in ("gfx942", "gfx950"):
        return f"needs gfx942 or gfx950, this is {problem.device.label}"
    if problem.dtype != torch.bfloat16 or problem.cache_format != "bf16":
        dtype = str(problem.dtype).removeprefix("torch.")
        return f"takes bf16 queries and bf16 records, got {dtype} and {problem.cache_format}"
    if (problem.latent_dim, problem.rope_dim) != (512, 64):
        return f"takes 512 + 64 dims, got {problem.latent_dim} + {problem.rope_dim}"
    if problem.num_heads not in (16, 128):
        return f"takes 16 or 128 heads, got {problem.num_heads}"
    if problem.features & {"sinks", "logit_cap"}:
        return "has neither attention sinks nor a logit cap"
    if problem.phase != "decode":
        return "is a decode kernel: one query a row, few rows"
    if problem.topk == 0:
        return "needs a selection of at least one entry"
    return refuse_package(PROVIDERS)


AITER = Kernel(
    "aiter",
    "sparse_mla",
    _refuse,
    sparse_mla,
    peer=True,
    provider=provided_by(PROVIDERS),
    note="never run: no AMD machine was at hand",
)
