"""The lightning indexer's scores of long contexts on sm90, in Gluon: prefill.

The formula, arguments and results are those of `indexer_logits._score`, bit for bit. A program
keeps 384 keys, 128 for each of three groups of four warps, and the rows pass. The other warps have
queries and weights copied by the copy engine, STAGES steps of 128 heads ahead. In a step each group
makes two products, one after the other, and sums each over its heads:

    issue 0, wait | sum 0 | issue 1, wait | sum 1

Nothing overlaps within a group: while one waits for the matrix unit, the sums of the other two keep
the rest of the machine busy, three warps to a scheduler. e4m3 keys stay in registers, the left
operand of every product; 16-bit ones, twice as large, in shared memory. Short contexts have too few
tiles of 384 keys.
"""

from __future__ import annotations

from functools import lru_cache

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
# Keys of a product, groups of warps, and keys of a program: two products a group.
BLOCK = tl.constexpr(64)
GROUPS = tl.constexpr(3)
KEYS = tl.constexpr(384)
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
        length = gl.load(lengths + member, mask=member < stop, other=0).to(gl.int32)
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
def _store(product, weight, lane, scale, position, length, line, there, width,
           GROUP: gl.constexpr, HEADS: gl.constexpr):  # fmt: skip
    """Store what the products of BLOCK keys give, where it belongs."""
    logit = _sum_heads(product, weight, lane, GROUP, HEADS) * scale[:, None]
    logit = gl.where(position[:, None] < length[None, :], logit, float("-inf"))
    mask = there[None, :] & (position < width)[:, None]
    gl.store(line[None, :] + position[:, None], logit, mask=mask)


