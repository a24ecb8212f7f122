"""`select` as somebody writes it who has none of our kernels: keys gathered by torch, scores by a
matrix product for all heads, `torch.topk`. In blocks that fit a budget, as our own kernels are.
"""

from __future__ import annotations

from typing import Any

import torch

from topkapi.context import Context
from topkapi.reference.records import read_index_key


def plain_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    k: int,
    *,
    budget_bytes: int = 256 * 2**20,
) -> torch.Tensor:
    """Positions `[R, k]` int64 in any order, ties as `torch.topk` breaks them.

    For contexts whose B requests have as many rows each, of at least k tokens. Products of bf16 on
    a GPU, of fp32 on a CPU, summed in fp32. Never synchronises; may be captured.
    """
    (rows, heads, dim), requests, width = q.shape, context.num_requests, context.max_length
    per = rows // requests
    dtype = torch.bfloat16 if q.is_cuda else torch.float32
    queries = q.to(dtype).view(requests, per, heads, dim)
    shares = weights.view(requests, per, 1, heads)
    lengths = context.lengths.view(requests, per, 1)
    column = torch.arange(width, device=q.device)
    chosen = torch.empty(requests, per, k, dtype=torch.int64, device=q.device)
    fitting = max(1, budget_bytes // (4 * heads * width))
    most_requests, most_rows = max(1, fitting // per), min(per, fitting)
    for first in range(0, requests, most_requests):
        block = slice(first, first + most_requests)
        keys, scales = _keys(index_cache, context, block, dim)
        keys = keys.to(dtype).mT
        for begin in range(0, per, most_rows):
            part = block, slice(begin, begin + most_rows)
            asked = queries[part]
            scores = _product(asked.flatten(1, 2), keys).relu_()
            logits = (shares[part] @ scores.view(*asked.shape[:3], width))[:, :, 0]
            if scales is not None:
                logits *= scales[:, None]
            logits.masked_fill_(column >= lengths[part], float("-inf"))
            chosen[part] = logits.topk(k, dim=2).indices
    return chosen.view(rows, k)


def _keys(
    index_cache: torch.Tensor, context: Context, requests: slice, dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys `[b, S, Di]` of some requests as stored, and scales `[b, S]` where they have any."""
    assert context.table is not None, "measured contexts have a table"
    assert context.table_rows is not None, "a table comes with table_rows"
    slots = context.table[context.table_rows[requests], : context.max_length]
    keys, scales = read_index_key(index_cache, slots.flatten(), dim)
    return keys.view(*slots.shape, dim), None if scales is None else scales.view(slots.shape)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` with sums in fp32, which torch returns unrounded only on a GPU."""
    options: dict[str, Any] = {"out_dtype": torch.float32} if a.is_cuda else {}
    return torch.bmm(a, b, **options)
