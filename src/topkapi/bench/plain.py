"""`select` as somebody writes it who has none of our kernels: pages of keys gathered by torch,
scores by a matrix product for all heads, `torch.topk`. In blocks that fit a budget, as ours are.
"""

from __future__ import annotations

from typing import Any

import torch

from topkapi.context import Context
from topkapi.layout.index_key import fp8_page_views


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
        keys, scales = _keys(index_cache, context, block, dim, dtype)
        for begin in range(0, per, most_rows):
            part = block, slice(begin, begin + most_rows)
            asked = queries[part]
            scores = _product(asked.flatten(1, 2), keys.mT).relu_()
            logits = (shares[part] @ scores.view(*asked.shape[:3], width))[:, :, 0]
            if scales is not None:
                logits *= scales[:, None]
            logits.masked_fill_(column >= lengths[part], float("-inf"))
            chosen[part] = logits.topk(k, dim=2).indices
    return chosen.view(rows, k)


def _keys(
    index_cache: torch.Tensor, context: Context, requests: slice, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys `[b, S, Di]` of some requests, and scales `[b, S]` fp32 where they have any."""
    assert context.table is not None, "measured contexts have a table"
    assert context.table_rows is not None, "a table comes with table_rows"
    width, page = context.max_length, context.page_size
    slots = context.table[context.table_rows[requests]]
    count = slots.shape[0]
    if index_cache.dtype != torch.uint8:
        keys = index_cache.index_select(0, slots[:, :width].flatten())
        return keys.to(dtype).view(count, width, dim), None
    pages = index_cache.index_select(0, slots[:, ::page].flatten() // page)
    codes, scales = fp8_page_views(pages, dim, page)
    keys = codes.to(dtype).view(count, -1, dim)[:, :width]
    return keys, scales.reshape(count, -1)[:, :width]


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` with sums in fp32, which torch returns unrounded only on a GPU."""
    options: dict[str, Any] = {"out_dtype": torch.float32} if a.is_cuda else {}
    return torch.bmm(a, b, **options)
