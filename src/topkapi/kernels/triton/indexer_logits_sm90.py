"""The lightning indexer's scores of a context on sm90, in Gluon (Triton's lower level): prefill.

The formula, arguments and results are those of `indexer_logits._score`. What differs is who waits
for whom. There, a product is issued, waited for, and summed over its heads, and the matrix unit
idles meanwhile unless another program fills in. Here a tile's keys are two halves, and

    issue half 1, rows i | sum half 0, rows i | issue half 0, rows i + 1 | sum half 1, rows i

so that a product is always under way. Queries arrive in three buffers of shared memory, two steps
ahead; sums are written from the registers that hold them, eight neighbours at a time.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BUFFERS = gl.constexpr(3)


@gluon.constexpr_function
def _logit_layout(group, warps):
    """Where sums over heads lie after a product of 16 rows a warp: nothing moves to get there."""
    rows = [[8, 0]] + [[0, 1 << bit] for bit in range((group - 1).bit_length())]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    over = [[16 << bit, 0] for bit in range((warps - 1).bit_length())]
    return gl.DistributedLinearLayout(rows, lanes, over, [], [16 * warps, group])


@gluon.jit
def _fetch(q, weights, row, stop, queries, head_weights, HEADS: gl.constexpr, D: gl.constexpr,
           COLUMNS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Issue the copies of the queries `[COLUMNS, D]` and weights of the rows from `row` on."""
    WIDE: gl.constexpr = 16 * 8 // q.dtype.element_ty.primitive_bitwidth
    LANES: gl.constexpr = D // WIDE
    TILE: gl.constexpr = gl.BlockedLayout([1, WIDE], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, TILE))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, TILE))
    there = column < (stop - row) * HEADS
    base = q + row.to(gl.int64) * (HEADS * D)
    async_copy.async_copy_global_to_shared(
        queries, base + (column[:, None] * D + dim[None, :]), mask=there[:, None]
    )
    column = gl.arange(0, COLUMNS, layout=LINE)
    async_copy.async_copy_global_to_shared(
        head_weights,
        weights + row.to(gl.int64) * HEADS + column,
        mask=column < (stop - row) * HEADS,
    )
    async_copy.commit_group()


