"""How are a token's experts computed without waiting for the device, and with bits of their own?

Transformers' loop over experts asks the device which ones were chosen, twice for each: it can
neither be captured in a CUDA graph nor run ahead. Two replacements, each for one model's modules:

- `prepare_row_invariant`, for runs that must be repeatable bit by bit: every expert over tiles of a
  fixed number of rows, one after another in ascending order. On a GPU few rows go through each
  expert that could have been chosen, those that did not choose it left out; many are sorted by
  expert, which waits once.
- `prepare_capturable`, where Transformers' grouped products wait (any dtype but bf16): few rows
  take a copy of the weights they chose, a batched product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import batched_mm_experts_forward

# Rows that go through every expert at once: one tile of `row_invariant` on a GPU.
_FEW_ROWS = 128
# What the weights that rows have chosen may take, copied one row after another.
_COPY_BYTES = 2**30

Experts = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def prepare_row_invariant(model: Any) -> None:
    """Replace the experts' forward, for good. Row-invariant inside of `RowInvariant` alone.

    Experts of another build keep Transformers' loop.
    """
    model.set_experts_implementation("eager")
    _replace(model, row_invariant_experts)


def prepare_capturable(model: nn.Module) -> None:
    """Replace the experts' forward on a GPU, for good, unless Transformers' own can be captured."""
    weight = next(model.parameters())
    if weight.is_cuda and weight.dtype != torch.bfloat16:
        _replace(model, capturable_experts)


def _replace(model: nn.Module, forward: Experts) -> None:
    for module in model.modules():
        if _is_plain(module):
            module.forward = partial(forward, module)


def _is_plain(module: Any) -> bool:
    """Whether these are stacked, gated experts and nothing more: fp8 ones have scales, too."""
    weight = getattr(module, "gate_up_proj", None)
    more = ("has_bias", "is_transposed", "has_post_expert_norm")
    return (
        isinstance(weight, nn.Parameter)
        and weight.dtype.itemsize > 1
        and not any(getattr(module, name, False) for name in more)
    )


def row_invariant_experts(
    experts: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`x [T, hidden]`, experts chosen `[T, k]` and their weights `[T, k]`, to `[T, hidden]`.

    A GPU is waited for above 128 rows. An index past the last expert is nobody's.
    """
    few = x.is_cuda and x.shape[0] <= _FEW_ROWS
    return (over_all_rows if few else over_chosen_rows)(experts, x, top_k_index, top_k_weights)


def over_all_rows(
    experts: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All rows through as many experts as could have been chosen. Capture-safe; never syncs."""
    count = experts.gate_up_proj.shape[0]
    chose = top_k_index[:, :, None] == torch.arange(count, device=x.device)
    weights = torch.where(chose, top_k_weights[:, :, None], 0).sum(1)
    mine = chose.any(1)
    # The chosen ones in ascending order, and others after them, which nobody counts.
    order = torch.argsort(~mine.any(0), stable=True)[: min(count, top_k_index.numel())]
    out = torch.zeros_like(x)
    for expert in torch.split(order, 1):
        gate_up = experts.gate_up_proj.index_select(0, expert)[0]
        down = experts.down_proj.index_select(0, expert)[0]
        part = _expert(experts, x, gate_up, down) * weights.index_select(1, expert)
        out = torch.where(mine.index_select(1, expert), out + part.to(out.dtype), out)
    return out


def over_chosen_rows(
    experts: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Each expert over the rows that chose it. The host waits once, for their numbers."""
    count = experts.gate_up_proj.shape[0]
    flat = top_k_index.flatten()
    order = torch.argsort(flat, stable=True)
    rows, weights = order // top_k_index.shape[1], top_k_weights.flatten()[order]
    counts = (flat == torch.arange(count, device=x.device)[:, None]).sum(1)
    out = torch.zeros_like(x)
    for expert, (first, last) in enumerate(pairwise([0, *accumulate(counts.tolist())])):
        if first == last:
            continue
        at = rows[first:last]
        gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
        part = _expert(experts, x[at], gate_up, down) * weights[first:last, None]
        out[at] = out[at] + part.to(out.dtype)
    return out


def capturable_experts(
    experts: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As above. Capture-safe where the copied weights take at most 1 GiB."""
    one = experts.gate_up_proj[0].nbytes + experts.down_proj[0].nbytes
    if top_k_index.numel() * one > _COPY_BYTES:
        whole: torch.Tensor = type(experts).forward(experts, x, top_k_index, top_k_weights)
        return whole
    few: torch.Tensor = batched_mm_experts_forward(experts, x, top_k_index, top_k_weights)
    return few


def _expert(
    experts: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """`x [n, hidden]` through one gated expert."""
    gate, up = nn.functional.linear(x, gate_up).chunk(2, dim=-1)
    return nn.functional.linear(experts.act_fn(gate) * up, down)
