"""FlashAttention 3 with a value-sided query (`q_v`) over bf16 records and page size 1, on sm90.

    score = scale * (q_rope . k_rope + q_latent . latent), out = softmax(score) @ latent

The selection is its page table: one "page" is one token, each row a sequence of its own. Its
quirks: no -1 inside the counted length, so that selections are compacted; what lies past the length
may still be read, so that it repeats a slot of the same row; scores of NaN give out NaN but an lse
of -inf, which becomes NaN. A row of length 0 gives 0 and -inf, as it should.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.external.packages import (
    Provider,
    load_library,
    loaded,
    provided_by,
    refuse_package,
)
from topkapi.kernels.external.selected import compacted

# (q_rope [R, 1, H, 64], k [slots, 1, 1, 64], v [slots, 1, 1, 512], q_latent [R, 1, H, 512],
# page_table [R, K], counts [R], scale, cap) to (out [R, 1, H, 512], lse [R, H, 1]).
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _vllm() -> Forward:
    load_library("vllm", "vllm_flash_attn/_vllm_fa3_C*.so")
    operator = torch.ops._vllm_fa3_C.fwd

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: torch.Tensor,
        page_table: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
        cap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Not used: new keys and values, cumulated lengths, rotary tables, descales, windows.
        given = (None, None, qv, None, None, None, None, None, counts, None, None, page_table)
        rest = (None,) * 8
        tail = (scale, False, -1, -1, cap, True, None, 0, None, 0, None, 1, 0, None)
        out, lse = operator(q, k, v, *given, *rest, *tail)[:2]
        return out, lse

    return call


def _interface(package: str, module: str) -> Callable[[], Forward]:
    """FlashAttention's own Python interface, which others repeat."""

    def load() -> Forward:
        function = importlib.import_module(module).flash_attn_with_kvcache

        def call(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            qv: torch.Tensor,
            page_table: torch.Tensor,
            counts: torch.Tensor,
            scale: float,
            cap: float,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = function(
                q=q, k_cache=k, v_cache=v, qv=qv, page_table=page_table, cache_seqlens=counts,
                softmax_scale=scale, causal=False, softcap=cap, return_softmax_lse=True,
            )[:2]  # fmt: skip
            return out, lse

        return call

    return load


PROVIDERS = (
    Provider("vllm", ("vllm",), _vllm),
    Provider(
        "sgl_kernel",
        ("sglang-kernel", "sgl-kernel"),
        _interface("sgl_kernel", "sgl_kernel.flash_attn"),
    ),
    Provider(
        "flash_attn_interface",
        ("flash-attn-3", "flash_attn_3"),
        _interface("flash_attn_interface", "flash_attn_interface"),
    ),
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
    phase: str = "decode",
    budget_bytes: int = 256 * 2**20,
    peer: Forward | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Never synchronises; safe inside capture.

    `peer` stands in for the installed package, for tests.
    """
    peer = peer or loaded(PROVIDERS).call
    rows, heads, _ = q.shape
    if rows == 0:
        return q.new_empty(0, heads, v_dim), q.new_empty(0, heads, dtype=torch.float32)
    page_table, counts = compacted(slots)
    records = kv_cache.view(kv_cache.shape[0], 1, 1, -1)
    out, lse = peer(
        q[:, None, :, v_dim:],
        records[..., v_dim:],
        records[..., :v_dim],
        q[:, None, :, :v_dim],
        page_table,
        counts,
        scale,
        logit_cap,
    )
    out = out[:, 0]
    return out, lse[:, :, 0] + out[:, :, 0] * 0.0


def _refuse(problem: Problem) -> str | None:
    if problem.device.backend != "cuda" or problem.device.arch != 90:
        return f"needs sm90, this is {problem.device.label}"
    if problem.dtype != torch.bfloat16 or problem.cache_format != "bf16":
        dtype = str(problem.dtype).removeprefix("torch.")
        return f"takes bf16 queries and bf16 records, got {dtype} and {problem.cache_format}"
    if (problem.latent_dim, problem.rope_dim) != (512, 64):
        return f"takes 512 + 64 dims, got {problem.latent_dim} + {problem.rope_dim}"
    if "sinks" in problem.features:
        return "has no attention sinks with a value-sided query"
    if problem.topk == 0:
        return "needs a selection of at least one entry"
    return refuse_package(PROVIDERS)


FA3 = Kernel("fa3", "sparse_mla", _refuse, sparse_mla, peer=True, provider=provided_by(PROVIDERS))
