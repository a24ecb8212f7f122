"""DeepGEMM's fp8 indexer logits, ragged for prefill and paged for decode, on sm90 and sm100.

    logit = k_scale * sum_h weights[h] * relu(q_h . k), e4m3 against e4m3, accumulated in fp32

Its quirks: columns outside a row's range hold garbage, which is overwritten by -inf here (or, where
top-k follows, never looked at); ragged keys lie one after another, so that a block of rows gathers
the keys of its own requests, codes and scales apart, nothing dequantised; paged keys are read
through a table of 64-token pages, one row a request; its schedule depends on the lengths and is
made in the call. Its relu turns NaN into 0: what a NaN spoiled becomes NaN again, queries by their
heads' weights, keys by their scales. Products of e4m3 keep about 13 bits of a sum on sm90, as ours
do there. It compiles with nvcc at first use, seconds a kernel: call once before capturing a graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from topkapi.context import Context
from topkapi.device import device_info
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels import triton as triton_kernels
from topkapi.kernels.external.packages import Provider, loaded, provided_by, refuse_package
from topkapi.layout.index_key import fp8_page_views

PAGE = 64
HEADS = (32, 64)
# The scale of a key that held inf or NaN (`power_of_two_scale`): nothing finite has a larger one.
SPOILED = 2.0**120
# Key ranges of requests begin at multiples of this in the gathered keys.
ALIGNMENT = 128


@dataclass(frozen=True)
class Scoring:
    """The package's three functions.

    `ragged(q, (keys, scales), weights, begins, ends, clean_logits=, max_seqlen_k=)` gives
    `[n, >= max_seqlen_k]`, column j scoring key `begins + j`.
    `schedule(lengths [n, 1], 64, num_sms)` gives what
    `paged(q [n, 1, Hi, Di], cache [pages, 64, 1, 132], weights, lengths, table, schedule, width,
    clean_logits=)` takes.
    """

    ragged: Callable[..., torch.Tensor]
    paged: Callable[..., torch.Tensor]
    schedule: Callable[..., torch.Tensor]


def _deep_gemm() -> Scoring:
    return _functions(importlib.import_module("deep_gemm"))


def _functions(module: Any) -> Scoring:
    return Scoring(
        module.fp8_mqa_logits, module.fp8_paged_mqa_logits, module.get_paged_mqa_logits_metadata
    )


PROVIDERS = (Provider("deep_gemm", ("sgl-deep-gemm", "deep-gemm", "deep_gemm"), _deep_gemm),)


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    *,
    peer: Scoring | None = None,
) -> torch.Tensor:
    """See `reference.indexer_logits`. Never synchronises.

    `peer` stands in for the installed package, for tests. Temporaries beside the result: the keys
    of every request as `[B * max_length, 132]` bytes, or in decode `[R, pages]` int32.
    """
    if q.shape[0] == 0 or context.max_length == 0:
        return q.new_empty(q.shape[0], context.max_length, dtype=torch.float32)
    unbounded = 2**62
    ((_, logits),) = _blocks(q, weights, index_cache, context, unbounded, peer, fill=True)
    return logits


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    k: int,
    *,
    output: Literal["slots", "positions"] = "slots",
    budget_bytes: int = 256 * 2**20,
    peer: Scoring | None = None,
) -> torch.Tensor:
    """See `reference.select`: its logits, block by block within `budget_bytes`, and our top-k.

    Never synchronises. `peer` stands in for the installed package, for tests.
    """
    out = torch.empty(q.shape[0], k, dtype=torch.int32, device=q.device)
    topk = _topk(q, k)
    blocks = _blocks(q, weights, index_cache, context, budget_bytes, peer, fill=False)
    for part, logits in blocks:
        out[part] = topk(logits, context.lengths[part], k)
    return context.slots(out) if output == "slots" else out


def _topk(q: torch.Tensor, k: int) -> Callable[..., torch.Tensor]:
    problem = Problem("topk", device_info(q.device), torch.float32, topk=k)
    from topkapi.kernels import torch_cpu

    kernels = (*triton_kernels.KERNELS, *torch_cpu.KERNELS)
    return next(
        kernel.launch
        for kernel in kernels
        if kernel.op == "topk" and kernel.refuse(problem) is None
    )


def _blocks(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    budget_bytes: int,
    peer: Scoring | None,
    *,
    fill: bool,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows and their logits `[n, max_length]`, past each length -inf with `fill`, else garbage."""
    peer = peer or loaded(PROVIDERS).call
    rows, width = q.shape[0], context.max_length
    if rows == 0 or width == 0:
        if rows:
            yield slice(0, rows), q.new_empty(rows, 0, dtype=torch.float32)
        return
    weights = _spoiled(q, weights)
    paged = (
        context.table is not None
        and context.page_size == PAGE == index_cache.shape[1] // (q.shape[2] + 4)
        and context.max_seq_len_q <= 2
    )
    step = _rows_at_once(rows, context, q.shape[2], budget_bytes, paged)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        score = _paged if paged else _ragged
        logits, pages, scales = score(peer, q[part], weights[part], index_cache, context, part)
        logits = logits[:, :width]
        _finish(logits, context.lengths[part], pages, scales, fill)
        yield part, logits


