"""Attention over selected latents in TileLang, prefill and decode.

    s_j = scale * (q[r, h] . kv[slot_j])          (then cap * tanh(s_j / cap) if capped)
    out = sum_j exp(s_j) * latent[slot_j] / (sum_j exp(s_j) + exp(sink[h]))
    lse = log(sum_j exp(s_j))

Two programs compute it: `sparse_mla_wide` 64 heads of a row over 16-bit records on Hopper,
`sparse_mla_narrow` 16 or 32 over any records on NVIDIA GPUs from sm80. With few rows several
programs share a row's slots, and `combine` merges what they leave. TileLang compiles a program at
its first launch (up to a minute, then kept on disk); head counts, dims and dtype are compiled in,
rows, slots and widths are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from topkapi.device import DeviceInfo, device_info
from topkapi.dispatch import Kernel, Problem
from topkapi.layout.latent import LATENT_FP8

# The versions whose language the programs are written in: from this one, within its 0.1 line.
OLDEST = (0, 1, 15)
# The query dtype that goes with each cache format.
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Bounds are kept by the launcher, and synchronisation by the programs.
PASSES = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_warp_specialized": True,
    "tl.disable_tma_lower": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.enable_fast_math": True,
}


@dataclass(frozen=True)
class Tile:
    """How the work is cut: heads and tokens a tile, threads, ring stages, programs an SM holds.

    `wide` takes the program for Hopper, whose tokens are those of a pair of tiles.
    """

    heads: int
    tokens: int
    threads: int
    stages: int
    per_sm: int
    wide: bool = False


# Best first, 32 heads before 16. A warp scores at least 8 tokens.
NARROW_TILES = (
    Tile(32, 64, 256, 2, 1),
    Tile(32, 32, 128, 2, 1),
    Tile(16, 32, 128, 2, 2),
    Tile(16, 32, 128, 2, 1),
    Tile(16, 16, 64, 2, 1),
)


def choose_tile(device: DeviceInfo, heads: int, latent: int, rope: int, fp8: bool = False) -> Tile:
    """The cut for `heads` heads over records of `latent` and `rope` values."""
    if device.arch == 90 and heads > 32 and (latent, rope) == (512, 64) and not fp8:
        return Tile(64, 128, 384, 1, 1, wide=True)
    tiles = NARROW_TILES[2 if heads <= 16 else 0 :]
    for tile in tiles:
        room = device.shared_memory // tile.per_sm - 1024
        if shared_bytes(tile, latent, rope, fp8) <= room:
            return tile
    return tiles[-1]


def shared_bytes(tile: Tile, latent: int, rope: int, fp8: bool) -> int:
    """Shared memory of a program that is not wide: queries, ring, weights and what warps exchange;
    for fp8 records the tile they become, too.
    """
    row = 2 * (latent + rope)
    record = latent + 4 * -(-latent // 128) + 2 * rope if fp8 else row
    dequantised = 2 * tile.tokens * latent if fp8 else 0
    exchanged = 2 * tile.heads * tile.tokens + tile.heads * tile.threads + 1024
    return tile.heads * row + tile.stages * tile.tokens * record + dequantised + exchanged


def choose_splits(
    device: DeviceInfo,
    tile: Tile,
    rows: int,
    heads: int,
    selected: int,
    row_bytes: int,
    budget: int,
) -> int:
    """How many programs share one row's slots: enough to fill the device, within the budget."""
    programs = rows * -(-heads // tile.heads)
    wanted = max(1, device.num_sms * tile.per_sm // max(programs, 1))
    useful = max(1, selected // max(128, 2 * tile.tokens if not tile.wide else tile.tokens))
    affordable = max(1, budget // max(rows * row_bytes, 1))
    return min(wanted, useful, affordable, 64)


@lru_cache(maxsize=256)
def _compiled(
    arch: int, tile: Tile, heads: int, latent: int, rope: int, dtype: str,
    split: bool, has_sinks: bool, has_cap: bool, record_bytes: int,
) -> Callable[..., Any]:  # fmt: skip
    """The attention program for these sizes. Imports TileLang, and compiles at the first call."""
    sizes = (heads, latent, rope, dtype, split, has_sinks, has_cap)
    if tile.wide:
        from topkapi.kernels.tilelang.sparse_mla_wide import attend_wide

        return _compile(attend_wide(*sizes), arch)
    from topkapi.kernels.tilelang.sparse_mla_narrow import attend_narrow

    program = attend_narrow(
        *sizes, tile.heads, tile.tokens, tile.stages, tile.threads, record_bytes
    )
    return _compile(program, arch)


@lru_cache(maxsize=64)
def _combined(
    arch: int, heads: int, latent: int, dtype: str, has_sinks: bool
) -> Callable[..., Any]:
    """The program that merges partial results."""
    from topkapi.kernels.tilelang.sparse_mla_narrow import combine

    return _compile(combine(heads, latent, dtype, has_sinks), arch)


def _compile(program: Any, arch: int) -> Callable[..., Any]:
    import tilelang

    # Hopper's own instructions are in the target with the letter.
    target = {"kind": "cuda", "arch": "sm_90a" if arch == 90 else f"sm_{arch}"}
    kernel: Callable[..., Any] = tilelang.compile(program, target=target, pass_configs=PASSES)
    return kernel


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
    tile: Tile | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Never synchronises; safe inside capture once compiled.

    `tile` and `splits` override what is chosen, for measuring. `batch_invariant` never splits a
    row. Temporaries: the slots, filled up to whole tiles where they are not, and with several
    programs a row `splits * R * H * (v_dim + 1)` fp32, within `budget_bytes`.
    """
    rows, heads, dims = q.shape
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    device = device_info(q.device)
    fp8 = kv_cache.dtype == LATENT_FP8.dtype
    tile = tile or choose_tile(device, heads, v_dim, dims - v_dim, fp8)
    slots = _whole_tiles(slots, tile.tokens)
    if splits is None:
        splits = 1
        if not batch_invariant:
            row_bytes = 4 * heads * (v_dim + 1)
            splits = choose_splits(
                device, tile, rows, heads, slots.shape[1], row_bytes, budget_bytes
            )
    arch = int(device.arch)
    sizes = heads, v_dim, dims - v_dim, DTYPES[q.dtype]
    bias = sinks if sinks is not None else lse.new_zeros(heads)
    target, target_lse = out[None], lse[None]
    if splits > 1:
        target = torch.empty(splits, rows, heads, v_dim, dtype=torch.float32, device=q.device)
        target_lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    records = kv_cache.contiguous()[:, 0]
    attend = _compiled(
        arch, tile, *sizes, splits > 1, sinks is not None, logit_cap > 0,
        records.shape[1] if fp8 else 0,
    )  # fmt: skip
    parts = (records,) if tile.wide else _parts(records, v_dim, dims - v_dim)
    attend(q.contiguous(), *parts, slots, bias, target, target_lse, scale, logit_cap)
    if splits > 1:
        merge = _combined(arch, heads, v_dim, DTYPES[q.dtype], sinks is not None)
        merge(target, target_lse, bias, out, lse)
    return out, lse


def _parts(
    records: torch.Tensor, latent: int, rope: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, scales and ropes of `records [slots, W]`, as views. What there is none of is a
    stand-in of the same strides.
    """
    groups = LATENT_FP8.num_scales(latent)
    if records.dtype != LATENT_FP8.dtype:
        scales = torch.empty(1, groups, dtype=torch.float32, device=records.device)
        first = latent if rope else 0
        return records[:, :latent], scales, records[:, first : first + max(rope, 1)]
    scales = records[:, latent : latent + 4 * groups].view(torch.float32)
    first = (latent + 4 * groups) // 2 if rope else 0
    ropes = records.view(torch.bfloat16)[:, first : first + max(rope, 1)]
    return records[:, :latent].view(torch.float8_e4m3fn), scales, ropes


def _whole_tiles(slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """`slots` as int32, filled up with -1 to at least one and only whole tiles."""
    slots = slots.int()
    columns = max(-(-slots.shape[1] // tokens), 1) * tokens
    if columns != slots.shape[1]:
        slots = torch.nn.functional.pad(slots, (0, columns - slots.shape[1]), value=-1)
    return slots.contiguous()


@lru_cache(maxsize=1)
def _refuse_package() -> str | None:
    """Why TileLang cannot be used here, by its metadata alone."""
    try:
        found = version("tilelang")
    except PackageNotFoundError:
        return "needs the package tilelang (pip install 'topkapi[tilelang]'); not installed"
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:3])
    if numbers < OLDEST or numbers[:2] != OLDEST[:2]:
        wanted = ".".join(map(str, OLDEST))
        return f"is written for tilelang {wanted} and later of its 0.1 line, this is {found}"
    return None


def _refuse(problem: Problem) -> str | None:
    device = problem.device
    if device.backend != "cuda":
        return f"needs an NVIDIA GPU, this is {device.label}"
    if int(device.arch) < 80:
        return f"needs sm80 or newer, this is {device.label}"
    if problem.cache_format not in FORMATS:
        return f"reads bf16, fp16 and fp8 records, not {problem.cache_format}"
    if problem.dtype != FORMATS[problem.cache_format]:
        wanted = str(FORMATS[problem.cache_format]).removeprefix("torch.")
        return f"wants {wanted} queries over {problem.cache_format} records"
    if problem.latent_dim % 32 or problem.rope_dim % 32:
        got = f"{problem.latent_dim} + {problem.rope_dim}"
        return f"takes latent and rope dims that are multiples of 32, got {got}"
    if problem.latent_dim > 512 or problem.rope_dim > 128:
        return f"holds at most 512 + 128 dims, got {problem.latent_dim} + {problem.rope_dim}"
    return _refuse_package()


def _heads_computed(problem: Problem) -> int:
    sizes = problem.num_heads, problem.latent_dim, problem.rope_dim
    tile = choose_tile(problem.device, *sizes, fp8=problem.cache_format == "fp8")
    return -(-problem.num_heads // tile.heads) * tile.heads


SPARSE_MLA = Kernel(
    "tilelang",
    "sparse_mla",
    _refuse,
    sparse_mla,
    heads_computed=_heads_computed,
    batch_invariant=True,
)
