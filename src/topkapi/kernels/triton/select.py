"""Scoring and selecting in one call, without ever holding `[R, S]`.

    select = topk(indexer_logits), mapped to slots

Rows are taken in blocks whose logits fit the memory budget: each block is scored into one buffer
that all blocks share, and selected from it while it is still warm in the second-level cache; slots
are looked up as the selection is written. Memory is the budget plus `[R, k]`, for any context.
Rows whose context is not longer than k are never scored.
"""

from __future__ import annotations

from typing import Literal

import torch

from topkapi.context import Context
from topkapi.device import DeviceInfo
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.indexer_logits import launch_scores, refuse_scoring
from topkapi.kernels.triton.target import target_of
from topkapi.kernels.triton.topk import (
    WORKSPACE_BYTES,
    choose_plan,
    launch_topk,
    refuse_topk,
    workspace_bytes,
)

# Logits rows start at a multiple of this many elements, so that they are read 16 bytes at a time.
ALIGNMENT = 64


def choose_block_rows(device: DeviceInfo, rows: int, width: int, k: int, budget_bytes: int) -> int:
    """How many rows are scored at a time: what the budget holds, in equal blocks of at least one.

    The selection's own workspace comes out of the same budget.
    """

    def needed(block: int) -> int:
        plans = (choose_plan(device, n, width, k) for n in (block, rows % block or block))
        return 4 * width * block + max(workspace_bytes(plan, width) for plan in plans)

    room = max(budget_bytes - WORKSPACE_BYTES, budget_bytes // 2)
    most = max(1, min(rows, room // (4 * width)))
    even = -(-rows // -(-rows // most))
    block = min(most, -(-even // 128) * 128)
    while budget_bytes < 2 * WORKSPACE_BYTES and block > 1 and needed(block) > budget_bytes:
        block = -(-block // 2)
    return block


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
    """See `reference.select`. Never synchronises; safe inside capture.

    Temporaries within `budget_bytes`, or what a single row needs if that is more.
    """
    rows = q.shape[0]
    out = torch.empty(rows, k, dtype=torch.int32, device=q.device)
    if rows == 0:
        return out
    q, weights = q.contiguous(), weights.contiguous()
    width = max(1, -(-context.max_length // ALIGNMENT)) * ALIGNMENT
    scored = context.max_length > k
    block = rows
    if scored:
        block = choose_block_rows(target_of(q), rows, width, k, budget_bytes)
    # Without scores no logit is read: one element stands for the buffer.
    buffer = torch.empty((block, width) if scored else (1, 1), dtype=torch.float32, device=q.device)
    for first in range(0, rows, block):
        size = min(block, rows - first)
        part = slice(first, first + size)
        logits = buffer[:size] if scored else buffer.expand(size, 1)
        if scored:
            launch_scores(q, weights, index_cache, context, logits, first_row=first, fill=False)
        launch_topk(
            logits,
            context.lengths[part],
            k,
            out[part],
            slots_of=context if output == "slots" else None,
            first_row=first,
            follows=scored,
        )
    return out


def _refuse(problem: Problem) -> str | None:
    return refuse_scoring(problem) or refuse_topk(problem)


SELECT = Kernel("triton", "select", _refuse, select, batch_invariant=True)