def _launches(q: torch.Tensor) -> bool:
    return q.is_cuda and device_info(q.device).has_triton


def _spoiled(q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`weights [R, Hi]` fp32, NaN where `q [R, Hi, Di]` e4m3 has one."""
    if _launches(q):
        from topkapi.kernels.external.deep_gemm_edges import spoiled_weights

        return spoiled_weights(q, weights)
    nan = ((q.view(torch.uint8) & 0x7F) == 0x7F).any(-1)
    return weights.masked_fill(nan, float("nan"))


def _finish(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor | None,
    scales: torch.Tensor | None,
    fill: bool,
) -> None:
    """Mend `logits [n, width]` in place; see `deep_gemm_edges.finish`."""
    if _launches(logits):
        from topkapi.kernels.external.deep_gemm_edges import finish

        finish(logits, lengths, SPOILED, fill=fill, pages=pages, scales=scales)
        return
    if pages is not None and scales is not None:
        spoiled = (scales[pages.long()] >= SPOILED).flatten(1)[:, : logits.shape[1]]
        logits.masked_fill_(spoiled, float("nan"))
    if fill:
        outside = torch.arange(logits.shape[1], device=logits.device) >= lengths[:, None]
        logits.masked_fill_(outside, float("-inf"))


def _page_table(context: Context, part: slice) -> torch.Tensor:
    """Pages `[n, ceil(max_length / 64)]` int32; page 0, which is always there, past each length."""
    assert context.table is not None
    assert context.table_rows is not None
    if _launches(context.table):
        from topkapi.kernels.external.deep_gemm_edges import page_table

        return page_table(context, part, PAGE)
    row_of_table = context.table_rows[context.request_of_row[part].long()]
    first = context.table[:, 0 : context.max_length : PAGE][row_of_table]
    column = torch.arange(0, context.max_length, PAGE, device=first.device)
    unused = column >= context.lengths[part][:, None]
    return first.masked_fill(unused, 0).div(PAGE, rounding_mode="floor").to(torch.int32)


def _rows_at_once(rows: int, context: Context, dims: int, budget_bytes: int, paged: bool) -> int:
    """The most rows whose logits and whose own requests' keys fit the budget, at least one.

    n rows belong to at most n requests, and to no more than there are (one more with padding).
    """
    logits = 4 * (context.max_length + 2 * ALIGNMENT)
    keys = 0 if paged else (dims + 12) * (context.max_length + ALIGNMENT)
    together = (budget_bytes - (context.num_requests + 1) * keys) // logits
    alone = budget_bytes // (logits + keys)
    return max(1, min(rows, max(together, alone)))


def _paged(
    peer: Scoring,
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    part: slice,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    lengths = context.lengths[part].to(torch.int32)[:, None].contiguous()
    table = _page_table(context, part)
    schedule = peer.schedule(lengths, PAGE, device_info(q.device).num_sms)
    logits = peer.paged(
        q[:, None].contiguous(),
        index_cache.view(index_cache.shape[0], PAGE, 1, -1),
        weights.contiguous(),
        lengths,
        table,
        schedule,
        table.shape[1] * PAGE,
        clean_logits=False,
    )
    return logits, table, fp8_page_views(index_cache, q.shape[2], PAGE)[1]


def _ragged(
    peer: Scoring,
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    part: slice,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    lengths = context.lengths[part].to(torch.int32)
    request_of_row = context.request_of_row[part].long()
    changes = request_of_row[1:] != request_of_row[:-1]
    local = torch.nn.functional.pad(changes.cumsum(0), (1, 0))
    most = min(q.shape[0], context.num_requests + 1)
    requests = torch.zeros(most, dtype=torch.int64, device=q.device)
    requests.scatter_(0, local, request_of_row)
    longest = torch.zeros(most, dtype=torch.int32, device=q.device)
    longest.scatter_reduce_(0, local, lengths, "amax")
    width = -(-context.max_length // ALIGNMENT) * ALIGNMENT
    keys = _gather_keys(index_cache, q.shape[2], context, requests, longest, width)
    begins = (local * width).to(torch.int32)
    logits = peer.ragged(
        q.contiguous(),
        keys,
        weights.contiguous(),
        begins,
        begins + lengths,
        clean_logits=False,
        max_seqlen_k=width,
    )
    return logits, None, None


def _gather_keys(
    index_cache: torch.Tensor,
    dims: int,
    context: Context,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[m * width, Di]` e4m3 and scales `[m * width]` fp32 of `requests [m]`, slot 0's past
    each of the `lengths [m]`.
    """
    page_size = index_cache.shape[1] // (dims + 4)
    column = torch.arange(width, device=requests.device)
    position = column.clamp_max(max(context.max_length - 1, 0))
    if context.table is not None:
        assert context.table_rows is not None
        slots = context.table[context.table_rows[requests][:, None], position].long()
    else:
        assert context.starts is not None
        slots = context.starts[requests][:, None] + position
    slots = torch.where(column < lengths[:, None], slots, 0).flatten()
    page, offset = slots // page_size, slots % page_size
    keys, scales = fp8_page_views(index_cache, dims, page_size)
    scale = scales[page, offset]
    scale = scale.masked_fill_(scale >= SPOILED, float("nan"))
    # Four codes at a time: a page, and a key, is a whole number of 32-bit words.
    return keys.view(torch.int32)[page, offset].view(torch.float8_e4m3fn), scale


def _refuse(problem: Problem) -> str | None:
    if problem.device.backend != "cuda" or problem.device.arch not in (90, 100):
        return f"needs sm90 or sm100, this is {problem.device.label}"
    if problem.dtype != torch.float8_e4m3fn:
        dtype = str(problem.dtype).removeprefix("torch.")
        return f"takes e4m3 queries whose scale is in the weights, got {dtype}"
    if problem.cache_format != "fp8":
        return f"reads fp8 keys, got {problem.cache_format}"
    if problem.index_dim != 128 or problem.num_heads not in HEADS:
        return f"takes 32 or 64 heads of 128, got {problem.num_heads} of {problem.index_dim}"
    return refuse_package(PROVIDERS)


DEEP_GEMM_LOGITS = Kernel(
    "deep_gemm",
    "indexer_logits",
    _refuse,
    indexer_logits,
    peer=True,
    provider=provided_by(PROVIDERS),
)
DEEP_GEMM_SELECT = Kernel(
    "deep_gemm", "select", _refuse, select, peer=True, provider=provided_by(PROVIDERS)
)
