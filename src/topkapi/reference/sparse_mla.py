"""Attention of each query row over its selected latents alone: the definition.

MLA with the up-projections absorbed (DeepSeek-V2 report): one latent is key and value of all heads.
"""

from __future__ import annotations

import torch

from topkapi.reference.records import gather_latent


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    v_dim: int = 512,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q . kv) @ kv[:, :v_dim]` over `slots[r]`, for each row r and head.

    `q [R, H, L + P]`, `kv_cache [slots, 1, W]` (uint8: fp8 records), `slots [R, K]` int; -1 is
    skipped wherever it stands. L = `v_dim`. `logit_cap > 0` bounds scores: `cap * tanh(s / cap)`.
    `sinks [H]` is a natural-log logit that joins the denominator alone.

    Returns out `[R, H, v_dim]` in q's dtype and lse `[R, H]` fp32 (natural log, without the sink;
    fp64 for fp64 q). A row without any slot gives 0 and -inf. Computed in fp32, or fp64 for fp64 q.
    """
    rows, _, width = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    kv = gather_latent(kv_cache, slots.reshape(-1), v_dim=v_dim, dtype=compute)
    kv = kv.view(rows, slots.shape[1], width)
    scores = torch.einsum("rhd,rkd->rhk", q.to(compute), kv) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill((slots < 0)[:, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    denominator = lse if sinks is None else torch.logaddexp(lse, sinks.to(compute))
    # A row without slots has denominator -inf (or its sink); its weights must be 0, not exp(nan).
    weights = torch.exp(scores - denominator.masked_fill(lse == float("-inf"), 0.0)[..., None])
    out = torch.einsum("rhk,rkd->rhd", weights, kv[..., :v_dim])
    return out.to(q.dtype), lse
