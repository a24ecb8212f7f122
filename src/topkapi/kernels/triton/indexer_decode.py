"""The lightning indexer's scores where rows are few and contexts long: decoding, verification.

The formula, arguments and results are those of `indexer_logits._score`. There the keys stay and the
rows pass; here the queries of one to a few rows stay, and the keys of a stretch of their context
stream by, BLOCK_S positions at a time, several tiles in flight: memory bounds this kernel, and a
program must run long enough to keep its gathers going.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from topkapi.kernels.triton.index_keys import load_keys


@triton.jit(do_not_specialize=["num_rows", "width", "out_stride", "table_stride", "num_spans",
                               "span", "first_row"])  # fmt: skip
def _score_stream(
    q, weights, index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows, starts, out,
    first_row, num_rows, width, out_stride, table_stride, num_spans, span,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, GROUP: tl.constexpr, PAGED: tl.constexpr, FP8: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_BYTES: tl.constexpr, NATIVE_FP8: tl.constexpr,
    FILL: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    begin = (program % num_spans) * span
    row = first_row + (program // num_spans) * GROUP
    last = tl.minimum(row + GROUP, num_rows)
    column = tl.arange(0, GROUP * BLOCK_HEADS)
    head = column % BLOCK_HEADS
    dim = tl.arange(0, BLOCK_D)
    of = row + column // BLOCK_HEADS
    there = (of < last) & (head < HEADS)
    place = of.to(tl.int64) * HEADS + head
    query = tl.load(
        q + place[:, None] * D + dim[None, :],
        mask=there[:, None] & (dim < D)[None, :],
        other=0.0,
    ).to(DTYPE)  # [GROUP * BLOCK_HEADS, BLOCK_D]
    weight = tl.load(weights + place, mask=there, other=0.0)
    to = row + tl.arange(0, GROUP)
    lengths_of_all = tl.load(lengths + to, mask=to < last, other=0).to(tl.int32)  # [GROUP]
    line = out + (to - first_row).to(tl.int64) * out_stride
    while row < last:
        request = tl.load(request_of_row + row)
        stop = tl.minimum(tl.load(cu_seqlens_q + request + 1).to(tl.int32), last)
        stop = tl.where(stop > row, stop, last)  # padding rows, up to the end
        own = (to >= row) & (to < stop)
        length = tl.where(own, lengths_of_all, 0)
        longest = tl.minimum(tl.max(length, axis=0), width)
        end = tl.minimum(begin + span, width if FILL else longest)
        if PAGED:
            page_row = table + tl.load(table_rows + request).to(tl.int64) * table_stride
        else:
            origin = tl.load(starts + request).to(tl.int32)
        ahead = begin + tl.arange(0, BLOCK_S)
        if PAGED:
            # A slot is looked up a tile before its key: the pipeline overlaps one step, not two.
            coming = tl.load(page_row + ahead, mask=ahead < longest, other=0)
        for first in tl.range(begin, end, BLOCK_S, num_stages=STAGES):
            position = first + tl.arange(0, BLOCK_S)
            visible = position < longest
            if PAGED:
                slot = coming
                ahead = position + BLOCK_S
                coming = tl.load(page_row + ahead, mask=ahead < tl.minimum(longest, end), other=0)
            else:
                slot = origin + position
            key, scale = load_keys(
                index_cache, slot, visible, PAGE_SIZE, PAGE_BYTES, D, BLOCK_D, FP8, NATIVE_FP8,
                DTYPE,
            )  # fmt: skip
            product = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
            product = product * weight[None, :]
            logit = tl.sum(tl.reshape(product, [BLOCK_S, GROUP, BLOCK_HEADS]), axis=2)
            if FP8:
                logit = logit * scale[:, None]
            logit = tl.where(position[:, None] < length[None, :], logit, float("-inf"))
            tl.store(
                line[None, :] + position[:, None],
                logit,
                mask=own[None, :] & (position < width)[:, None],
            )
        row = stop
    if EARLY:
        gdc_launch_dependents()  # the selection may begin where this program was
