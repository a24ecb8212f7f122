"""Writing and reading cached records, as public functions.

Checks arguments, chooses a kernel, launches it. The formats are in `layout/`, the formulas in
`reference.records`.
"""

from __future__ import annotations

from typing import cast

import torch

from topkapi.errors import ShapeError
from topkapi.layout.index_key import index_key_layout
from topkapi.layout.latent import LATENT_FP8, latent_layout
from topkapi.ops.registry import OPS, problem_for
from topkapi.shapes import FLOATS, INTS, check

CACHE_DTYPES = (*FLOATS, torch.uint8)


def check_kv_cache(
    kv_cache: torch.Tensor, latent_dim: int, rope_dim: int, like: torch.Tensor
) -> str:
    """Hold a latent cache to `[slots, 1, W]`, each record one piece of memory (records may lie
    apart); return the name of its layout.
    """
    check("kv_cache", kv_cache, "slots 1 W", {}, dtypes=CACHE_DTYPES, like=like)
    layout = latent_layout(kv_cache.dtype)
    width = layout.width(latent_dim, rope_dim)
    if kv_cache.shape[2] != width:
        raise ShapeError(
            f"kv_cache: expected W={width} for {layout.name} records of latent {latent_dim} and "
            f"rope {rope_dim}, got shape {list(kv_cache.shape)}"
        )
    if kv_cache.stride(2) != 1 and width > 1:
        raise ShapeError(
            f"kv_cache: expected records without gaps, got strides {list(kv_cache.stride())}"
        )
    return layout.name


@torch.no_grad()
def write_latent(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    *,
    kernel: str = "auto",
) -> None:
    """Write T tokens into the latent cache, quantising if it holds fp8 records.

    Args:
        kv_cache: `[slots, 1, W]`, fp32, bf16, fp16, or uint8 fp8 records (656 for 512 + 64).
        slots: `[T]` int; a negative one writes to the dummy slot 0.
        latent: `[T, L]` float.
        rope: `[T, P]` float.

    Never synchronises; safe inside capture. Raises `ShapeError`, `KernelRefusedError`.
    """
    sizes: dict[str, int] = {}
    check("slots", slots, "T", sizes, dtypes=INTS)
    check("latent", latent, "T L", sizes, dtypes=FLOATS, like=slots)
    check("rope", rope, "T P", sizes, dtypes=FLOATS, like=slots)
    cache_format = check_kv_cache(kv_cache, sizes["L"], sizes["P"], like=slots)
    problem = problem_for(
        "write_latent",
        latent,
        cache_format=cache_format,
        latent_dim=sizes["L"],
        rope_dim=sizes["P"],
    )
    OPS["write_latent"].choose(problem, kernel).launch(kv_cache, slots, latent, rope)


@torch.no_grad()
def write_index_key(
    index_cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, *, kernel: str = "auto"
) -> None:
    """Write T index keys, quantising if the cache is fp8.

    Args:
        index_cache: `[slots, Di]` float, or fp8 uint8 `[pages, page * (Di + 4)]`.
        slots: `[T]` int; a negative one writes to the dummy slot 0.
        keys: `[T, Di]` float.

    Never synchronises; safe inside capture. Raises `ShapeError`, `KernelRefusedError`.
    """
    sizes: dict[str, int] = {}
    check("slots", slots, "T", sizes, dtypes=INTS)
    check("keys", keys, "T Di", sizes, dtypes=FLOATS, like=slots)
    cache_format = check_index_cache(index_cache, sizes["Di"], like=slots)
    problem = problem_for("write_index_key", keys, cache_format=cache_format, index_dim=sizes["Di"])
    OPS["write_index_key"].choose(problem, kernel).launch(index_cache, slots, keys)


def check_index_cache(index_cache: torch.Tensor, index_dim: int, like: torch.Tensor) -> str:
    """Hold an index cache to `[slots, Di]` or its fp8 pages; return the name of its layout."""
    check("index_cache", index_cache, "* *", {}, dtypes=CACHE_DTYPES, like=like)
    layout = index_key_layout(index_cache.dtype)
    if not layout.scale_bytes:
        check("index_cache", index_cache, "slots Di", {"Di": index_dim})
    elif index_cache.shape[1] % (index_dim + 4) or index_cache.shape[1] == 0:
        raise ShapeError(
            f"index_cache: expected pages of a multiple of Di + 4 = {index_dim + 4} bytes, "
            f"got shape {list(index_cache.shape)}"
        )
    whole = index_cache.stride(1) == 1 if layout.scale_bytes else index_cache.is_contiguous()
    if not whole:
        raise ShapeError(
            f"index_cache: expected {'pages' if layout.scale_bytes else 'keys'} without gaps, "
            f"got strides {list(index_cache.stride())}"
        )
    return layout.name


@torch.no_grad()
def gather_latent(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    v_dim: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    kernel: str = "auto",
) -> torch.Tensor:
    """Read N tokens of the latent cache as `[N, L + P]` of `dtype`, dequantised.

    Args:
        kv_cache: `[slots, 1, W]`, as in `write_latent`.
        slots: `[N]` int; -1 gives zeros.
        v_dim: L.

    Never synchronises; safe inside capture. Raises `ShapeError`, `KernelRefusedError`.
    """
    check("slots", slots, "N", {}, dtypes=INTS)
    check("kv_cache", kv_cache, "slots 1 W", {}, dtypes=CACHE_DTYPES, like=slots)
    width = kv_cache.shape[2]
    rope_dim = width - v_dim
    if kv_cache.dtype == torch.uint8:
        rope_dim = (width - LATENT_FP8.bytes_per_token(v_dim, 0)) // LATENT_FP8.rope_bytes
    if v_dim < 1 or rope_dim < 0:
        raise ShapeError(f"v_dim: expected 1 to what a record of W={width} holds, got {v_dim}")
    cache_format = check_kv_cache(kv_cache, v_dim, rope_dim, like=slots)
    problem = problem_for(
        "gather_latent", slots, cache_format=cache_format, latent_dim=v_dim, rope_dim=rope_dim
    )
    launch = OPS["gather_latent"].choose(problem, kernel).launch
    return cast("torch.Tensor", launch(kv_cache, slots, v_dim=v_dim, dtype=dtype))
