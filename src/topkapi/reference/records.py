"""How cached records are quantised, written and read back: the definition.

Plain torch, vectorised, without a host synchronisation, so the torch kernels use it as it is.
Knows the bytes of `layout/`, and nothing about pages being allocated or requests.

Formulas: index keys as in DeepSeek-V3.2's public inference code (e4m3, one ue8m0 scale a key);
latents as in FlashMLA's token-level fp8 format (e4m3, one fp32 scale `amax / 448` a group of 128).
"""

from __future__ import annotations

import torch

from topkapi.layout.index_key import fp8_page_views
from topkapi.layout.latent import LATENT_FP8

FP8_MAX = 448.0
_SMALLEST_AMAX = 1e-4
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rotate `[..., D]` by the Hadamard matrix of Sylvester's order, times `D^-1/2`.

    D must be a power of two (`ValueError`). Orthogonal and its own inverse; fp32 inside, the
    input's dtype outside. `<Hq, Hk> = <q, k>`, so it only changes what quantising loses.
    """
    size = x.shape[-1]
    if size & (size - 1) or size == 0:
        raise ValueError(f"hadamard: expected a power of two as the last size, got {size}")
    y = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, size)
    half = 1
    while half < size:
        pairs = y.view(-1, size // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((low + high, low - high), dim=2).view(-1, size)
        half *= 2
    return y.mul(size**-0.5).view(x.shape).to(x.dtype)


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """`2^ceil(log2(max(amax, 1e-4) / 448))` as fp32, exact to the bit (ue8m0).

    448 is 1.75 * 2^8, so the exponent is that of amax, less 8, plus one if its mantissa exceeds
    1.75: integer arithmetic on the bits, the same on every device.
    """
    amax = amax.float().nan_to_num(nan=float("inf"), posinf=float("inf"))  # NaN has bits of its own
    bits = amax.clamp_min(_SMALLEST_AMAX).contiguous().view(torch.int32)
    above = (bits & 0x7FFFFF) > 0x600000
    return (((bits >> 23) - 8 + above.int()) << 23).view(torch.float32)


def quantize_index_key(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[T, Di]` keys (or queries) to e4m3 with one power-of-two scale a row.

    Returns values `[T, Di]` float8_e4m3fn and scales `[T]` fp32 with `keys ~ values * scales`.
    An inf or NaN becomes NaN, in its own row alone.
    """
    keys = keys.float()
    scales = power_of_two_scale(keys.abs().amax(-1))
    return (keys / scales[:, None]).to(torch.float8_e4m3fn), scales


