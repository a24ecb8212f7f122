"""The backend's definition, slow on purpose: Python loops over requests and tokens, float64.

Written from the formats alone, and calls nothing of Topkapi.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpectedMetadata:
    """Every field of one step as plain lists."""

    cache_seqlens_int32: list[int]
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    nsa_seqlens_expanded: list[int]
    nsa_cache_seqlens_int32: list[int]
    nsa_cu_seqlens_q: list[int]
    nsa_cu_seqlens_k: list[int]
    request_of_live_row: list[int]
    max_seq_len_q: int
    max_seq_len_k: int


def expected_metadata(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    topk: int,
    num_rows: int,
    inert_rows: Sequence[int] = (),
) -> ExpectedMetadata:
    """Loop over requests and their rows; rows past the last query are padding."""
    cu_q, cu_k, expanded, owner = [0], [0], [], []
    for request, (q, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        cu_q.append(cu_q[-1] + q)
        cu_k.append(cu_k[-1] + n)
        for j in range(q):
            expanded.append(max(n - q + j + 1, 0))
            owner.append(request)
    expanded += [0] * (num_rows - len(expanded))
    for row in inert_rows:
        expanded[row] = 0
    selected = [min(n, topk) for n in expanded]
    cu_selected = [0]
    for n in selected:
        cu_selected.append(cu_selected[-1] + n)
    return ExpectedMetadata(
        cache_seqlens_int32=list(kv_lens),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        nsa_seqlens_expanded=expanded,
        nsa_cache_seqlens_int32=selected,
        nsa_cu_seqlens_q=list(range(num_rows + 1)),
        nsa_cu_seqlens_k=cu_selected,
        request_of_live_row=owner,
        max_seq_len_q=max(q_lens, default=0),
        max_seq_len_k=max(kv_lens, default=0),
    )


def best_positions(
    index_q: torch.Tensor, index_k: torch.Tensor, weights: torch.Tensor, k: int
) -> list[int]:
    """The k best of one row's context: `index_q [Hi, Di]`, `index_k [S, Di]`, `weights [Hi]`."""
    scores = []
    for position in range(index_k.shape[0]):
        total = 0.0
        for head in range(index_q.shape[0]):
            dot = float(index_q[head].double() @ index_k[position].double())
            total += float(weights[head]) * max(dot, 0.0)
        scores.append(total)
    ranked = sorted(range(len(scores)), key=lambda p: (-scores[p], p))
    return sorted(ranked[:k])


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    *,
    scale: float,
    v_dim: int,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """One row over its selected tokens: `q [H, D]`, `kv [N, D]` to `[H, v_dim]` float64."""
    out = torch.zeros(q.shape[0], v_dim, dtype=torch.float64)
    for head in range(q.shape[0]):
        scores = [scale * float(q[head].double() @ token.double()) for token in kv]
        if logit_cap:
            scores = [logit_cap * math.tanh(score / logit_cap) for score in scores]
        top = max(scores + ([float(sinks[head])] if sinks is not None else []))
        shares = [math.exp(score - top) for score in scores]
        total = sum(shares) + (math.exp(float(sinks[head]) - top) if sinks is not None else 0.0)
        for share, token in zip(shares, kv, strict=True):
            out[head] += share / total * token[:v_dim].double()
    return out
