"""Attention over selected latents, as a public function.

Checks arguments, chooses a kernel, launches it. The formula is in `reference.sparse_mla`.
"""

from __future__ import annotations

from typing import Literal, cast

import torch

from topkapi.errors import ShapeError
from topkapi.ops.records import check_kv_cache
from topkapi.ops.registry import OPS, problem_for
from topkapi.shapes import FLOATS, INTS, check


@torch.no_grad()
def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    v_dim: int = 512,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    phase: Literal["prefill", "decode"] = "prefill",
    budget_bytes: int = 256 * 2**20,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q . kv) @ kv[:, :v_dim]` over the selected slots of each row.

    Args:
        q: `[R, H, L + P]` fp32, bf16 or fp16: absorbed query and its rope part; L = `v_dim`.
        kv_cache: `[slots, 1, W]`, fp32, bf16 or fp16 `latent | rope`, or uint8 fp8 records.
        slots: `[R, K]` int; -1 is skipped wherever it stands.
        scale: multiplies q . kv.
        sinks: `[H]` fp32 natural-log logits that join the denominator alone.
        logit_cap: if positive, scores become `cap * tanh(score / cap)`.
        phase: a hint of the batch's shape.
        budget_bytes: bound on temporary memory.

    Returns out `[R, H, v_dim]` in q's dtype and lse `[R, H]` fp32, natural log, sink excluded. A
    row without any slot gives 0 and -inf. Raises `ShapeError`, `KernelRefusedError`.
    """
    sizes: dict[str, int] = {}
    check("q", q, "R H D", sizes, dtypes=FLOATS)
    check("slots", slots, "R K", sizes, dtypes=INTS, like=q)
    if not 1 <= v_dim <= sizes["D"]:
        raise ShapeError(f"v_dim: expected 1 to D={sizes['D']}, got {v_dim}")
    rope_dim = sizes["D"] - v_dim
    cache_format = check_kv_cache(kv_cache, v_dim, rope_dim, like=q)
    features = set()
    if sinks is not None:
        check("sinks", sinks, "H", sizes, dtypes=(torch.float32,), like=q)
        features.add("sinks")
    if logit_cap > 0:
        features.add("logit_cap")
    problem = problem_for(
        "sparse_mla",
        q,
        phase=phase,
        cache_format=cache_format,
        num_heads=sizes["H"],
        latent_dim=v_dim,
        rope_dim=rope_dim,
        topk=sizes["K"],
        features=frozenset(features),
    )
    launch = OPS["sparse_mla"].choose(problem, kernel).launch
    result = launch(
        q,
        kv_cache,
        slots,
        scale=scale,
        v_dim=v_dim,
        sinks=sinks,
        logit_cap=logit_cap,
        phase=phase,
        budget_bytes=budget_bytes,
    )
    return cast("tuple[torch.Tensor, torch.Tensor]", result)