def dequantize_index_key(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`[T, Di]` float8_e4m3fn and `[T]` fp32 to `[T, Di]` fp32."""
    return values.float() * scales[:, None]


def quantize_latent(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Pack `latent [T, L]` and `rope [T, P]` into fp8 records `[T, W]` uint8 (656 for 512 + 64).

    Each group of 128 latent values (the last may be short) has the scale `amax / 448`, at least the
    smallest normal fp32, so an all-zero group stays zero. Rope values are kept in bf16.
    """
    tokens, latent_dim = latent.shape
    groups = LATENT_FP8.num_scales(latent_dim)
    padding = groups * LATENT_FP8.group - latent_dim
    grouped = torch.nn.functional.pad(latent.float(), (0, padding))
    grouped = grouped.view(tokens, groups, LATENT_FP8.group)
    largest = grouped.abs().amax(-1)
    # Not `/ FP8_MAX`: on a GPU torch would multiply by 1 / 448, which is another number.
    scales = (largest / torch.full_like(largest, FP8_MAX)).clamp_min(_SMALLEST_SCALE)
    scales = scales.masked_fill(scales.isnan(), float("nan"))  # one NaN: a GPU's has other bits
    values = (grouped / scales[:, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    parts = (
        values.view(tokens, groups * LATENT_FP8.group)[:, :latent_dim],
        scales.view(torch.uint8),
        rope.to(torch.bfloat16).contiguous().view(torch.uint8),
    )
    return torch.cat(parts, dim=1)


def dequantize_latent(records: torch.Tensor, latent_dim: int, rope_dim: int) -> torch.Tensor:
    """Unpack fp8 records `[T, W]` uint8 to `[T, L + P]` fp32."""
    tokens = records.shape[0]
    groups = LATENT_FP8.num_scales(latent_dim)
    scales_end = latent_dim + 4 * groups
    values = records[:, :latent_dim].contiguous().view(torch.float8_e4m3fn).float()
    scales = records[:, latent_dim:scales_end].contiguous().view(torch.float32)
    spread = scales.repeat_interleave(LATENT_FP8.group, dim=1)[:, :latent_dim]
    rope = records[:, scales_end:].contiguous().view(torch.bfloat16).float()
    return torch.cat((values * spread, rope.view(tokens, rope_dim)), dim=1)


def write_latent(
    kv_cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
) -> None:
    """Write `latent [T, L]` and `rope [T, P]` into the records `slots [T]` of `[slots, 1, W]`.

    A negative slot writes to the dummy slot 0. Quantises for a uint8 cache. Capture-safe.
    """
    if kv_cache.dtype == torch.uint8:
        records = quantize_latent(latent, rope)
    else:
        records = torch.cat((latent, rope), dim=1).to(kv_cache.dtype)
    kv_cache[slots.long().clamp_min(0), 0] = records


def gather_latent(
    kv_cache: torch.Tensor, slots: torch.Tensor, *, v_dim: int = 512, dtype: torch.dtype
) -> torch.Tensor:
    """Read records `slots [N]` as `[N, L + P]` of `dtype`, L = `v_dim`; slot -1 gives zeros.

    The slot behind a -1 is never mixed into the result, even if it holds NaN. Capture-safe.
    """
    records = kv_cache[slots.long().clamp_min(0), 0]
    if kv_cache.dtype == torch.uint8:
        rope_bytes = records.shape[1] - LATENT_FP8.bytes_per_token(v_dim, 0)
        records = dequantize_latent(records, v_dim, rope_bytes // LATENT_FP8.rope_bytes)
    return records.to(dtype).masked_fill((slots < 0)[:, None], 0.0)


def write_index_key(index_cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Write `keys [T, Di]` into slots `[T]` of an index cache, quantising if it is fp8.

    `index_cache` is `[slots, Di]` float, or uint8 `[pages, page * (Di + 4)]`, planar by page.
    A negative slot writes to the dummy slot 0. Capture-safe.
    """
    slots = slots.long().clamp_min(0)
    if index_cache.dtype != torch.uint8:
        index_cache[slots] = keys.to(index_cache.dtype)
        return
    page_size = index_cache.shape[1] // (keys.shape[1] + 4)
    page_keys, page_scales = fp8_page_views(index_cache, keys.shape[1], page_size)
    page, offset = slots // page_size, slots % page_size
    values, scales = quantize_index_key(keys)
    page_keys.view(torch.uint8)[page, offset] = values.view(torch.uint8)
    page_scales[page, offset] = scales


def read_index_key(
    index_cache: torch.Tensor, slots: torch.Tensor, index_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read slots `[N]` of an index cache: values `[N, Di]` as stored, and `[N]` fp32 scales.

    The scales are None for an unquantised cache; fp8 values come as float8_e4m3fn.
    """
    slots = slots.long()
    if index_cache.dtype != torch.uint8:
        return index_cache[slots], None
    page_size = index_cache.shape[1] // (index_dim + 4)
    keys, scales = fp8_page_views(index_cache, index_dim, page_size)
    page, offset = slots // page_size, slots % page_size
    values = keys.view(torch.uint8)[page, offset].view(torch.float8_e4m3fn)
    return values, scales[page, offset]
