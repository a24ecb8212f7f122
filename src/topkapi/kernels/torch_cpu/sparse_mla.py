"""Sparse MLA with plain torch, in blocks of rows whose gathered latents stay in cache.

`softmax(scale * q . kv) @ kv[:, :v_dim]` over the selected slots of each row. A row's slots are
cut in two halves, each one matrix of a batched product: a lone row is then a batch of two, and
gets the bits that it gets among many (BLAS libraries treat a batch of one differently).
"""

from __future__ import annotations

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.torch_cpu.fp8 import dequantize_latent_into

# Gathered latents of a block for one thread: they should stay in its cache.
_GATHERED_BYTES = 5 * 2**18
_MOST_THREADS = 8


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
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Never synchronises; safe inside capture.

    On a CPU a row's bits never depend on its batch, `batch_invariant` or not.
    """
    rows, heads, width = q.shape
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if slots.shape[1] % 2 or slots.shape[1] == 0:
        slots = torch.nn.functional.pad(slots, (0, 2 - slots.shape[1] % 2), value=-1)
    half = slots.shape[1] // 2
    missing = slots < 0
    # A -1 reads another slot that its own row selected, so that NaN in an unselected slot cannot
    # reach the products; only a row without any slot reads slot 0.
    last = slots.amax(1, keepdim=True)
    safe = torch.where(missing, last, slots).clamp_min_(0)
    step = _rows_at_once(q, 2 * half, budget_bytes)
    kv = torch.empty(step * 2 * half, width, dtype=torch.float32, device=q.device)
    scores = torch.empty(2 * step, heads, half, dtype=torch.float32, device=q.device)
    halves = torch.empty(2 * step, heads, v_dim, dtype=torch.float32, device=q.device)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        block, total = _attend(
            q[part],
            _gather(kv_cache, safe[part], v_dim, kv),
            missing[part],
            scale,
            logit_cap,
            scores,
            halves,
            lse[part],
        )
        if sinks is not None:
            block.mul_(torch.sigmoid(lse[part] - sinks)[..., None])
        out[part] = block.div_(total)
    return out.masked_fill_(last[:, :, None] < 0, 0.0), lse


def _rows_at_once(q: torch.Tensor, k: int, budget_bytes: int) -> int:
    """Rows whose gathered latents fit the cache of a CPU, and whose temporaries fit the budget."""
    rows, heads, width = q.shape
    gathered = 4 * k * width
    everything = 2 * gathered + 12 * k * heads + 20 * heads * width
    step = budget_bytes // 2 // everything
    if q.device.type == "cpu":
        threads = min(torch.get_num_threads(), _MOST_THREADS)
        step = min(step, _GATHERED_BYTES * threads // gathered)
    return max(1, min(rows, step))


def _gather(
    kv_cache: torch.Tensor, slots: torch.Tensor, v_dim: int, scratch: torch.Tensor
) -> torch.Tensor:
    """Latents `[2n, k/2, D]` fp32 of `slots [n, k]`, written to `scratch`."""
    rows, k = slots.shape
    kv = scratch[: rows * k]
    records = kv_cache[:, 0]
    if kv_cache.dtype == torch.float32:
        torch.index_select(records, 0, slots.view(-1), out=kv)
    elif kv_cache.dtype == torch.uint8:
        dequantize_latent_into(records.index_select(0, slots.view(-1)), v_dim, kv)
    else:
        kv.copy_(records.index_select(0, slots.view(-1)))
    return kv.view(2 * rows, k // 2, -1)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    missing: torch.Tensor,
    scale: float,
    logit_cap: float,
    scores: torch.Tensor,
    halves: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unnormalised out `[n, H, v_dim]` fp32 and its divisor `[n, H, 1]`; fills `lse [n, H]`.

    `q [n, H, D]`, `kv [2n, k/2, D]`, `missing [n, k]`; `scores` and `halves` are scratch memory.
    """
    rows, heads, width = q.shape
    scores, halves = scores[: 2 * rows], halves[: 2 * rows]
    twice = torch.empty(rows, 2, heads, width, dtype=torch.float32, device=q.device)
    twice.copy_(q[:, None])
    twice = twice.view(2 * rows, heads, width)
    torch.baddbmm(scores, twice, kv.transpose(1, 2), beta=0, alpha=scale, out=scores)
    if logit_cap > 0:
        scores.div_(logit_cap).tanh_().mul_(logit_cap)
    scores.masked_fill_(missing.view(2 * rows, 1, -1), float("-inf"))
    by_row = scores.view(rows, 2, heads, -1)
    # Clamped, so that a row of -inf gives weights exp(-inf) and not exp(-inf + inf).
    peak = by_row.amax((1, 3), keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
    by_row.sub_(peak).exp_()
    total = by_row.sum((1, 3), keepdim=True)
    torch.add(total.log(), peak, out=lse.view(rows, 1, heads, 1))
    torch.bmm(scores, kv[:, :, : halves.shape[2]], out=halves)
    pairs = halves.view(rows, 2, heads, -1)
    # `total` is at least 1, but 0 where no score is finite: out is then 0, or NaN already.
    return pairs[:, 0].add_(pairs[:, 1]), total[:, 0].clamp_min(1e-30)


def _refuse(problem: Problem) -> str | None:
    if "batch_invariant" in problem.features and problem.device.backend != "cpu":
        return "a row's bits depend on its batch on a GPU, and deterministic=True forbids that"
    return None


SPARSE_MLA = Kernel("torch", "sparse_mla", _refuse, sparse_mla, batch_invariant=True)
