"""Scoring and selecting with plain torch."""

from __future__ import annotations

from typing import Literal

import torch

from topkapi import reference
from topkapi.context import Context
from topkapi.dispatch import Kernel, Problem


def _refuse(problem: Problem) -> str | None:
    return "synchronises with the host, so it cannot be captured" if problem.capture else None


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    k: int,
    *,
    output: Literal["slots", "positions"] = "slots",
    budget_bytes: int = 256 * 2**20,
) -> torch.Tensor:
    """See `reference.select`."""
    return reference.select(q, weights, index_cache, context, k, output=output)


INDEXER_LOGITS = Kernel("torch", "indexer_logits", _refuse, reference.indexer_logits)
TOPK = Kernel("torch", "topk", _refuse, reference.topk)
SELECT = Kernel("torch", "select", _refuse, select)
