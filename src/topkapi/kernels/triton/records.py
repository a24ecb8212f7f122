"""Writing cached records, quantised if the cache is fp8, and reading latents back.

    latent:  scale_g = amax(|latent[128 g : 128 g + 128]|) / 448, at least the smallest normal fp32
             value = e4m3(latent / scale_g); rope is kept in bf16
    key:     scale = 2^ceil(log2(max(amax(|key|), 1e-4) / 448)); value = e4m3(key / scale)

One program quantises and scatters (or gathers) one token: one launch for a batch, and the same bits
as `reference.records`. A negative slot writes to the dummy slot 0; read, it gives zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.e4m3 import decode, encode
from topkapi.kernels.triton.target import native_fp8, refuse_device, target_of
from topkapi.layout.latent import LATENT_FP8, latent_layout


@triton.jit
def largest(values, axis: tl.constexpr, spoiled: tl.constexpr):
    """max(|values|) along an axis, or `spoiled` where there is a NaN (which tl.max would skip)."""
    has_nan = tl.max((values != values).to(tl.int32), axis=axis) > 0
    return tl.where(has_nan, float(spoiled), tl.max(tl.abs(values), axis=axis))


@triton.jit
def power_of_two_scale(amax):
    """`2^ceil(log2(max(amax, 1e-4) / 448))`, to the bit `reference.power_of_two_scale`."""
    # 448 is 1.75 * 2^8: the exponent of amax, less 8, plus one if its mantissa is above 1.75.
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    raised = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return (((bits >> 23) - 8 + raised) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_bits(value):
    """fp32 to the bits of bf16, to nearest even; one NaN for all, the same on every device."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    sign = (bits >> 16) & 0x8000
    return tl.where(value == value, rounded, sign | 0x7FC0).to(tl.uint16)


