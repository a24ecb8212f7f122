"""How the results of several programs that share a row become one, on any GPU.

Each leaves its part of the output and lse in base 2; an attention sink counts here, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from topkapi.kernels.triton.softmax import LN2, LOG2E, LOWEST

# Programs of the merge that run at once on an H200, eight on each of 132 SMs. A grid of more was
# slowed down by the trigger. A limit of speed alone, so one number for all.
ONE_WAVE = tl.constexpr(1056)


@triton.jit(do_not_specialize=["rows_stride", "splits"])
def _combine(
    partial, partial_lse2, sinks, out, lse, rows_stride, splits,
    H: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_L dims of one (row, head)'s partial results.

    Each weighs exp2(lse2 - their maximum); one that saw nothing counts as zero whatever it holds.
    Its values are loaded all the same, so that they need not wait for lse2.
    """
    place = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    split = tl.arange(0, BLOCK_SPLITS)
    share = split.to(tl.int64) * rows_stride + place
    there = split < splits
    if EARLY:
        gdc_wait()
        if tl.num_programs(0) * tl.num_programs(1) <= ONE_WAVE:
            gdc_launch_dependents()
    value = tl.load(
        partial + share[:, None] * L + dim[None, :],
        mask=there[:, None] & (dim < L)[None, :],
        other=0.0,
    )
    lse2 = tl.load(partial_lse2 + share, mask=there, other=float("-inf"))
    best = tl.maximum(tl.max(lse2, axis=0), LOWEST)
    weight = tl.exp2(lse2 - best)
    total = tl.sum(weight, axis=0)
    denominator = total
    if HAS_SINKS:
        denominator += tl.exp2(tl.load(sinks + place % H).to(tl.float32) * LOG2E - best)
    inverse = tl.where(total != 0.0, 1.0 / denominator, 0.0)
    # Chosen after the product: Triton would make a choice among loaded values a mask of the load.
    value = value * (weight * inverse)[:, None]
    value = tl.where((lse2 != float("-inf"))[:, None], value, 0.0)
    tl.store(out + place * L + dim, tl.sum(value, axis=0).to(out.dtype.element_ty), mask=dim < L)
    if tl.program_id(1) == 0:
        merged = (best + tl.log2(total)) * LN2
        tl.store(lse + place, tl.where(total != 0.0, merged, float("-inf")))


def combine(
    partial: torch.Tensor,
    partial_lse2: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """Merge `partial [splits, R, H, L]` fp32 and their base-2 lse into `out` and `lse`.

    `early` (sm90 on) launches before the kernel that writes them has ended, and waits there. Then a
    grid of one wave lets its successor start in the same way: one that is launched early waits for
    this merge before it reads or writes anything, as all ours do; any other starts after it.
    """
    splits, rows, heads, latent = partial.shape
    block_splits = triton.next_power_of_2(splits)
    # 32 values a thread, all under way at once: for fewer registers they would be loaded in turns.
    block = max(16, min(triton.next_power_of_2(latent), 4096 // block_splits))
    options = {"launch_pdl": True, "maxnreg": 64} if early else {}
    _combine[(rows * heads, triton.cdiv(latent, block))](
        partial, partial_lse2, lse if sinks is None else sinks, out, lse, rows * heads, splits,
        H=heads, L=latent, BLOCK_L=block, BLOCK_SPLITS=block_splits, HAS_SINKS=sinks is not None,
        EARLY=early, num_warps=4, **options,
    )  # fmt: skip
