"""Attention over selected latents on sm90: when the Gluon kernels run, and how they are cut.

The formula is that of `triton.sparse_mla`; rows whose slots several programs share are merged by
the same kernel as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.hopper.attend_narrow import attend_narrow
from topkapi.kernels.hopper.attend_narrow_fp8 import attend_narrow_fp8
from topkapi.kernels.hopper.attend_wide import attend_wide
from topkapi.kernels.hopper.attend_wide_fp8 import attend_wide_fp8
from topkapi.kernels.triton import sparse_mla as portable
from topkapi.kernels.triton.sparse_mla_merge import combine
from topkapi.kernels.triton.sparse_mla_tiles import choose_splits
from topkapi.kernels.triton.target import target_of
from topkapi.layout.latent import LATENT_FP8

LATENT_DIM = 512
ROPE_DIM = 64
TOKENS = 64


@dataclass(frozen=True)
class Tile:
    """How the work is cut: heads a program, and what its kernel is compiled with besides."""

    heads: int
    kernel: Any
    options: dict[str, int]


def choose_tile(heads: int, fp8: bool) -> Tile:
    """The launch configuration for `heads` heads."""
    block = min(64, max(16, triton.next_power_of_2(heads)))
    if block == 64 and fp8:
        return Tile(64, attend_wide_fp8, {"REGISTERS": 192})
    if block == 64:
        return Tile(64, attend_wide, {"REGISTERS": 208})
    if fp8 and block == 32:
        registers = {"SCORE_REGISTERS": 128, "SUM_REGISTERS": 208}
        return Tile(32, attend_narrow_fp8, {"STAGES": 3, **registers})
    if fp8:
        registers = {"SCORE_REGISTERS": 168, "SUM_REGISTERS": 128}
        return Tile(16, attend_narrow_fp8, {"STAGES": 4, **registers})
    # 32 heads are 128 sums a thread, too many for two groups.
    return Tile(block, attend_narrow, {"GROUPS": 2 if block == 16 else 1})


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    v_dim: int = LATENT_DIM,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    phase: str = "prefill",
    budget_bytes: int = 256 * 2**20,
    batch_invariant: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Never synchronises; safe inside capture.

    `tile` and `splits` override what is chosen, for measuring. `batch_invariant` never splits a
    row. Temporaries: nothing, or with several programs a row `splits * R * H * 513` fp32, within
    `budget_bytes`, beside copies of slots that are not int32 and of a query that is not contiguous
    or does not start at a multiple of 16 bytes. Records that do not, which no pool of ours makes,
    are left to the portable kernel.
    """
    rows, heads, _ = q.shape
    if kv_cache.stride(0) * kv_cache.itemsize % 16 or kv_cache.data_ptr() % 16:
        return portable.sparse_mla(
            q, kv_cache, slots, scale=scale, v_dim=v_dim, sinks=sinks, logit_cap=logit_cap,
            phase=phase, budget_bytes=budget_bytes, batch_invariant=batch_invariant,
        )  # fmt: skip
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    q, slots = q.contiguous(), slots.to(torch.int32).contiguous()
    if q.data_ptr() % 16:
        q = q.clone()  # copied to shared memory 16 bytes at a time
    fp8 = kv_cache.dtype == LATENT_FP8.dtype
    tile = tile or choose_tile(heads, fp8)
    if splits is None and batch_invariant:
        splits = 1
    programs = rows * triton.cdiv(heads, tile.heads)
    if splits is None:
        splits = choose_splits(
            target_of(q).num_sms, programs, slots.shape[1], heads=tile.heads, tokens=TOKENS,
            bytes_each=4 * rows * heads * (v_dim + 1), budget=budget_bytes,
        )  # fmt: skip
    target, target_lse = out, lse
    if splits > 1:
        target = torch.empty(splits, rows, heads, v_dim, dtype=torch.float32, device=q.device)
        target_lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    tile.kernel[(programs, splits)](
        q, kv_cache, slots, lse if sinks is None else sinks, target, target_lse,
        slots.shape[1], slots.stride(0), rows * heads, splits, scale, logit_cap, heads,
        W=kv_cache.stride(0), BLOCK_H=tile.heads, BLOCK_N=TOKENS,
        SPLIT=splits > 1, HAS_SINKS=sinks is not None, HAS_CAP=logit_cap > 0,
        num_warps=4, launch_pdl=True, **tile.options,
    )  # fmt: skip
    if splits > 1:
        combine(target, target_lse, sinks, out, lse, early=True)
    return out, lse


def _refuse(problem: Problem) -> str | None:
    if problem.device.backend != "cuda" or problem.device.arch != 90:
        return f"needs sm90, this is {problem.device.label}"
    if (problem.latent_dim, problem.rope_dim) != (LATENT_DIM, ROPE_DIM):
        return f"takes 512 + 64 dims, got {problem.latent_dim} + {problem.rope_dim}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got queries of {problem.dtype}"
    name = "bf16" if problem.dtype == torch.bfloat16 else "fp16"
    if problem.cache_format == "fp8" and name != "bf16":
        return f"takes bf16 queries over fp8 records, whose ropes are bf16, got {name}"
    if problem.cache_format not in (name, "fp8"):
        return f"takes records of the query's dtype or fp8, got {name} and {problem.cache_format}"
    return None


def _heads_computed(problem: Problem) -> int:
    block = choose_tile(problem.num_heads, problem.cache_format == "fp8").heads
    return -(-problem.num_heads // block) * block


SPARSE_MLA = Kernel(
    "hopper",
    "sparse_mla",
    _refuse,
    sparse_mla,
    heads_computed=_heads_computed,
    batch_invariant=True,
)
