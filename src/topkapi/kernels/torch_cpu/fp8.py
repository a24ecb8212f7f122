"""Reading fp8 records quickly on a CPU, where torch's cast from e4m3 is slow.

The formats are in `layout/`; `reference.records` reads the same bytes to the same values.
"""

from __future__ import annotations

import torch

from topkapi.layout.index_key import fp8_page_views
from topkapi.layout.latent import LATENT_FP8


def e4m3_to_fp32(codes: torch.Tensor) -> torch.Tensor:
    """`[...]` uint8 codes, contiguous, as fp32: by lookup on a CPU, which is 4 times faster."""
    if codes.device.type != "cpu":
        return codes.view(torch.float8_e4m3fn).float()
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return table.index_select(0, codes.view(-1).int()).view(codes.shape)


def dequantize_latent_into(records: torch.Tensor, latent_dim: int, out: torch.Tensor) -> None:
    """Unpack fp8 records `[N, W]` uint8 into `out [N, L + P]` fp32."""
    tokens = records.shape[0]
    group = LATENT_FP8.group
    scales_end = latent_dim + 4 * LATENT_FP8.num_scales(latent_dim)
    values = e4m3_to_fp32(records[:, :latent_dim].contiguous())
    scales = records[:, latent_dim:scales_end].contiguous().view(torch.float32)
    whole = latent_dim // group
    if whole:
        torch.mul(
            values[:, : whole * group].view(tokens, whole, group),
            scales[:, :whole, None],
            out=out[:, : whole * group].view(tokens, whole, group),
        )
    if latent_dim % group:
        rest = slice(whole * group, latent_dim)
        torch.mul(values[:, rest], scales[:, whole:], out=out[:, rest])
    out[:, latent_dim:] = records[:, scales_end:].contiguous().view(torch.bfloat16)


def read_index_keys(
    index_cache: torch.Tensor, slots: torch.Tensor, index_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[N, Di]` fp32, unscaled, and scales `[N]` fp32 of an fp8 cache. Synchronises.

    Where `slots [N]` int64 go through whole pages in order, pages are copied, not single keys.
    """
    page_size = index_cache.shape[1] // (index_dim + 4)
    if slots.shape[0] % page_size == 0:
        grid = slots.view(-1, page_size)
        first = grid[:, :1] // page_size * page_size
        if bool((grid == first + torch.arange(page_size, device=slots.device)).all()):
            pages = index_cache.index_select(0, grid[:, 0] // page_size)
            codes, scales = pages.tensor_split((page_size * index_dim,), dim=1)
            keys = e4m3_to_fp32(codes.contiguous().view(-1, index_dim))
            return keys, scales.contiguous().view(torch.float32).view(-1)
    page_keys, page_scales = fp8_page_views(index_cache, index_dim, page_size)
    page, offset = slots // page_size, slots % page_size
    codes = page_keys.view(torch.uint8)[page, offset]
    return e4m3_to_fp32(codes), page_scales[page, offset]
