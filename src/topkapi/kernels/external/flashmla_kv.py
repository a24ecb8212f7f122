"""FlashMLA's decode over fp8 records of 656 bytes, on sm90.

    out, lse = softmax over the slots of each row; -1, and nothing else, is skipped

Its quirks: 64 or 128 heads, filled up with zero heads; selections of whole tiles, filled up with
-1; records in pages, of 64 where they divide the cache and of one otherwise; an lse of +inf for a
row without slots; and a tile schedule, which depends on the shapes of a step alone. The first layer
of a step makes it and the others reuse it: it lies in the step's own buffers, so that no two
captured graphs share one. Inside a capture nothing is stored: a schedule that was not made before
becomes part of the graph, layer by layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.external.flashmla_sparse import refuse_static, unpadded
from topkapi.kernels.external.packages import (
    Provider,
    load_library,
    loaded,
    provided_by,
    refuse_package,
)
from topkapi.kernels.external.selected import padded_heads, padded_width

PAGE = 64
TILE = 64
RECORD = 656
# Its schedule is made by one program that holds five words a row, and one, in sm90's 227 KB.
MOST_ROWS = (232448 // 4 - 1) // 5

# Packages whose build of the kernel has no attention sinks.
WITHOUT_SINKS = ("sgl_kernel",)

# (q [R, 1, H, 576], kv [pages, page, 1, 656], indices [R, 1, K], sinks, metadata, splits, scale) to
# (out [R, 1, H, 512], lse [R, H, 1], metadata, splits).
Decode = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass
class TileSchedule:
    """Which blocks of a launch do which tiles; empty until the first launch fills it."""

    metadata: torch.Tensor | None = None
    splits: torch.Tensor | None = None


def _flash_mla() -> Decode:
    module = importlib.import_module("flash_mla")
    if not (hasattr(module, "has_legacy") and module.has_legacy()):
        raise ImportError("it has no kernels for sm90 and records of 656 bytes")
    return _raw(torch.ops.flash_mla_legacy.sparse_decode_fwd, (None,))


def _sgl_kernel() -> Decode:
    load_library("sgl_kernel", "flashmla_ops*.so")
    return _raw(torch.ops.sgl_kernel.sparse_decode_fwd, ())


def _vllm() -> Decode:
    load_library("vllm", "_flashmla_C*.so")
    return _raw(torch.ops._flashmla_C.sparse_decode_fwd, (None, False))


def _raw(operator: Decode, rest: tuple[object, ...]) -> Decode:
    def call(
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sinks: torch.Tensor | None,
        metadata: torch.Tensor | None,
        splits: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        nothing = (None, None, None)
        return operator(q, kv, indices, None, sinks, metadata, splits, *nothing, 512, scale, *rest)

    return call


PROVIDERS = (
    Provider("flash_mla", ("sgl-flash-mla", "flash-mla", "flash_mla"), _flash_mla),
    Provider("sgl_kernel", ("sglang-kernel", "sgl-kernel"), _sgl_kernel),
    Provider("vllm", ("vllm",), _vllm),
)


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    v_dim: int = 512,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    phase: str = "decode",
    budget_bytes: int = 256 * 2**20,
    prepared: TileSchedule | None = None,
    peer: Decode | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Never synchronises; safe inside capture.

    `prepared` is filled by the first launch of a step's shapes and read by the others; `peer`
    stands in for the installed package, for tests. Temporaries: padded heads, and the package's own
    partial results, about R * H fp32 vectors of 512 whatever `budget_bytes` is.
    """
    peer = peer or loaded(PROVIDERS).call
    rows, heads, _ = q.shape
    if rows == 0:
        return q.new_empty(0, heads, v_dim), q.new_empty(0, heads, dtype=torch.float32)
    wide = padded_heads(q, _heads(heads))
    if sinks is not None and wide.shape[1] != heads:
        sinks = torch.nn.functional.pad(sinks, (0, wide.shape[1] - heads))
    indices = padded_width(slots, TILE)[:, None]
    schedule = prepared or TileSchedule()
    page = PAGE if kv_cache.shape[0] % PAGE == 0 else 1
    out, lse, metadata, splits = peer(
        wide[:, None],
        kv_cache.contiguous().view(-1, page, 1, RECORD),
        indices,
        sinks,
        schedule.metadata,
        schedule.splits,
        scale,
    )
    # Kept once, never replaced: a graph may have been captured over it.
    if schedule.metadata is None and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        schedule.metadata, schedule.splits = metadata, splits
    return unpadded(out[:, 0], lse[:, :, 0], heads)


def _prepare(problem: Problem) -> TileSchedule:
    return TileSchedule()


def _heads(heads: int) -> int:
    return 64 if heads <= 64 else 128


def _refuse(problem: Problem) -> str | None:
    if problem.device.backend != "cuda" or problem.device.arch != 90:
        return f"needs sm90, this is {problem.device.label}"
    if problem.cache_format != "fp8":
        return f"reads fp8 records of {RECORD} bytes, got {problem.cache_format}"
    if problem.rows > MOST_ROWS:
        return f"schedules at most {MOST_ROWS} rows, got {problem.rows}"
    if reason := refuse_static(problem) or refuse_package(PROVIDERS):
        return reason
    package = loaded(PROVIDERS).package
    if "sinks" in problem.features and package in WITHOUT_SINKS:
        return f"has no attention sinks in the build of {package}"
    return None


def _heads_computed(problem: Problem) -> int:
    return _heads(problem.num_heads)


FLASHMLA_KV = Kernel(
    "flashmla_kv",
    "sparse_mla",
    _refuse,
    sparse_mla,
    prepare=_prepare,
    heads_computed=_heads_computed,
    peer=True,
    provider=provided_by(PROVIDERS),
)
