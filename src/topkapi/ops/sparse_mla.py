"""Attention over selected latents, as a public function.

Checks arguments, chooses a kernel, launches it. The formula is in `reference.sparse_mla`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal, cast

import torch

from topkapi.dispatch import Kernel, Problem
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
    batch_invariant: bool = False,
    state: MutableMapping[Any, object] | None = None,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q . kv) @ kv[:, :v_dim]` over the selected slots of each row.

    Args:
        q: `[R, H, L + P]` fp32, bf16 or fp16: absorbed query and its rope part; L = `v_dim`.
        kv_cache: `[slots, 1, W]`, fp32, bf16 or fp16 `latent | rope`, or uint8 fp8 records.
        slots: `[R, K]` int; -1 is skipped wherever it stands.
        scale: multiplies q . kv; positive.
        sinks: `[H]` fp32 natural-log logits that join the denominator alone.
        logit_cap: if positive, scores become `cap * tanh(score / cap)`.
        phase: a hint of the batch's shape.
        budget_bytes: bound on temporary memory.
        batch_invariant: a row's bits must not depend on what shares its batch.
        state: what kernels keep for all layers of a step, owned by the step's buffers
            (`NSAMetadata.flashmla_metadata`). None: nothing is kept.

    Returns out `[R, H, v_dim]` in q's dtype and lse `[R, H]` fp32, natural log, sink excluded. A
    row without any slot gives 0 and -inf. Raises `ShapeError`, `KernelRefusedError`.
    """
    if not scale > 0:
        raise ShapeError(f"scale: expected more than 0, got {scale}")
    problem = _problem(q, kv_cache, slots, v_dim, sinks, logit_cap, phase, batch_invariant)
    chosen = OPS["sparse_mla"].choose(problem, kernel)
    result = chosen.launch(
        q,
        kv_cache,
        slots,
        scale=scale,
        v_dim=v_dim,
        sinks=None if sinks is None else sinks.contiguous(),
        logit_cap=logit_cap,
        phase=phase,
        budget_bytes=budget_bytes,
        **_options(chosen, problem, batch_invariant, state),
    )
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


def _problem(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    v_dim: int,
    sinks: torch.Tensor | None,
    logit_cap: float,
    phase: str,
    batch_invariant: bool,
) -> Problem:
    """Check the arguments of one call and state what it asks."""
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
    if batch_invariant:
        features.add("batch_invariant")
    return problem_for(
        "sparse_mla",
        q,
        phase=phase,
        cache_format=cache_format,
        num_heads=sizes["H"],
        latent_dim=v_dim,
        rope_dim=rope_dim,
        topk=sizes["K"],
        rows=sizes["R"],
        features=frozenset(features),
    )


def _options(
    kernel: Kernel,
    problem: Problem,
    batch_invariant: bool,
    state: MutableMapping[Any, object] | None,
) -> dict[str, object]:
    """What only some kernels take: a promise about bits, and what they keep for a step's shapes."""
    options: dict[str, object] = {}
    if batch_invariant:
        options["batch_invariant"] = True
    if kernel.prepare is not None and state is not None:
        key = kernel.name, problem.rows, problem.num_heads, problem.topk
        if key not in state:
            state[key] = kernel.prepare(problem)
        options["prepared"] = state[key]
    return options
