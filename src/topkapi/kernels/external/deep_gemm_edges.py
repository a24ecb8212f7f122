"""What is made before, and mended after, DeepGEMM's calls, in one launch each.

pages[r, j]   the page of positions 64 j .. 64 j + 63 of row r; 0 past its length
weights[r, h] NaN where the query of that head has one: DeepGEMM's relu would lose it
logits[r, c]  -inf past the row's length, NaN where the key's scale says that it was spoiled
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from topkapi.context import Context

BLOCK = 1024


@triton.jit
def _pages(
    table, table_rows, request_of_row, lengths, pages, count, stride, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    line = tl.load(table_rows + tl.load(request_of_row + row)).to(tl.int64) * stride
    slot = tl.load(table + line + page * PAGE, mask=page * PAGE < length, other=0)
    tl.store(pages + row.to(tl.int64) * count + page, slot // PAGE, mask=page < count)


@triton.jit
def _spoil(q, weights, out, heads, DIMS: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    mask = head < heads
    place = (row * heads + head)[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    code = tl.load(q + place, mask=mask[:, None], other=0).to(tl.int32)
    nan = tl.max(((code & 0x7F) == 0x7F).to(tl.int32), axis=1) > 0
    weight = tl.load(weights + row * heads + head, mask=mask, other=0.0)
    tl.store(out + row * heads + head, tl.where(nan, float("nan"), weight), mask=mask)


@triton.jit
def _finish(
    logits, lengths, pages, scales, width, stride, count, page_stride, spoiled,
    PAGED: tl.constexpr, FILL: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    line = logits + row * stride + column
    if FILL:
        tl.store(line, float("-inf"), mask=(column >= length) & (column < width))
    if PAGED:
        inside = column < length
        page = tl.load(pages + row * count + column // PAGE, mask=inside, other=0).to(tl.int64)
        scale = tl.load(scales + page * page_stride + column % PAGE, mask=inside, other=0.0)
        tl.store(line, float("nan"), mask=inside & (scale >= spoiled))


def page_table(context: Context, part: slice, page: int) -> torch.Tensor:
    """Pages `[n, ceil(max_length / page)]` int32 of the rows in `part`; the context has a table."""
    assert context.table is not None
    lengths = context.lengths[part]
    count = -(-context.max_length // page)
    pages = torch.empty(lengths.shape[0], count, dtype=torch.int32, device=lengths.device)
    block = min(BLOCK, triton.next_power_of_2(count))
    _pages[(lengths.shape[0], triton.cdiv(count, block))](
        context.table, context.table_rows, context.request_of_row[part], lengths, pages, count,
        context.table.stride(0), PAGE=page, BLOCK=block,
    )  # fmt: skip
    return pages


def spoiled_weights(q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`weights [R, Hi]` fp32, NaN where `q [R, Hi, Di]` e4m3 has one; Di is a power of two."""
    rows, heads, dims = q.shape
    out = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    _spoil[(rows,)](
        q.contiguous().view(torch.uint8), weights.contiguous(), out, heads, DIMS=dims,
        BLOCK_H=triton.next_power_of_2(heads),
    )  # fmt: skip
    return out


def finish(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    spoiled: float,
    *,
    fill: bool,
    pages: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Mend `logits [n, width]` in place. With `pages [n, P]` int32 and the cache's `scales
    [pages, page]` fp32, keys whose scale is `spoiled` or more give NaN; with `fill` columns past a
    row's `lengths [n]` give -inf.
    """
    rows, width = logits.shape
    paged = pages is not None
    if not (paged or fill):
        return
    # Without pages, tensors that are not read stand in their places.
    pages = lengths[:, None] if pages is None else pages
    scales = logits if scales is None else scales
    _finish[(rows, triton.cdiv(width, BLOCK))](
        logits, lengths, pages, scales, width, logits.stride(0), pages.shape[1], scales.stride(0),
        spoiled, PAGED=paged, FILL=fill, PAGE=scales.shape[1] if paged else 1, BLOCK=BLOCK,
    )  # fmt: skip