@triton.jit(do_not_specialize=["latent_stride", "rope_stride"])
def _write_latent(
    kv_cache, slots, latent, rope, latent_stride, rope_stride,
    L: tl.constexpr, P: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slots + token).to(tl.int64), 0)
    record = kv_cache + slot * W
    group = tl.arange(0, GROUPS)
    dim = group[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    value = tl.load(latent + token * latent_stride + dim, mask=dim < L, other=0.0)
    rope_dim = tl.arange(0, BLOCK_P)
    turned = tl.load(rope + token * rope_stride + rope_dim, mask=rope_dim < P, other=0.0)
    if GROUP == 0:
        element: tl.constexpr = kv_cache.dtype.element_ty
        tl.store(record + dim, value.to(element), mask=dim < L)
        tl.store(record + L + rope_dim, turned.to(element), mask=rope_dim < P)
    else:
        value = value.to(tl.float32)  # [GROUPS, SPAN]
        scale = tl.div_rn(largest(value, 1, "nan"), 448.0)
        scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
        code = encode(tl.div_rn(value, tl.broadcast_to(scale[:, None], [GROUPS, SPAN])))
        tl.store(record + dim, code, mask=dim < L)
        # One NaN for all devices: a GPU's own has other bits than the host's.
        bits = tl.where(scale == scale, scale.to(tl.int32, bitcast=True), 0x7FC00000)
        scales = (record + L).to(tl.pointer_type(tl.int32))
        tl.store(scales + group, bits, mask=group * SPAN < L)
        turned_at = (record + L + 4 * ((L + GROUP - 1) // GROUP)).to(tl.pointer_type(tl.uint16))
        if rope.dtype.element_ty == tl.bfloat16:
            turned_bits = turned.to(tl.uint16, bitcast=True)
        else:
            turned_bits = _bf16_bits(turned.to(tl.float32))
        tl.store(turned_at + rope_dim, turned_bits, mask=rope_dim < P)


@triton.jit(do_not_specialize=["keys_stride"])
def _write_index_key(
    index_cache, slots, keys, keys_stride, PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slots + token).to(tl.int64), 0)
    dim = tl.arange(0, BLOCK_D)
    value = tl.load(keys + token * keys_stride + dim, mask=dim < D, other=0.0)
    if FP8:
        value = value.to(tl.float32)
        scale = power_of_two_scale(largest(value, 0, "inf"))
        page = index_cache + (slot // PAGE_SIZE) * PAGE_BYTES
        offset = slot % PAGE_SIZE
        tl.store(page + offset * D + dim, encode(value / scale), mask=dim < D)
        tl.store((page + PAGE_SIZE * D + offset * 4).to(tl.pointer_type(tl.float32)), scale)
    else:
        tl.store(index_cache + slot * D + dim, value.to(index_cache.dtype.element_ty), mask=dim < D)


@triton.jit
def _gather_latent(
    kv_cache, slots, out,
    L: tl.constexpr, P: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    there = slot >= 0
    record = kv_cache + tl.maximum(slot, 0) * W
    dim = tl.arange(0, BLOCK_L)
    rope_dim = tl.arange(0, BLOCK_P)
    mask = there & (dim < L)
    rope_mask = there & (rope_dim < P)
    if GROUP == 0:
        value = tl.load(record + dim, mask=mask, other=0.0)
        turned = tl.load(record + L + rope_dim, mask=rope_mask, other=0.0)
    else:
        code = tl.load(record + dim, mask=mask, other=0)
        scales = (record + L).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + dim // GROUP, mask=mask, other=0.0)
        value = decode(code, NATIVE_FP8).to(tl.float32) * scale
        turned_at = (record + L + 4 * ((L + GROUP - 1) // GROUP)).to(tl.pointer_type(tl.uint16))
        turned = tl.load(turned_at + rope_dim, mask=rope_mask, other=0).to(tl.uint32)
        turned = (turned << 16).to(tl.float32, bitcast=True)
    line = out + token * (L + P)
    element: tl.constexpr = out.dtype.element_ty
    tl.store(line + dim, value.to(element), mask=dim < L)
    tl.store(line + L + rope_dim, turned.to(element), mask=rope_dim < P)


def write_latent(
    kv_cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
) -> None:
    """See `reference.write_latent`. One launch; never synchronises; safe inside capture."""
    tokens, latent_dim = latent.shape
    rope_dim = rope.shape[1]
    if tokens == 0:
        return
    latent = latent if latent.stride(1) == 1 else latent.contiguous()
    rope = rope if rope.stride(1) == 1 else rope.contiguous()
    layout = latent_layout(kv_cache.dtype)
    padded = triton.next_power_of_2(latent_dim)
    span = min(padded, layout.group) if layout.group else padded
    _write_latent[(tokens,)](
        kv_cache, slots.contiguous(), latent, rope, latent.stride(0), rope.stride(0),
        L=latent_dim, P=rope_dim, W=kv_cache.stride(0), GROUP=layout.group,
        GROUPS=padded // span, SPAN=span, BLOCK_P=triton.next_power_of_2(max(rope_dim, 1)),
        num_warps=4,
    )  # fmt: skip


def write_index_key(index_cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """See `reference.write_index_key`. One launch; never synchronises; safe inside capture."""
    tokens, index_dim = keys.shape
    if tokens == 0:
        return
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    fp8 = index_cache.dtype == torch.uint8
    _write_index_key[(tokens,)](
        index_cache, slots.contiguous(), keys, keys.stride(0),
        PAGE_SIZE=index_cache.shape[1] // (index_dim + 4) if fp8 else 1,
        PAGE_BYTES=index_cache.stride(0), D=index_dim,
        BLOCK_D=triton.next_power_of_2(index_dim), FP8=fp8, num_warps=1,
    )  # fmt: skip


def gather_latent(
    kv_cache: torch.Tensor, slots: torch.Tensor, *, v_dim: int = 512, dtype: torch.dtype
) -> torch.Tensor:
    """See `reference.gather_latent`. One launch; never synchronises; safe inside capture."""
    layout = latent_layout(kv_cache.dtype)
    rope_dim = kv_cache.shape[2] - v_dim
    if layout is LATENT_FP8:
        rope_dim = (kv_cache.shape[2] - layout.bytes_per_token(v_dim, 0)) // layout.rope_bytes
    out = torch.empty(slots.shape[0], v_dim + rope_dim, dtype=dtype, device=kv_cache.device)
    if slots.shape[0] == 0:
        return out
    _gather_latent[(slots.shape[0],)](
        kv_cache, slots.contiguous(), out, L=v_dim, P=rope_dim, W=kv_cache.stride(0),
        GROUP=layout.group, BLOCK_L=triton.next_power_of_2(v_dim),
        BLOCK_P=triton.next_power_of_2(max(rope_dim, 1)),
        NATIVE_FP8=native_fp8(target_of(kv_cache)), num_warps=4,
    )  # fmt: skip
    return out


def _refuse(problem: Problem) -> str | None:
    reason = refuse_device(problem)
    if reason is not None:
        return reason
    if problem.cache_format == "fp8" and (problem.latent_dim % 4 or problem.rope_dim % 2):
        return "addresses fp8 records whose latent is a multiple of 4 values and whose rope is even"
    if problem.cache_format == "fp8" and problem.index_dim % 4:
        return "addresses fp8 keys whose dims are a multiple of 4"
    return None


WRITE_LATENT = Kernel("triton", "write_latent", _refuse, write_latent)
WRITE_INDEX_KEY = Kernel("triton", "write_index_key", _refuse, write_index_key)
GATHER_LATENT = Kernel("triton", "gather_latent", _refuse, gather_latent)
