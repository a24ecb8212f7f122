"""FlashMLA's sparse prefill: bf16 latents of 512 + 64 dims, on sm90.

    out, lse = softmax over the slots of each row; -1 is skipped wherever it stands

Its quirks: 64 or 128 heads, filled up with zero heads; selections of whole tiles, filled up with
-1; an lse of +inf for a row without slots, and to base 2 in SGLang's build; bf16 records alone, so
that of an fp8 cache only what is selected is dequantised, row block by row block within the budget.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.external.packages import (
    Provider,
    load_library,
    loaded,
    provided_by,
    refuse_package,
)
from topkapi.kernels.external.selected import gathered, padded_heads, padded_width, rows_within

# Slots a row are read in tiles of this many.
TILE = 128

Call = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Prefill:
    """`call(q, kv, indices, scale, sinks)` gives out and lse; `heads` are the counts it has."""

    call: Call
    heads: tuple[int, ...]


def _flash_mla() -> Prefill:
    module = importlib.import_module("flash_mla")
    options = {}
    if hasattr(module, "has_legacy"):
        if not module.has_legacy():
            raise ImportError("it was built without its kernels for sm90")
        options = {"use_legacy": True}

    def call(
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, _, lse = module.flash_mla_sparse_fwd(
            q, kv, indices, scale, d_v=512, attn_sink=sinks, **options
        )
        return out, lse

    return Prefill(call, (64, 128))


def _sgl_kernel() -> Prefill:
    load_library("sgl_kernel", "flashmla_ops*.so")
    raw = _raw(torch.ops.sgl_kernel.sparse_prefill_fwd, ())

    def call(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # Its older FlashMLA gives the logarithm to base 2 (0.4.5).
        out, lse = raw(*arguments)
        return out, lse * math.log(2)

    return Prefill(call, (64, 128))


def _vllm() -> Prefill:
    # Its kernels for 8, 16 and 32 heads are slower than 64 heads of which most are zero
    # (docs/kernels/external.md).
    load_library("vllm", "_flashmla_C*.so")
    return Prefill(_raw(torch.ops._flashmla_C.sparse_prefill_fwd, (None,)), (64, 128))


def _raw(operator: Callable[..., list[torch.Tensor]], rest: tuple[None, ...]) -> Call:
    def call(
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, _, lse = operator(q, kv, indices, scale, 512, sinks, None, *rest)
        return out, lse

    return call


PROVIDERS = (
    Provider("vllm", ("vllm",), _vllm),
    Provider("flash_mla", ("sgl-flash-mla", "flash-mla", "flash_mla"), _flash_mla),
    Provider("sgl_kernel", ("sglang-kernel", "sgl-kernel"), _sgl_kernel),
)


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    v_dim: int = 512,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    phase: str = "prefill",
    budget_bytes: int = 256 * 2**20,
    peer: Prefill | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Never synchronises; safe inside capture.

    `peer` stands in for the installed package, for tests. Temporaries: padded heads, and for an fp8
    cache the selected records of a block of rows, within `budget_bytes`.
    """
    peer = peer or loaded(PROVIDERS).call
    rows, heads, _ = q.shape
    if rows == 0:
        return q.new_empty(0, heads, v_dim), q.new_empty(0, heads, dtype=torch.float32)
    wide = padded_heads(q, _heads(heads, peer.heads))
    if sinks is not None and wide.shape[1] != heads:
        sinks = torch.nn.functional.pad(sinks, (0, wide.shape[1] - heads))
    indices = padded_width(slots, TILE)
    if kv_cache.dtype == torch.bfloat16:
        out, lse = peer.call(wide, kv_cache.contiguous(), indices[:, None], scale, sinks)
        return unpadded(out, lse, heads)
    step = rows_within(budget_bytes, indices, q.shape[2], 2)
    parts = []
    for first in range(0, rows, step):
        part = slice(first, first + step)
        records, places = gathered(kv_cache, indices[part], v_dim, torch.bfloat16)
        parts.append(peer.call(wide[part], records, places[:, None], scale, sinks))
    out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return unpadded(out, lse, heads)


def unpadded(out: torch.Tensor, lse: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's out `[R, H', 512]` and lse `[R, H']` as the contract has them: the first `heads`
    alone, and -inf where a row had no slot.
    """
    lse = lse[:, :heads]
    return out[:, :heads], lse.masked_fill(lse == float("inf"), float("-inf"))


def _heads(heads: int, counts: tuple[int, ...]) -> int:
    return next(count for count in counts if count >= heads)


def _refuse(problem: Problem) -> str | None:
    if problem.device.backend != "cuda" or problem.device.arch != 90:
        return f"needs sm90, this is {problem.device.label}"
    return refuse_static(problem) or refuse_package(PROVIDERS)


def refuse_static(problem: Problem) -> str | None:
    """What FlashMLA's kernels cannot take whatever the package; None otherwise."""
    if problem.dtype != torch.bfloat16:
        return f"takes bf16 queries, got {str(problem.dtype).removeprefix('torch.')}"
    if (problem.latent_dim, problem.rope_dim) != (512, 64):
        return f"takes 512 + 64 dims, got {problem.latent_dim} + {problem.rope_dim}"
    if problem.num_heads > 128:
        return f"takes at most 128 heads, got {problem.num_heads}"
    if "logit_cap" in problem.features:
        return "has no logit cap"
    if problem.cache_format not in ("bf16", "fp8"):
        return f"reads bf16 or fp8 records, got {problem.cache_format}"
    return None


def _heads_computed(problem: Problem) -> int:
    return _heads(problem.num_heads, loaded(PROVIDERS).call.heads)


FLASHMLA_SPARSE = Kernel(
    "flashmla_sparse",
    "sparse_mla",
    _refuse,
    sparse_mla,
    heads_computed=_heads_computed,
    peer=True,
    provider=provided_by(PROVIDERS),
)
