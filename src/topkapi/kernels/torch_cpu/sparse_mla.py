"""Sparse MLA with plain torch, in blocks of rows whose gathered latents stay in cache.

`softmax(scale * q . kv) @ kv[:, :v_dim]` over the selected slots of each row. A row's slots are
cut in two halves, each one matrix of a batched product: a lone row is then a batch of two, and
gets the bits that it gets among many (BLAS libraries treat a batch of one differently).
"""

from __future__ import annotations

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.reference.records import dequantize_latent

_GATHERED_BYTES = 2**20


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Never synchronises; safe inside capture."""
    rows, heads, width = q.shape
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if slots.shape[1] % 2 or slots.shape[1] == 0:
        slots = torch.nn.functional.pad(slots, (0, 2 - slots.shape[1] % 2), value=-1)
    k = slots.shape[1]
    wanted = _GATHERED_BYTES if q.device.type == "cpu" else budget_bytes // 4
    row_bytes = 4 * (k * width + 2 * k * heads + 4 * heads * width)
    step = max(1, min(rows, min(wanted, budget_bytes // 4) // row_bytes))
    scratch = torch.empty(2 * step, k // 2, width, dtype=torch.float32, device=q.device)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        block_out, block_lse = _attend(
            q[part].float(),
            _gather(kv_cache, slots[part], v_dim, scratch),
            slots[part],
            scale,
            v_dim,
            logit_cap,
        )
        if sinks is not None:
            block_out *= torch.sigmoid(block_lse - sinks)[..., None]
        out[part] = block_out
        lse[part] = block_lse
    return out, lse


def _gather(
    kv_cache: torch.Tensor, slots: torch.Tensor, v_dim: int, scratch: torch.Tensor
) -> torch.Tensor:
    """Latents `[2n, k/2, D]` fp32 of `slots [n, k]`, written to `scratch`.

    A -1 reads another slot that its own row selected, so that NaN in an unselected slot cannot
    reach the products; only a row without any slot reads slot 0.
    """
    rows, k = slots.shape
    safe = torch.where(slots < 0, slots.amax(1, keepdim=True), slots).clamp_min(0).view(-1)
    width = scratch.shape[2]
    flat = scratch.view(-1, width)[: rows * k]
    records = kv_cache[:, 0]
    if kv_cache.dtype == torch.float32:
        torch.index_select(records, 0, safe, out=flat)
    elif kv_cache.dtype == torch.uint8:
        flat.copy_(dequantize_latent(records.index_select(0, safe), v_dim, width - v_dim))
    else:
        flat.copy_(records.index_select(0, safe))
    return flat.view(2 * rows, k // 2, width)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    v_dim: int,
    logit_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out `[n, H, v_dim]` and lse `[n, H]`, fp32, of `q [n, H, D]` and `kv [2n, k/2, D]`."""
    rows, heads, width = q.shape
    half = kv.shape[1]
    twice = q[:, None].expand(rows, 2, heads, width).reshape(2 * rows, heads, width)
    scores = torch.bmm(twice, kv.transpose(1, 2)).mul_(scale)
    if logit_cap > 0:
        scores.div_(logit_cap).tanh_().mul_(logit_cap)
    scores = scores.view(rows, 2, heads, half)
    scores.masked_fill_((slots < 0).view(rows, 2, 1, half), float("-inf"))
    peak = scores.amax((1, 3), keepdim=True)
    peak.masked_fill_(peak == float("-inf"), 0.0)
    weights = scores.sub_(peak).exp_()
    total = weights.sum((1, 3))
    halves = torch.bmm(weights.view(2 * rows, heads, half), kv[..., :v_dim])
    out = halves.view(rows, 2, heads, v_dim).sum(1)
    # `total` is at least 1 but for rows without a finite score, whose out is 0 (or NaN) already.
    out.div_(total.clamp_min(1e-30)[..., None])
    lse = total.log_().add_(peak[:, 0, :, 0])
    empty = (slots < 0).all(1)[:, None, None]
    return out.masked_fill_(empty, 0.0), lse


def _refuse(problem: Problem) -> str | None:
    return None


SPARSE_MLA = Kernel("torch", "sparse_mla", _refuse, sparse_mla)
