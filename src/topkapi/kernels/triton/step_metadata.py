"""A step's metadata in one launch: which request each query row is of, and what it sees.

    q_b = query length of request b, n_b = its kv length (+ kv_shift if it is not 0)
    cu_seqlens_q = 0, q_0, q_0 + q_1, ...
    row r of request b: length = n_b - (cu_seqlens_q[b + 1] - r) + 1, selected = min(length, topk)

Padding rows, rows that write to slot 0, and requests that are not given have length 0. The same
function as `attention.step_metadata`, for its buffers: launches there are a dozen. One program
computes the prefix sums of all requests (in each block of rows anew: they are few) and searches
them for its rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from topkapi.dispatch import Kernel
from topkapi.kernels.triton.target import refuse_device

BLOCK_ROWS = 256


@triton.jit(do_not_specialize=["num_requests", "num_rows", "num_q_lens", "q_len", "given",
                               "topk", "kv_shift", "num_locations"])  # fmt: skip
def _fill(
    q_lens, kv_lens, request_rows, out_cache_loc,
    table_rows_out, kv_lens_out, cu_seqlens_q_out, request_of_row_out, lengths_out, selected_out,
    num_requests, num_rows, num_q_lens, q_len, given, topk, kv_shift, num_locations,
    HAS_Q_LENS: tl.constexpr, HAS_LOCATIONS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    leader = tl.program_id(0) == 0
    before = 0  # queries of the requests before this block of them
    owner = tl.zeros([BLOCK_R], tl.int32)  # requests that end at or before the row
    stop = tl.zeros([BLOCK_R], tl.int32)
    for first in range(0, num_requests, BLOCK_B):
        request = first + tl.arange(0, BLOCK_B)
        exists = request < num_requests
        if HAS_Q_LENS:
            queries = tl.load(q_lens + request, mask=exists & (request < num_q_lens), other=0)
            queries = queries.to(tl.int32)
        else:
            queries = tl.where(exists, q_len, 0)
        ends = before + tl.cumsum(queries, axis=0)
        owner += tl.sum((exists[None, :] & (ends[None, :] <= row[:, None])).to(tl.int32), axis=1)
        before += tl.sum(queries, axis=0)
        if leader:
            kv_len = tl.load(kv_lens + request, mask=request < given, other=0).to(tl.int32)
            kv_len = tl.where(kv_len > 0, kv_len + kv_shift, 0)
            tl.store(kv_lens_out + request, kv_len, mask=exists)
            of = tl.load(request_rows + request, mask=request < given, other=0).to(tl.int64)
            tl.store(table_rows_out + request, of, mask=exists)
            tl.store(cu_seqlens_q_out + 1 + request, ends, mask=exists)
    if leader:
        tl.store(cu_seqlens_q_out, 0)
    owner = tl.minimum(owner, num_requests - 1)
    # The end of the owner's rows, by a second walk: what other programs store is not read.
    done = 0
    for first in range(0, num_requests, BLOCK_B):
        request = first + tl.arange(0, BLOCK_B)
        if HAS_Q_LENS:
            queries = tl.load(q_lens + request, mask=request < num_q_lens, other=0).to(tl.int32)
            queries = tl.where(request < num_requests, queries, 0)
        else:
            queries = tl.where(request < num_requests, q_len, 0)
        ends = done + tl.cumsum(queries, axis=0)
        stop += tl.sum(tl.where(request[None, :] == owner[:, None], ends[None, :], 0), axis=1)
        done += tl.sum(queries, axis=0)
    kv_len = tl.load(kv_lens + owner, mask=owner < given, other=0).to(tl.int32)
    kv_len = tl.where(kv_len > 0, kv_len + kv_shift, 0)
    live = row < before
    if HAS_LOCATIONS:
        live &= tl.load(out_cache_loc + row, mask=row < num_locations, other=0) > 0
    length = tl.where(live, tl.maximum(kv_len - (stop - row) + 1, 0), 0)
    mask = row < num_rows
    tl.store(request_of_row_out + row, owner, mask=mask)
    tl.store(lengths_out + row, length, mask=mask)
    tl.store(selected_out + row, tl.minimum(length, topk), mask=mask)


def step_metadata(
    *,
    table_rows: torch.Tensor,
    kv_lens_out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    request_of_row: torch.Tensor,
    lengths: torch.Tensor,
    selected_lens: torch.Tensor,
    q_lens: torch.Tensor | int,
    kv_lens: torch.Tensor,
    request_rows: torch.Tensor,
    topk: int,
    kv_shift: int = 0,
    out_cache_loc: torch.Tensor | None = None,
) -> None:
    """Fill `table_rows [B]` int64, `kv_lens_out [B]`, `cu_seqlens_q [B+1]`, `request_of_row [R]`,
    `lengths [R]` and `selected_lens [R]` int32 from `q_lens` (`[b]` or one int), `kv_lens [b]`,
    `request_rows [b]`, b <= B. One launch; never synchronises; safe inside capture.
    """
    requests, rows = kv_lens_out.shape[0], lengths.shape[0]
    per_request = isinstance(q_lens, torch.Tensor)
    if requests == 0:
        cu_seqlens_q.zero_()
        return
    _fill[(max(1, triton.cdiv(rows, BLOCK_ROWS)),)](
        q_lens if per_request else kv_lens, kv_lens, request_rows,
        kv_lens if out_cache_loc is None else out_cache_loc,
        table_rows, kv_lens_out, cu_seqlens_q, request_of_row, lengths, selected_lens,
        requests, rows, q_lens.shape[0] if isinstance(q_lens, torch.Tensor) else 0,
        0 if isinstance(q_lens, torch.Tensor) else q_lens, kv_lens.shape[0], topk, kv_shift,
        0 if out_cache_loc is None else out_cache_loc.shape[0],
        HAS_Q_LENS=per_request, HAS_LOCATIONS=out_cache_loc is not None,
        BLOCK_B=min(64, triton.next_power_of_2(requests)), BLOCK_R=BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


STEP_METADATA = Kernel("triton", "step_metadata", refuse_device, step_metadata)
