"""What peers want of a selection that ours does not say: no holes, whole tiles, other records.

Nothing here synchronises; all of it is safe inside capture. Knows no package.
"""

from __future__ import annotations

import torch

from topkapi.device import device_info
from topkapi.dispatch import Problem
from topkapi.kernels import torch_cpu
from topkapi.kernels import triton as triton_kernels
from topkapi.layout.latent import latent_layout

_GATHERS = tuple(
    kernel
    for kernel in (*triton_kernels.KERNELS, *torch_cpu.KERNELS)
    if kernel.op == "gather_latent"
)


def padded_width(slots: torch.Tensor, multiple: int) -> torch.Tensor:
    """`slots [R, K]` as contiguous int32, K filled up to a multiple with -1; at least one tile."""
    width = max(1, -(-slots.shape[1] // multiple)) * multiple
    slots = slots.to(torch.int32)
    if width != slots.shape[1]:
        slots = torch.nn.functional.pad(slots, (0, width - slots.shape[1]), value=-1)
    return slots.contiguous()


def padded_heads(q: torch.Tensor, heads: int) -> torch.Tensor:
    """`q [R, H, D]` with zero heads up to `heads`."""
    missing = heads - q.shape[1]
    return torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q.contiguous()


def compacted(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A selection without holes: `slots [R, K]` int32 and how many of them count, `[R]` int32.

    The order is kept. What is past the count repeats the row's highest slot, so that a kernel that
    reads it under a mask finds no other row's NaN; an empty row repeats slot 0. One launch on GPUs.
    """
    if slots.is_cuda and device_info(slots.device).has_triton and slots.numel():
        from topkapi.kernels.external.compaction import compact

        return compact(slots)
    valid = slots >= 0
    counts = valid.sum(1, dtype=torch.int32)
    place = valid.cumsum(1, dtype=torch.int32).sub_(1)
    highest = slots.amax(1, keepdim=True).clamp_min(0) if slots.shape[1] else slots
    target = torch.cat((highest.expand_as(slots), highest), 1).to(torch.int32)
    place = torch.where(valid, place, slots.shape[1]).long()
    target.scatter_(1, place, torch.where(valid, slots, highest).to(torch.int32))
    return target[:, : slots.shape[1]].contiguous(), counts


def flattened(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row's slots one after another: `[R * K]` int32 and where each row begins, `[R+1]`
    int32. The entries past the last row's end are 0.
    """
    rows, width = slots.shape
    valid = slots >= 0
    begins = torch.zeros(rows + 1, dtype=torch.int32, device=slots.device)
    torch.cumsum(valid.sum(1), 0, dtype=torch.int32, out=begins[1:])
    place = valid.cumsum(1).sub_(1) + begins[:-1, None]
    flat = torch.zeros(rows * width + 1, dtype=torch.int32, device=slots.device)
    # Holes all land in one entry that nobody reads.
    place = torch.where(valid, place, rows * width)
    flat.scatter_(0, place.flatten(), torch.where(valid, slots, 0).to(torch.int32).flatten())
    return flat[: rows * width], begins


def gathered(
    kv_cache: torch.Tensor, slots: torch.Tensor, v_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Only what `slots [R, K]` select, dequantised: records `[R * K, 1, D]` of `dtype`, and slots
    `[R, K]` int32 into them, -1 kept.
    """
    layout = latent_layout(kv_cache.dtype)
    problem = Problem(
        "gather_latent",
        device_info(slots.device),
        slots.dtype,
        cache_format=layout.name,
        latent_dim=v_dim,
        rope_dim=(kv_cache.shape[2] - layout.width(v_dim, 0))
        * layout.dtype.itemsize
        // layout.rope_bytes,
    )
    gather = next(kernel for kernel in _GATHERS if kernel.refuse(problem) is None)
    records = gather.launch(kv_cache, slots.flatten(), v_dim=v_dim, dtype=dtype)
    places = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device)
    return records[:, None], torch.where(slots < 0, -1, places.view(slots.shape))


def rows_within(budget_bytes: int, slots: torch.Tensor, width: int, itemsize: int) -> int:
    """How many rows' selected records of `width` values fit a budget, at least one."""
    return max(1, budget_bytes // max(1, slots.shape[1] * width * itemsize))


def emptied(
    out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `empty [R]` bool of out `[R, H, v]` and lse `[R, H]` as the contract has them."""
    out.masked_fill_(empty[:, None, None], 0.0)
    return out, lse.masked_fill(empty[:, None], float("-inf"))
