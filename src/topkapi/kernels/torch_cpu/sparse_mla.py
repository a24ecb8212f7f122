"""Sparse MLA with plain torch, in blocks of rows so that the gathered latents stay in cache."""

from __future__ import annotations

import torch

from topkapi import reference
from topkapi.dispatch import Kernel, Problem


def _refuse(problem: Problem) -> str | None:
    return None


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    v_dim: int = 512,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    phase: str = "prefill",
    budget_bytes: int = 256 * 2**20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Bounded by `budget_bytes`; safe inside capture."""
    rows, heads, width = q.shape
    row_bytes = 4 * slots.shape[1] * (width + 3 * heads) + 4 * heads * width
    block = max(1, min(rows, budget_bytes // (4 * row_bytes)))
    out = q.new_empty(rows, heads, v_dim)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    for first in range(0, rows, block):
        part = slice(first, first + block)
        out[part], lse[part] = reference.sparse_mla(
            q[part],
            kv_cache,
            slots[part],
            scale=scale,
            v_dim=v_dim,
            sinks=sinks,
            logit_cap=logit_cap,
        )
    return out, lse


SPARSE_MLA = Kernel("torch", "sparse_mla", _refuse, sparse_mla)