@gluon.jit
def _hold(index_cache, keys, slot, valid, D: gl.constexpr, PAGE_SIZE: gl.constexpr,
          PAGE_BYTES: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """Put the keys of some slots into shared memory, zeros where not valid."""
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, TILE))
    slot = gl.where(valid, slot, 0)
    place = (slot // PAGE_SIZE).to(gl.int64) * PAGE_BYTES + (slot % PAGE_SIZE) * D
    code = gl.load(index_cache + place[:, None] + dim[None, :], mask=valid[:, None], other=0)
    keys.store(code.to(gl.float8e4nv, bitcast=True).to(keys.dtype))


@gluon.jit
def _multiply(key, query, PRODUCT: gl.constexpr):
    """Issue keys `[HALF, D]` times queries `[COLUMNS, D]`."""
    zero = gl.full([key.shape[0], query.shape[0]], 0.0, gl.float32, layout=PRODUCT)
    return warpgroup_mma(key, query.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _sum_heads(product, weight, scale, position, length, to, stop, first_row, out, out_stride,
               width, HALF: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
               LOGIT: gl.constexpr):  # fmt: skip
    """Products `[HALF, GROUP * HEADS]` to logits `[HALF, GROUP]`, written where they belong."""
    product = gl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    logit = gl.sum(gl.reshape(product, [HALF, GROUP, HEADS]), axis=2)
    logit = gl.convert_layout(logit, LOGIT) * scale[:, None]
    logit = gl.where(position[:, None] < length[None, :], logit, float("-inf"))
    line = out + (to - first_row).to(gl.int64) * out_stride
    gl.store(
        line[None, :] + position[:, None],
        logit,
        mask=(to < stop)[None, :] & (position < width)[:, None],
    )


@gluon.jit(
    do_not_specialize=["num_rows", "width", "out_stride", "table_stride", "num_tiles", "first_row"]
)
def _score_sm90(
    q, weights, index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows, starts, out,
    first_row, num_rows, width, out_stride, table_stride, num_tiles,
    HEADS: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, BLOCK_R: gl.constexpr,
    GROUP: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_BYTES: gl.constexpr,
    FILL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = GROUP * HEADS
    DTYPE: gl.constexpr = q.dtype.element_ty
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, COLUMNS, 256 // BITS]
    )
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (D // 16), D // 16], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    LOGIT: gl.constexpr = _logit_layout(GROUP, WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(0, LOGIT)
    PLACES: gl.constexpr = gl.SliceLayout(1, LOGIT)

    program = gl.program_id(0)
    begin = (program % num_tiles) * (2 * HALF)
    row = first_row + (program // num_tiles) * BLOCK_R
    last = gl.minimum(row + BLOCK_R, num_rows)
    member = row + gl.arange(0, BLOCK_R, layout=FLAT)
    longest = gl.max(gl.load(lengths + member, mask=member < last, other=0), axis=0)
    longest = gl.minimum(longest, width)
    if begin >= longest:
        if FILL:
            position = begin + gl.arange(0, 2 * HALF, layout=FLAT)
            nothing = gl.full([2 * HALF], float("-inf"), gl.float32, layout=FLAT)
            for filled in range(row, last):
                line = out + (filled - first_row).to(gl.int64) * out_stride
                gl.store(line + position, nothing, mask=position < width)
        row = last

    keys = gl.allocate_shared_memory(DTYPE, [2, HALF, D], SHARED)
    queries = gl.allocate_shared_memory(DTYPE, [BUFFERS, COLUMNS, D], SHARED)
    head_weights = gl.allocate_shared_memory(gl.float32, [BUFFERS, COLUMNS], LINE)
    scales = (index_cache + PAGE_SIZE * D).to(gl.pointer_type(gl.float32))
    place0 = begin + gl.arange(0, HALF, layout=PLACES)
    place1 = place0 + HALF
    group_row = gl.arange(0, GROUP, layout=ROWS)
    while row < last:
        request = gl.load(request_of_row + row)
        stop = gl.minimum(gl.load(cu_seqlens_q + request + 1).to(gl.int32), last)
        stop = gl.where(stop > row, stop, last)  # padding rows, up to the end
        gl.thread_barrier()  # the products of the request before have been made
        for turn in gl.static_range(2):
            _fetch(q, weights, row + turn * GROUP, stop, queries.index(turn),
                   head_weights.index(turn), HEADS, D, COLUMNS, WARPS)  # fmt: skip
        # Past this request's own context the table may hold anything: it is not followed there.
        held = (member >= row) & (member < stop)
        own = gl.max(gl.load(lengths + member, mask=held, other=0), axis=0)
        origin = 0
        page_row = table
        if PAGED:
            page_row = table + gl.load(table_rows + request).to(gl.int64) * table_stride
        else:
            origin = gl.load(starts + request).to(gl.int32)
        for half in gl.static_range(2):
            position = begin + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, TILE))
            slot = origin + position
            if PAGED:
                slot = gl.load(page_row + position, mask=position < own, other=0)
            _hold(index_cache, keys.index(half), slot, position < own, D, PAGE_SIZE, PAGE_BYTES,
                  TILE)  # fmt: skip
        slot0 = origin + place0
        slot1 = origin + place1
        if PAGED:
            slot0 = gl.load(page_row + place0, mask=place0 < own, other=0)
            slot1 = gl.load(page_row + place1, mask=place1 < own, other=0)
        where0 = (slot0 // PAGE_SIZE).to(gl.int64) * (PAGE_BYTES // 4) + slot0 % PAGE_SIZE
        where1 = (slot1 // PAGE_SIZE).to(gl.int64) * (PAGE_BYTES // 4) + slot1 % PAGE_SIZE
        scale0 = gl.load(scales + where0, mask=place0 < own, other=0.0)
        scale1 = gl.load(scales + where1, mask=place1 < own, other=0.0)

        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        key0 = keys.index(0)
        key1 = keys.index(1)
        buffer = 0
        product0 = _multiply(key0, queries.index(0), PRODUCT)
        product0 = warpgroup_mma_wait(0, deps=[product0])
        # Nothing is under way from one turn to the next: else the assembler lets nothing overlap.
        for first in range(row, stop, GROUP):
            product1 = _multiply(key1, queries.index(buffer), PRODUCT)
            to = first + group_row
            length = gl.load(lengths + to, mask=to < stop, other=0)
            weight = head_weights.index(buffer).load(gl.SliceLayout(0, PRODUCT))
            _sum_heads(product0, weight, scale0, place0, length, to, stop, first_row, out,
                       out_stride, width, HALF, GROUP, HEADS, LOGIT)  # fmt: skip
            buffer = gl.where(buffer == BUFFERS - 1, 0, buffer + 1)
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            product1 = warpgroup_mma_wait(0, deps=[product1])
            product0 = _multiply(key0, queries.index(buffer), PRODUCT)
            # Every warp has had the products of the rows before these: their buffer is free.
            free = gl.where(buffer == BUFFERS - 1, 0, buffer + 1)
            _fetch(q, weights, first + 2 * GROUP, stop, queries.index(free),
                   head_weights.index(free), HEADS, D, COLUMNS, WARPS)  # fmt: skip
            _sum_heads(product1, weight, scale1, place1, length, to, stop, first_row, out,
                       out_stride, width, HALF, GROUP, HEADS, LOGIT)  # fmt: skip
            product0 = warpgroup_mma_wait(0, deps=[product0])
        async_copy.wait_group(0)
        row = stop
