"""The lightning indexer's scores of long contexts on sm90, in Gluon: prefill.

The formula, arguments and results are those of `indexer_logits._score`, bit for bit. A program
keeps 512 keys in shared memory, 256 for each of two groups of four warps, and the rows pass. One
more warp has queries and weights copied by the copy engine, STAGES steps of 128 heads ahead. In a
step each group makes four products and sums each over its heads, with the next ones under way:

    issue 0, 1 | sum 0 | issue 2 | sum 1 | issue 3 | sum 2 | sum 3

Weights are read once for four products, and a step's queries serve 512 keys: shared memory, which
the products read too, and the second-level cache have the less to do. Short contexts have too few
tiles of 512 keys.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from topkapi.kernels.triton.zero_unseen import zero_unseen

# Heads of a step, its rows' heads one after the other: columns of a product.
COLUMNS = tl.constexpr(128)
# Keys of a product, how many products a group makes of them, and keys of a program.
BLOCK = tl.constexpr(64)
BLOCKS = tl.constexpr(4)
KEYS = tl.constexpr(512)
# Two lanes hold two values of two sums each: each lane keeps one sum, and gives the other away.
EXCHANGE = """{
    .reg .pred high;
    .reg .b32 bit;
    .reg .f32 given, kept, got;
    and.b32 bit, $3, DISTANCE;
    setp.ne.u32 high, bit, 0;
    selp.f32 given, $1, $2, high;
    selp.f32 kept, $2, $1, high;
    shfl.sync.bfly.b32 got, given, DISTANCE, 31, -1;
    add.rn.f32 $0, kept, got;
}"""
EXCHANGE_2 = tl.constexpr(EXCHANGE.replace("DISTANCE", "2"))
EXCHANGE_1 = tl.constexpr(EXCHANGE.replace("DISTANCE", "1"))


@gluon.constexpr_function
def _logit_layout(group):
    """Where sums over heads `[BLOCK, group]` lie once lanes have exchanged theirs."""
    rows = [[0, 2 << bit] for bit in range((group // 2 - 1).bit_length())]
    lanes = [[0, 1], [8, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(rows, lanes, [[16, 0], [32, 0]], [], [64, group])


@gluon.jit
def _own_lane(anything):
    """This thread's number in its warp; the compiler takes it for a number that all share."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r,r", [anything], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _longest(lengths, row, stop):
    """The longest context of rows `row : stop`."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    longest = gl.full([128], 0, gl.int32, layout=FLAT)
    for first in range(row, stop, 128):
        member = first + gl.arange(0, 128, layout=FLAT)
        length = gl.load(lengths + member, mask=member < stop, other=0)
        longest = gl.maximum(longest, length)
    return gl.max(longest, axis=0)


@gluon.jit
def _rows_of_request(request_of_row, cu_seqlens_q, row, last):
    """The request of `row`, and the end of its rows, `last` at most."""
    request = gl.load(request_of_row + row)
    stop = gl.minimum(gl.load(cu_seqlens_q + request + 1).to(gl.int32), last)
    return request, gl.where(stop > row, stop, last)  # padding rows, up to the end


@gluon.jit
def _fetch(q, weights, request_of_row, cu_seqlens_q, row, last, queries, head_weights, full, empty,
           HEADS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Have the copy engine bring every step's queries `[COLUMNS, D]` and weights.

    A step that ends past its request's rows brings others' rows, or zeros: nobody stores them.
    """
    BYTES: gl.constexpr = COLUMNS * (queries.shape[2] * queries.dtype.primitive_bitwidth // 8 + 4)
    step = 0
    while row < last:
        _, stop = _rows_of_request(request_of_row, cu_seqlens_q, row, last)
        for first in range(row, stop, GROUP):
            stage = step % STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(arrived, BYTES)
            place = first * HEADS
            tma.async_copy_global_to_shared(q, [place, 0], arrived, queries.index(stage))
            tma.async_copy_global_to_shared(weights, [place], arrived, head_weights.index(stage))
            step += 1
        row = stop


@gluon.jit
def _address(page_row, origin, position, valid, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Page and offset of positions, of slot 0 where not valid."""
    slot = origin + position
    if PAGED:
        slot = gl.load(page_row + position, mask=valid, other=0)
    slot = gl.where(valid, slot, 0)
    return (slot // PAGE_SIZE).to(gl.int64), slot % PAGE_SIZE


@gluon.jit
def _keys(index_cache, page_row, origin, begin, own, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr,
          PAGE_BYTES: gl.constexpr, D: gl.constexpr, DTYPE: gl.constexpr,
          LAYOUT: gl.constexpr):  # fmt: skip
    """BLOCK keys `[BLOCK, D]` from position `begin` on, zeros from `own` on."""
    position = begin + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    valid = position < own
    page, offset = _address(page_row, origin, position, valid, PAGED, PAGE_SIZE)
    place = page * PAGE_BYTES + offset * D
    code = gl.load(index_cache + place[:, None] + dim[None, :], mask=valid[:, None], other=0)
    return code.to(gl.float8e4nv, bitcast=True).to(DTYPE)


@gluon.jit
def _scales(index_cache, page_row, origin, position, own, PAGED: gl.constexpr,
            PAGE_SIZE: gl.constexpr, PAGE_BYTES: gl.constexpr, D: gl.constexpr):  # fmt: skip
    scales = (index_cache + PAGE_SIZE * D).to(gl.pointer_type(gl.float32))
    valid = position < own
    page, offset = _address(page_row, origin, position, valid, PAGED, PAGE_SIZE)
    return gl.load(scales + page * (PAGE_BYTES // 4) + offset, mask=valid, other=0.0)


@gluon.jit
def _sum_heads(product, weight, lane, GROUP: gl.constexpr, HEADS: gl.constexpr):
    """Products `[BLOCK, COLUMNS]` to logits `[BLOCK, GROUP]`, each in one lane.

    A thread's own heads first, then those of the lane two beyond, then of its neighbour: the order
    of every other kernel, so that a row has its bits from all of them.
    """
    LOGIT: gl.constexpr = _logit_layout(GROUP)
    product = gl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    # warp, key bit 3, key bits 0 to 2 | row, head bits 3 up, lane, head bit 0
    value = gl.reshape(product, [4, 2, 8, GROUP, HEADS // 8, 4, 2])
    value = gl.permute(value, (0, 2, 5, 3, 1, 4, 6))
    value = gl.sum(gl.reshape(value, [4, 8, 4, GROUP, 2, HEADS // 4]), axis=5)
    low, high = gl.split(value)
    value = gl.inline_asm_elementwise(
        EXCHANGE_2, "=f,f,f,r", [low, high, lane], dtype=gl.float32, is_pure=True, pack=1
    )
    low, high = gl.split(gl.reshape(value, [4, 8, 4, GROUP // 2, 2]))
    value = gl.inline_asm_elementwise(
        EXCHANGE_1, "=f,f,f,r", [low, high, lane], dtype=gl.float32, is_pure=True, pack=1
    )
    value = gl.reshape(value, [4, 8, 2, 2, GROUP // 2])
    value = gl.reshape(gl.permute(value, (0, 2, 1, 4, 3)), [BLOCK, GROUP])
    return gl.convert_layout(value, LOGIT, assert_trivial=True)


@gluon.jit
def _compute(
    index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows, starts, out,
    first_row, width, out_stride, table_stride, begin, row, last,
    keys, queries, head_weights, full, empty,
    HEADS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
    PAGE_SIZE: gl.constexpr, PAGE_BYTES: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Every step with the keys of one side: positions from `begin + 256 * SIDE` on."""
    D: gl.constexpr = queries.shape[2]
    DTYPE: gl.constexpr = queries.dtype
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 256 // BITS])
    TILE: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (D // 16), D // 16], [4, 1], [1, 0])
    LOGIT: gl.constexpr = _logit_layout(GROUP)
    begin += SIDE * BLOCKS * BLOCK
    place = begin + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LOGIT))
    group_row = gl.arange(0, GROUP, layout=gl.SliceLayout(0, LOGIT))
    lane = _own_lane(begin)
    zero = gl.full([BLOCK, COLUMNS], 0.0, gl.float32, layout=PRODUCT)
    step = 0
    while row < last:
        request, stop = _rows_of_request(request_of_row, cu_seqlens_q, row, last)
        # Past this request's own context the table may hold anything: it is not followed there.
        own = _longest(lengths, row, stop)
        origin = 0
        page_row = table
        if PAGED:
            page_row = table + gl.load(table_rows + request).to(gl.int64) * table_stride
        else:
            origin = gl.load(starts + request).to(gl.int32)
        gl.thread_barrier()  # the products of the request before have been made
        for block in gl.static_range(BLOCKS):
            key = _keys(index_cache, page_row, origin, begin + block * BLOCK, own, PAGED,
                        PAGE_SIZE, PAGE_BYTES, D, DTYPE, TILE)  # fmt: skip
            keys.index(SIDE * BLOCKS + block).store(key)
        fence_async_shared()
        gl.thread_barrier()
        scale0 = _scales(index_cache, page_row, origin, place, own, PAGED, PAGE_SIZE, PAGE_BYTES,
                         D)  # fmt: skip
        scale1 = _scales(index_cache, page_row, origin, place + BLOCK, own, PAGED, PAGE_SIZE,
                         PAGE_BYTES, D)  # fmt: skip
        scale2 = _scales(index_cache, page_row, origin, place + 2 * BLOCK, own, PAGED, PAGE_SIZE,
                         PAGE_BYTES, D)  # fmt: skip
        scale3 = _scales(index_cache, page_row, origin, place + 3 * BLOCK, own, PAGED, PAGE_SIZE,
                         PAGE_BYTES, D)  # fmt: skip
        for first in range(row, stop, GROUP):
            stage = step % STAGES
            mine = SIDE * BLOCKS + zero_unseen(step)
            to = first + group_row
            length = gl.load(lengths + to, mask=to < stop, other=0)
            line = out + (to - first_row).to(gl.int64) * out_stride
            target = line[None, :] + place[:, None]
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            query = queries.index(stage).permute((1, 0))
            now = warpgroup_mma(keys.index(mine), query, zero, use_acc=False, is_async=True)
            then = warpgroup_mma(keys.index(mine + 1), query, zero, use_acc=False, is_async=True)
            weight = head_weights.index(stage).load(gl.SliceLayout(0, PRODUCT))
            for block in gl.static_range(BLOCKS):
                product = warpgroup_mma_wait(1 if block < BLOCKS - 1 else 0, deps=[now])
                if block == 0:
                    scale = scale0
                elif block == 1:
                    scale = scale1
                elif block == 2:
                    scale = scale2
                else:
                    scale = scale3
                logit = _sum_heads(product, weight, lane, GROUP, HEADS) * scale[:, None]
                position = place + block * BLOCK
                logit = gl.where(position[:, None] < length[None, :], logit, float("-inf"))
                mask = (to < stop)[None, :] & (position < width)[:, None]
                gl.store(target + block * BLOCK, logit, mask=mask)
                if block < BLOCKS - 1:
                    # The store stays before this barrier, the next wait behind it: else the
                    # assembler waits for both products before it sums the first.
                    gl.thread_barrier()
                if block == 0 and step > 0:
                    # All four warps are through with the step before: its buffer is free.
                    mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
                now = then
                if block + 2 < BLOCKS:
                    then = warpgroup_mma(
                        keys.index(mine + block + 2), query, zero, use_acc=False, is_async=True
                    )
            step += 1
        row = stop


@gluon.jit(do_not_specialize=["num_rows", "width", "out_stride", "table_stride", "num_tiles",
                              "first_row", "block_rows"])  # fmt: skip
def _score_long(
    q, weights, index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows, starts, out,
    first_row, num_rows, width, out_stride, table_stride, num_tiles, block_rows,
    HEADS: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, PAGED: gl.constexpr,
    PAGE_SIZE: gl.constexpr, PAGE_BYTES: gl.constexpr, FILL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`q` and `weights` are what `described` makes of them."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    program = gl.program_id(0)
    begin = (program % num_tiles) * KEYS
    row = first_row + (program // num_tiles) * block_rows
    last = gl.minimum(row + block_rows, num_rows)
    if begin >= gl.minimum(_longest(lengths, row, last), width):
        if FILL:
            position = begin + gl.arange(0, KEYS, layout=FLAT)
            nothing = gl.full([KEYS], float("-inf"), gl.float32, layout=FLAT)
            for filled in range(row, last):
                line = out + (filled - first_row).to(gl.int64) * out_stride
                gl.store(line + position, nothing, mask=position < width)
        row = last

    queries = gl.allocate_shared_memory(q.dtype, [STAGES, COLUMNS, D], q.layout)
    head_weights = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], weights.layout)
    keys = gl.allocate_shared_memory(q.dtype, [KEYS // BLOCK, BLOCK, D], q.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_compute, (index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows,
                        starts, out, first_row, width, out_stride, table_stride, begin, row, last,
                        keys, queries, head_weights, full, empty, HEADS, GROUP, STAGES, PAGED,
                        PAGE_SIZE, PAGE_BYTES, 0)),
            (_compute, (index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows,
                        starts, out, first_row, width, out_stride, table_stride, begin, row, last,
                        keys, queries, head_weights, full, empty, HEADS, GROUP, STAGES, PAGED,
                        PAGE_SIZE, PAGE_BYTES, 1)),
            (_fetch, (q, weights, request_of_row, cu_seqlens_q, row, last, queries, head_weights,
                      full, empty, HEADS, GROUP, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def stages_of(itemsize: int) -> int:
    """How many steps of queries fit beside the keys."""
    return 4 if itemsize == 1 else 2


def described(q: torch.Tensor, weights: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """`q [R, Hi, Di]` and `weights [R, Hi]` as `_score_long` takes them, 128 heads at a time.

    Both contiguous, and starting at a multiple of 16 bytes.
    """
    dims = q.shape[2]
    queries = gl.NVMMASharedLayout(128, 8 * q.itemsize, rank=2)
    line = gl.NVMMASharedLayout(0, 32, rank=1)
    return (
        TensorDescriptor.from_tensor(q.view(-1, dims), [COLUMNS.value, dims], queries),
        TensorDescriptor.from_tensor(weights.view(-1), [COLUMNS.value], line),
    )
