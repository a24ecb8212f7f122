"""How the lightning indexer scores a context, and which tokens it keeps: the definition.

`logit[r, s] = k_scale[s] * sum_h weights[r, h] * relu(q[r, h] . k[s])` (DeepSeek-V3.2 report).
`weights` already hold `Hi^-1/2 * Di^-1/2`, and the query's scale where the query was quantised.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch

from topkapi.context import Context
from topkapi.reference.records import read_index_key
from topkapi.reference.topk import topk


def context_slots(context: Context, request: int, length: int) -> torch.Tensor:
    """Slots `[length]` int64 of the first `length` positions of one request."""
    if context.table is not None:
        assert context.table_rows is not None, "a table comes with table_rows"
        return context.table[context.table_rows[request], :length].long()
    assert context.starts is not None, "a Context has a table or starts"
    return context.starts[request] + torch.arange(length, device=context.starts.device)


def score(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """Logits `[R, S]` of `q [R, Hi, Di]`, `weights [R, Hi]` against `keys [S, Di]`, `scales [S]`.

    Computed in fp32, or in fp64 when q is fp64.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    per_head = torch.einsum("rhd,sd->rhs", q.to(compute), keys.to(compute)).relu()
    logits = torch.einsum("rhs,rh->rs", per_head, weights.to(compute))
    return logits if scales is None else logits * scales.to(compute)


def indexer_logits(
    q: torch.Tensor, weights: torch.Tensor, index_cache: torch.Tensor, context: Context
) -> torch.Tensor:
    """Logits `[R, context.max_length]` fp32 (fp64 for fp64 q); -inf at columns >= `lengths[r]`.

    `q [R, Hi, Di]` float, `weights [R, Hi]`, `index_cache [slots, Di]` float or uint8
    `[pages, page * (Di + 4)]`. Synchronises: one request at a time.
    """
    rows, _, index_dim = q.shape
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    logits = torch.full((rows, context.max_length), float("-inf"), dtype=compute, device=q.device)
    bounds = context.cu_seqlens_q.tolist()
    for request, (first, last) in enumerate(pairwise(bounds)):
        lengths = context.lengths[first:last]
        length = int(lengths.max()) if last > first else 0
        if length == 0:
            continue
        slots = context_slots(context, request, length)
        keys, scales = read_index_key(index_cache, slots, index_dim)
        block = score(q[first:last], weights[first:last], keys, scales)
        outside = torch.arange(length, device=q.device) >= lengths[:, None]
        logits[first:last, :length] = block.masked_fill(outside, float("-inf"))
    return logits


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    k: int,
    *,
    output: Literal["slots", "positions"] = "slots",
) -> torch.Tensor:
    """`topk(indexer_logits(...))`: positions `[R, k]` int32, or the slots that hold them.

    Ascending by position, -1 at the end. Holds `[R, context.max_length]`. Synchronises.
    """
    logits = indexer_logits(q, weights, index_cache, context)
    positions = topk(logits, context.lengths, k)
    return positions if output == "positions" else context.slots(positions)
