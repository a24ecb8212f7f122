"""The lightning indexer's scores of a context, for prefill and decode, fp8 or float keys.

    logit[r, s] = k_scale[s] * sum_h weights[r, h] * relu(q[r, h] . k[s])      for s < length(r)

One program owns BLOCK_S positions and BLOCK_R query rows. The keys of its positions stay in the
matrix unit's left operand while it walks over its rows, GROUP of them (all their heads) at a time:
the heads are columns, so that summing over them stays inside a few threads. A block of rows may
cross requests; the keys are gathered anew where the request changes. Products accumulate in fp32,
and head weights are never rounded. Columns past a row's length become -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from topkapi.context import Context
from topkapi.device import DeviceInfo
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.index_keys import load_keys
from topkapi.kernels.triton.indexer_decode import _score_stream
from topkapi.kernels.triton.indexer_logits_long import (
    KEYS,
    _score_long,
    described,
    rows_of,
    stages_of,
)
from topkapi.kernels.triton.indexer_logits_sm90 import _score_sm90
from topkapi.kernels.triton.target import (
    float32_precision,
    launches_early,
    native_fp8,
    refuse_device,
    target_of,
)

TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}

# From here on tiles of 384 positions were at least as fast, at 4k by a fifth, at 64k by a fourth.
LONG = 4096


@triton.jit(
    do_not_specialize=["num_rows", "width", "out_stride", "table_stride", "num_tiles", "first_row"]
)
def _score(
    q, weights, index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows, starts, out,
    first_row, num_rows, width, out_stride, table_stride, num_tiles,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, PAGED: tl.constexpr,
    FP8: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, NATIVE_FP8: tl.constexpr,
    FILL: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    position = (program % num_tiles) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = first_row + (program // num_tiles) * BLOCK_R
    last = tl.minimum(row + BLOCK_R, num_rows)
    member = row + tl.arange(0, BLOCK_R)
    longest = tl.max(tl.load(lengths + member, mask=member < last, other=0), axis=0)
    longest = tl.minimum(longest, width)
    if (program % num_tiles) * BLOCK_S >= longest:
        if FILL:
            for filled in range(row, last):
                tl.store(
                    out + (filled - first_row).to(tl.int64) * out_stride + position,
                    tl.full([BLOCK_S], float("-inf"), tl.float32),
                    mask=position < width,
                )
        row = last

    column = tl.arange(0, GROUP * BLOCK_HEADS)
    head = column % BLOCK_HEADS
    dim = tl.arange(0, BLOCK_D)
    while row < last:
        request = tl.load(request_of_row + row)
        stop = tl.minimum(tl.load(cu_seqlens_q + request + 1).to(tl.int32), last)
        stop = tl.where(stop > row, stop, last)  # padding rows, up to the end
        # Past this request's own context the table may hold anything: it is not followed there.
        held = (member >= row) & (member < stop)
        visible = position < tl.max(tl.load(lengths + member, mask=held, other=0), axis=0)
        if PAGED:
            page_row = table + tl.load(table_rows + request).to(tl.int64) * table_stride
            slot = tl.load(page_row + position, mask=visible, other=-1)
        else:
            slot = tl.load(starts + request).to(tl.int32) + position
        key, scale = load_keys(
            index_cache, slot, visible, PAGE_SIZE, PAGE_BYTES, D, BLOCK_D, FP8, NATIVE_FP8, DTYPE
        )
        for first in tl.range(row, stop, GROUP, num_stages=STAGES):
            of = first + column // BLOCK_HEADS
            there = (of < stop) & (head < HEADS)
            place = of.to(tl.int64) * HEADS + head
            query = tl.load(
                q + place[:, None] * D + dim[None, :],
                mask=there[:, None] & (dim < D)[None, :],
                other=0.0,
            )  # [GROUP * BLOCK_HEADS, BLOCK_D]
            weight = tl.load(weights + place, mask=there, other=0.0)
            product = tl.dot(key, tl.trans(query.to(DTYPE)), input_precision=PRECISION)
            product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
            product = product * weight[None, :]
            logit = tl.sum(tl.reshape(product, [BLOCK_S, GROUP, BLOCK_HEADS]), axis=2)
            logit = logit * scale[:, None]  # [BLOCK_S, GROUP]
            to = first + tl.arange(0, GROUP)
            length = tl.load(lengths + to, mask=to < stop, other=0)
            logit = tl.where(position[:, None] < length[None, :], logit, float("-inf"))
            tl.store(
                out + (to - first_row).to(tl.int64)[None, :] * out_stride + position[:, None],
                logit,
                mask=(to < stop)[None, :] & (position < width)[:, None],
            )
        row = stop


@dataclass(frozen=True)
class Tile:
    """How scoring is cut: positions, rows a program, rows a product, warps, pipeline stages.

    `stream` takes the kernel of `indexer_decode`, in which the keys pass and the rows stay; `sm90`
    that of `indexer_logits_sm90`, whose products have 128 columns; `long` that of
    `indexer_logits_long`, with as many rows as suit where `rows` is 0.
    """

    positions: int
    rows: int
    group: int
    warps: int
    stages: int
    stream: bool = False
    sm90: bool = False
    long: bool = False


def fits_sm90(device: DeviceInfo, heads: int, index_dim: int, fp8: bool, itemsize: int) -> bool:
    """Whether `indexer_logits_sm90` scores such queries and keys on this device."""
    if device.backend != "cuda" or device.arch != 90 or not fp8:
        return False
    return index_dim == 128 and heads in (16, 32, 64, 128) and itemsize <= 2


def fits_long(q: torch.Tensor, weights: torch.Tensor, width: int) -> bool:
    """Whether `indexer_logits_long` scores what `fits_sm90` allows, and is the faster one."""
    aligned = q.data_ptr() % 16 == 0 and weights.data_ptr() % 16 == 0
    return q.shape[1] in (32, 64) and weights.dtype == torch.float32 and aligned and width >= LONG


def choose_tile(
    device: DeviceInfo,
    heads: int,
    itemsize: int,
    fp8: bool,
    rows: int,
    max_rows_per_request: int,
    sm90: bool = False,
    long: bool = False,
) -> Tile:
    """The launch configuration. `max_rows_per_request` tells prefill from decode; `itemsize` is of
    the products' operands; `fp8` says that keys are; `sm90` is what `fits_sm90` says, and `long`
    what `fits_long` does.
    """
    padded = triton.next_power_of_2(heads)
    group = max(1, 64 // padded)
    large = device.shared_memory >= 160 * 1024
    if itemsize == 4:
        # One kernel for any batch: fp32 products sum in another order in another's loop, and a row
        # is to keep its bits.
        return Tile(64, 64, group, 4, 2)
    if max_rows_per_request >= 32:
        if sm90 and long:
            return Tile(KEYS.value, 0, 128 // heads, 4, stages_of(itemsize), long=True)
        if sm90 and itemsize == 2:
            return Tile(256, 256, 128 // heads, 8, 3, sm90=True)
        if large and itemsize == 1:
            return Tile(128, 256, 2 * group, 4, 3)
        return Tile(128, 128 if large else 64, group, 4, 2)
    group = min(triton.next_power_of_2(max(1, max_rows_per_request)), group)
    if not fp8:
        return Tile(64, group, group, 4, 3 if large else 2, stream=True)
    if large and rows >= 4:
        narrow = itemsize > 1 or group * padded > 64
        return Tile(128 if narrow else 256, group, group, 4, 4 if narrow else 3, stream=True)
    # A program has a tile or two: nothing to overlap with. Little memory has no room to.
    return Tile(64, group, group, 4, 1 if large or itemsize > 1 else 2, stream=True)


def launch_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    out: torch.Tensor,
    *,
    first_row: int,
    fill: bool,
    tile: Tile | None = None,
) -> None:
    """Score rows `first_row : first_row + out.shape[0]` into `out [rows, >= max_length]`.

    `fill` writes -inf past each row's length up to `out`'s last column; without it those columns
    may keep what they held. Never synchronises.
    """
    rows, width = out.shape
    if rows == 0 or width == 0:
        return
    heads, index_dim = q.shape[1:]
    device = target_of(q)
    fp8 = index_cache.dtype == torch.uint8
    compute = q.dtype
    if compute == torch.float8_e4m3fn and not (fp8 and native_fp8(device)):
        compute = torch.float16
        # Exact. Not in the kernel: without fp8 products Triton has no such type either.
        q = q.to(compute)
    elif not fp8 and index_cache.dtype != q.dtype:
        compute = torch.float32
    tile = tile or choose_tile(
        device,
        heads,
        compute.itemsize,
        fp8,
        rows,
        context.max_seq_len_q,
        fits_sm90(device, heads, index_dim, fp8, compute.itemsize),
        fits_long(q, weights, width),
    )
    page_size = index_cache.shape[1] // (index_dim + 4) if fp8 else 1
    num_tiles = triton.cdiv(width, tile.positions)
    unused = context.request_of_row
    table = unused if context.table is None else context.table
    arguments = (
        q, weights, index_cache, context.lengths, context.request_of_row, context.cu_seqlens_q,
        table, unused if context.table_rows is None else context.table_rows,
        unused if context.starts is None else context.starts, out,
        first_row, first_row + rows, width, out.stride(0), table.stride(0),
    )  # fmt: skip
    sizes = {
        "HEADS": heads,
        "D": index_dim,
        "BLOCK_HEADS": max(triton.next_power_of_2(heads), 16 // tile.group),
        "BLOCK_D": max(32 if compute.itemsize == 1 else 16, triton.next_power_of_2(index_dim)),
        "BLOCK_S": tile.positions,
        "GROUP": tile.group,
        "PAGED": context.table is not None,
        "FP8": fp8,
        "PAGE_SIZE": page_size,
        "PAGE_BYTES": index_cache.stride(0),
        "NATIVE_FP8": native_fp8(device),
        "FILL": fill,
        "PRECISION": float32_precision(device),
        "DTYPE": TRITON_DTYPE[compute],
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if tile.long:
        each = tile.rows or rows_of(max(device.num_sms, 1), num_tiles, rows)
        kept = ("HEADS", "D", "GROUP", "PAGED", "PAGE_SIZE", "PAGE_BYTES", "FILL", "STAGES")
        _score_long[(triton.cdiv(rows, each) * num_tiles,)](
            *described(q, weights),
            *arguments[2:],
            num_tiles,
            each,
            **{name: sizes[name] for name in kept},
            num_warps=tile.warps,
        )
        return
    groups = triton.cdiv(rows, tile.rows)
    if tile.sm90:
        kept = ("HEADS", "D", "GROUP", "PAGED", "PAGE_SIZE", "PAGE_BYTES", "FILL", "num_warps")
        _score_sm90[(groups * num_tiles,)](
            *arguments,
            num_tiles,
            **{name: sizes[name] for name in kept},
            HALF=tile.positions // 2,
            BLOCK_R=tile.rows,
            WARPS=tile.warps,
        )
    elif tile.stream:
        # So many of 256 positions are on a multiprocessor at a time: all programs run at once.
        resident = 2 if tile.positions == 256 else 4
        spans = max(1, min(num_tiles, resident * device.num_sms // groups))
        span = triton.cdiv(num_tiles, spans) * tile.positions
        early = launches_early(device)
        _score_stream[(groups * spans,)](*arguments, spans, span, **sizes, EARLY=early)
    else:
        _score[(groups * num_tiles,)](*arguments, num_tiles, **sizes, BLOCK_R=tile.rows)


def indexer_logits(
    q: torch.Tensor, weights: torch.Tensor, index_cache: torch.Tensor, context: Context
) -> torch.Tensor:
    """See `reference.indexer_logits`. Never synchronises; safe inside capture."""
    out = torch.empty(q.shape[0], context.max_length, dtype=torch.float32, device=q.device)
    launch_scores(
        q.contiguous(), weights.contiguous(), index_cache, context, out, first_row=0, fill=True
    )
    return out


def refuse_scoring(problem: Problem) -> str | None:
    """Why this package cannot score such queries and keys, or None."""
    reason = refuse_device(problem)
    if reason is not None:
        return reason
    if problem.index_dim > 256 or problem.num_heads > 128:
        return f"holds at most 128 heads of 256, got {problem.num_heads} of {problem.index_dim}"
    if problem.cache_format == "fp8" and problem.index_dim % 4:
        return "reads fp8 keys whose dims are a multiple of 4"
    return None


INDEXER_LOGITS = Kernel("triton", "indexer_logits", refuse_scoring, indexer_logits)