@gluon.jit
def _compute(
    index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows, starts, out,
    first_row, width, out_stride, table_stride, begin, row, last,
    keys, queries, head_weights, full, empty,
    HEADS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
    PAGE_SIZE: gl.constexpr, PAGE_BYTES: gl.constexpr, HELD: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """Every step with the keys of one group: positions from `begin + 128 * SIDE` on."""
    D: gl.constexpr = queries.shape[2]
    DTYPE: gl.constexpr = queries.dtype
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 256 // BITS])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 32 // BITS)
    TILE: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (D // 16), D // 16], [4, 1], [1, 0])
    LOGIT: gl.constexpr = _logit_layout(GROUP)
    begin += SIDE * 2 * BLOCK
    place0 = begin + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LOGIT))
    place1 = place0 + BLOCK
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
        if HELD:
            key0 = _keys(index_cache, page_row, origin, begin, own, PAGED, PAGE_SIZE, PAGE_BYTES,
                         D, DTYPE, OPERAND)  # fmt: skip
            key1 = _keys(index_cache, page_row, origin, begin + BLOCK, own, PAGED, PAGE_SIZE,
                         PAGE_BYTES, D, DTYPE, OPERAND)  # fmt: skip
        else:
            gl.thread_barrier()  # the products of the request before have been made
            for block in gl.static_range(2):
                key = _keys(index_cache, page_row, origin, begin + block * BLOCK, own, PAGED,
                            PAGE_SIZE, PAGE_BYTES, D, DTYPE, TILE)  # fmt: skip
                keys.index(2 * SIDE + block).store(key)
            fence_async_shared()
            gl.thread_barrier()
        scale0 = _scales(index_cache, page_row, origin, place0, own, PAGED, PAGE_SIZE, PAGE_BYTES,
                         D)  # fmt: skip
        scale1 = _scales(index_cache, page_row, origin, place1, own, PAGED, PAGE_SIZE, PAGE_BYTES,
                         D)  # fmt: skip
        for first in range(row, stop, GROUP):
            stage = step % STAGES
            to = first + group_row
            length = gl.load(lengths + to, mask=to < stop, other=0)
            line = out + (to - first_row).to(gl.int64) * out_stride
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            query = queries.index(stage).permute((1, 0))
            if HELD:
                left0 = key0
                left1 = key1
            else:
                mine = 2 * SIDE + zero_unseen(step)
                left0 = keys.index(mine)
                left1 = keys.index(mine + 1)
            product = warpgroup_mma(left0, query, zero, use_acc=False, is_async=True)
            weight = head_weights.index(stage).load(gl.SliceLayout(0, PRODUCT))
            product = warpgroup_mma_wait(0, deps=[product])
            _store(product, weight, lane, scale0, place0, length, line, to < stop, width, GROUP,
                   HEADS)  # fmt: skip
            product = warpgroup_mma(left1, query, zero, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            gl.thread_barrier()  # all four warps are through with this step's buffer
            mbarrier.arrive(empty.index(stage), count=1)
            _store(product, weight, lane, scale1, place1, length, line, to < stop, width, GROUP,
                   HEADS)  # fmt: skip
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
    HELD: gl.constexpr = q.dtype.primitive_bitwidth == 8
    program = gl.program_id(0)
    begin = (program % num_tiles) * KEYS
    row = first_row + (program // num_tiles) * block_rows
    last = gl.minimum(row + block_rows, num_rows)
    if begin >= gl.minimum(_longest(lengths, row, last), width):
        if FILL:
            nothing = gl.full([128], float("-inf"), gl.float32, layout=FLAT)
            for filled in range(row, last):
                line = out + (filled - first_row).to(gl.int64) * out_stride
                for part in gl.static_range(KEYS // 128):
                    position = begin + part * 128 + gl.arange(0, 128, layout=FLAT)
                    gl.store(line + position, nothing, mask=position < width)
        row = last

    queries = gl.allocate_shared_memory(q.dtype, [STAGES, COLUMNS, D], q.layout)
    head_weights = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], weights.layout)
    keys = queries
    if not HELD:
        keys = gl.allocate_shared_memory(q.dtype, [KEYS // BLOCK, BLOCK, D], q.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    gl.warp_specialize(
        [
            (_fetch, (q, weights, request_of_row, cu_seqlens_q, row, last, queries, head_weights,
                      full, empty, HEADS, GROUP, STAGES)),
            (_compute, (index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows,
                        starts, out, first_row, width, out_stride, table_stride, begin, row, last,
                        keys, queries, head_weights, full, empty, HEADS, GROUP, STAGES, PAGED,
                        PAGE_SIZE, PAGE_BYTES, HELD, 0)),
            (_compute, (index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows,
                        starts, out, first_row, width, out_stride, table_stride, begin, row, last,
                        keys, queries, head_weights, full, empty, HEADS, GROUP, STAGES, PAGED,
                        PAGE_SIZE, PAGE_BYTES, HELD, 1)),
            (_compute, (index_cache, lengths, request_of_row, cu_seqlens_q, table, table_rows,
                        starts, out, first_row, width, out_stride, table_stride, begin, row, last,
                        keys, queries, head_weights, full, empty, HEADS, GROUP, STAGES, PAGED,
                        PAGE_SIZE, PAGE_BYTES, HELD, 2)),
        ],
        [4, 4, 4], [160, 160, 160],
    )  # fmt: skip


@lru_cache(maxsize=1024)
def rows_of(num_sms: int, tiles: int, rows: int) -> int:
    """How many rows a program takes, so that programs end together and read keys seldom."""
    least, best = None, rows
    for groups in range(max(1, -(-rows // 512)), max(1, rows // 96) + 1):
        each = -(-rows // (4 * groups)) * 4
        # What a program does before its first row takes about as long as eight rows.
        time = -(-tiles * -(-rows // each) // num_sms) * (each + 8)
        if least is None or time < least:
            least, best = time, each
    return best


def stages_of(itemsize: int) -> int:
    """How many steps of queries fit beside the keys."""
    return 4 if itemsize == 1 else 3


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
