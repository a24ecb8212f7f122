"""What does each query row attend to? From an indexer's q, k and weights to `topk_indices`.

Knows the step's metadata and the index-key cache; nothing about projections or attention.
"""

from __future__ import annotations

import torch

from topkapi import ops
from topkapi.attention.index_queries import quantize_index_query
from topkapi.attention.metadata import NSAMetadata

# Rows of "everything" are padded to a multiple of this, so that kernels see few widths.
_WIDTH_STEP = 64


def everything(metadata: NSAMetadata, *, full_width: bool) -> torch.Tensor:
    """Every position of every row, `[R, W]` int32, ascending, -1 at the end.

    W covers the longest context, at most topk; with `full_width` it is topk, whatever the batch.
    For steps whose contexts all fit in topk. Capture-safe.
    """
    width = metadata.topk
    if not full_width:
        longest = max(metadata.max_seq_len_k, 1)
        width = min(width, -(-longest // _WIDTH_STEP) * _WIDTH_STEP)
    lengths = metadata.nsa_seqlens_expanded[:, None]
    positions = torch.arange(width, dtype=torch.int32, device=lengths.device)
    return torch.where(positions < lengths, positions, -1)


def select_tokens(
    metadata: NSAMetadata,
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    *,
    fused: bool,
    fp8_queries: bool,
    budget_bytes: int,
    batch_invariant: bool,
    kernel: str,
) -> torch.Tensor:
    """Score and select: `q [R, Hi, Di]`, `weights [R, Hi]` fp32 to `[R, topk]` int32.

    Slots when `fused`, positions otherwise; -1 at the end. `fp8_queries` quantises q first. Rows of
    q past the metadata's (padding for data parallelism) get no row here. Capture-safe; never holds
    `[R, S]`.
    """
    rows = metadata.num_rows
    q, weights = q[:rows], weights[:rows].float()
    if fp8_queries:
        q, weights = quantize_index_query(q, weights)
    return ops.select(
        q,
        weights,
        index_cache,
        metadata.context,
        metadata.topk,
        output="slots" if fused else "positions",
        budget_bytes=budget_bytes,
        batch_invariant=batch_invariant,
        kernel=kernel,
    )
