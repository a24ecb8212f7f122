"""Gathering index keys inside a kernel: plain rows, or fp8 pages with their scales."""

from __future__ import annotations

import triton
import triton.language as tl

from topkapi.kernels.triton.e4m3 import decode


@triton.jit
def load_keys(
    index_cache, slot, valid, PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys `[BLOCK_S, BLOCK_D]` of DTYPE and scales `[BLOCK_S]`, zero where not valid."""
    dim = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dim < D)[None, :]
    slot = tl.where(valid, slot, 0)
    if FP8:
        page = (slot // PAGE_SIZE).to(tl.int64)
        offset = slot % PAGE_SIZE
        place = page * PAGE_BYTES + offset * D
        code = tl.load(index_cache + place[:, None] + dim[None, :], mask=mask, other=0)
        scales = (index_cache + PAGE_SIZE * D).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + page * (PAGE_BYTES // 4) + offset, mask=valid, other=0.0)
        if tl.float8e4nv == DTYPE:
            key = code.to(tl.float8e4nv, bitcast=True)
        else:
            key = decode(code, NATIVE_FP8).to(DTYPE)
    else:
        place = slot.to(tl.int64) * D
        key = tl.load(index_cache + place[:, None] + dim[None, :], mask=mask, other=0.0)
        key = key.to(DTYPE)
        scale = tl.full([slot.shape[0]], 1.0, tl.float32)
    return key, scale
