"""Exactly the k highest logits of each row, whatever its length; ties to the lowest position.

One program takes one row, or one after the other, in three steps.

floor    a sample of the row gives a key, the floor, that about k + slack of the row's keys exceed.
collect  one pass over the row notes, in order, the value and the position of every key above the
         floor. A comparison is one bit; 32 neighbours are a word; from words on, work is only done
         for what was found.
choose   the k-th highest of what was collected is searched for in registers, and the positions of
         those that reach it are written, in order.

The sample only decides how much is collected. When it misjudged (fewer than k, or more than
registers hold) the k-th highest is searched for in memory instead, in the list if that is complete,
or else in the row: the result is the same, exact and deterministic. Rows short enough to be held
are never sampled; no row is ever sorted. Where rows are few and long, several programs collect one
row (`_collect_rows`), and another chooses (`_choose_rows`); where they are fewer still, those of
`topk_few` do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from topkapi.context import Context
from topkapi.device import DeviceInfo
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.candidates import (
    _collect,
    _give,
    _give_all,
    _highest,
    _highest_in_memory,
    _quads,
    _ranks,
)
from topkapi.kernels.triton.target import launches_early, refuse_device, target_of
from topkapi.kernels.triton.thresholds import LOWEST, _floor_of_sample
from topkapi.kernels.triton.topk_few import _choose_few, _collect_few

WORKSPACE_BYTES = 64 * 2**20


@triton.jit(do_not_specialize=["rows", "row_stride", "k", "programs", "table_stride"])
def _select_rows(
    logits, lengths, starts, words, values, positions, out,
    request_of_row, table, table_rows, context_starts,
    rows, row_stride, k, programs, table_stride,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, SLOTS: tl.constexpr, PAGED: tl.constexpr,
    SAMPLE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
    LIMIT: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if not SHORT:
        words += program * (BLOCK // 32)
        values += program.to(tl.int64) * LIMIT
        positions += program.to(tl.int64) * LIMIT
    row = program
    while row < rows:
        length = tl.load(lengths + row).to(tl.int32)
        to = out + row.to(tl.int64) * k
        line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
        if HAS_STARTS:
            line += tl.load(starts + row)
        size = length
        source = line
        listed = length < 0
        floor = tl.full([], 0, tl.uint32)
        if not SHORT:  # noqa: SIM102
            if (length > HELD) & (length > k):
                floor = _floor_of_sample(line, length, k, SAMPLE, RUN)
                tl.debug_barrier()  # the row before has been read to its end
                found = _collect(line, 0, length, floor, k, words, values, positions, LIMIT, BLOCK)
                tl.debug_barrier()
                listed = (found >= k) & (found <= LIMIT) & (floor > LOWEST)
                size = tl.where(listed, found, length)
                source = values if listed else line
        if (length > k) & (size <= HELD):
            index = _quads(HELD)
            logit = tl.load(source + index, mask=index < size, other=float("nan"))
            keep = _highest(logit, index, size, floor, k, HELD)
            rank, _ = _ranks(keep.to(tl.int32))
            position = index
            if listed:
                position = tl.load(positions + index, mask=keep, other=0)
            _give(to, rank - 1, position, keep, row, request_of_row, table, table_rows,
                  context_starts, table_stride, SLOTS, PAGED)  # fmt: skip
        elif length > k:  # noqa: SIM102
            if not SHORT:
                _highest_in_memory(source, positions, listed, size, floor, k, to, row,
                                   request_of_row, table, table_rows, context_starts, table_stride,
                                   SLOTS, PAGED)  # fmt: skip
        _give_all(to, length, k, row, request_of_row, table, table_rows, context_starts,
                  table_stride, SLOTS, PAGED)  # fmt: skip
        row += programs


@triton.jit(do_not_specialize=["row_stride", "k", "splits"])
def _collect_rows(
    logits, lengths, starts, words, values, positions, counts, floors, row_stride, k, splits,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, SAMPLE: tl.constexpr, RUN: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One of `splits` stretches of a row. All of a row's programs find the same floor."""
    program = tl.program_id(0)
    row = program // splits
    length = tl.load(lengths + row).to(tl.int32)
    count = 0
    if (length > HELD) & (length > k):
        line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
        if HAS_STARTS:
            line += tl.load(starts + row)
        floor = _floor_of_sample(line, length, k, SAMPLE, RUN)
        span = (((length + splits - 1) // splits + BLOCK - 1) // BLOCK) * BLOCK
        begin = tl.minimum((program % splits) * span, length)
        end = tl.minimum(begin + span, length)
        words += program * (BLOCK // 32)
        values += program.to(tl.int64) * HELD
        positions += program.to(tl.int64) * HELD
        count = _collect(line, begin, end, floor, k, words, values, positions, HELD, BLOCK)
        tl.store(floors + row, floor)
    tl.store(counts + program, count)


@triton.jit(do_not_specialize=["row_stride", "k", "splits", "table_stride"])
def _choose_rows(
    logits, lengths, starts, values, positions, counts, floors, out,
    request_of_row, table, table_rows, context_starts,
    row_stride, k, splits, table_stride,
    HAS_STARTS: tl.constexpr, STRIDE_UNIT: tl.constexpr, SLOTS: tl.constexpr, PAGED: tl.constexpr,
    MOST_SPLITS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The choice from what `_collect_rows` collected of one row."""
    row = tl.program_id(0)
    length = tl.load(lengths + row).to(tl.int32)
    out += row.to(tl.int64) * k
    line = logits + row.to(tl.int64) * row_stride * STRIDE_UNIT
    if HAS_STARTS:
        line += tl.load(starts + row)
    size = length
    index = _quads(HELD)
    place = index
    floor = tl.full([], 0, tl.uint32)
    listed = (length > HELD) & (length > k)
    if listed:
        # Candidate j lies in the stretch where j falls among the counts, behind earlier gaps.
        size = 0
        for split in tl.static_range(MOST_SPLITS):
            count = tl.load(counts + row * splits + split, mask=split < splits, other=HELD)
            place += tl.where((split < splits) & (index >= size + count), HELD - count, 0)
            size += tl.where(split < splits, count, 0)
        floor = tl.load(floors + row)
        listed = (size >= k) & (size <= HELD) & (floor > LOWEST)
        if not listed:
            _highest_in_memory(line, positions, listed, length, floor, k, out, row,
                               request_of_row, table, table_rows, context_starts, table_stride,
                               SLOTS, PAGED)  # fmt: skip
            size = HELD + 1
    if (length > k) & (size <= HELD):
        inside = index < size
        position = index
        base = row.to(tl.int64) * splits * HELD
        source = values + base if listed else line
        logit = tl.load(source + place, mask=inside, other=float("nan"))
        if listed:
            # With the logits, not after the choice: rows are few, and this is one wait less.
            position = tl.load(positions + base + place, mask=inside, other=0)
        keep = _highest(logit, index, size, floor, k, HELD)
        rank, _ = _ranks(keep.to(tl.int32))
        _give(out, rank - 1, position, keep, row, request_of_row, table, table_rows,
              context_starts, table_stride, SLOTS, PAGED)  # fmt: skip
    _give_all(out, length, k, row, request_of_row, table, table_rows, context_starts,
              table_stride, SLOTS, PAGED)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How a top-k is launched.

    `held`: logits a program holds in registers; `limit`: candidates it may list; `sample` and `run`
    of `_floor_of_sample`; `block`: columns compared at a time; `splits`: programs a row, where more
    than one; `programs`: programs in all, where one takes rows after rows; `registers`: the most a
    thread may use, 0 for the compiler's choice; `few` takes the kernels of `topk_few`, and
    `choosing` warps for the second of them.
    """

    held: int
    limit: int
    sample: int
    run: int
    block: int
    warps: int
    splits: int
    programs: int
    registers: int
    few: bool = False
    choosing: int = 0


def choose_plan(device: DeviceInfo, rows: int, width: int, k: int) -> Plan:
    """The launch for `rows` of `width` columns."""
    held = min(16384, max(4096, int(triton.next_power_of_2(2 * k))))
    sms = max(device.num_sms, 1)
    sample = 4096 if width <= 262144 else 8192
    if width <= max(held, 8192):
        held = max(held, int(triton.next_power_of_2(width)))
        return Plan(held, held, sample, 8, 8192, 8 if held <= 8192 else 16, 1, rows, 64)
    few = next((n for n in (32, 16) if n * rows <= sms), 0)
    if few and 2 * k <= 8192 and 32768 < width <= 262144:
        sample = 2048 if few == 32 and k <= 2048 else sample
        return Plan(
            8192, 8192, sample, 8, 65536 // few, 8, few, rows * few, 0, True, 8 * (few // 16)
        )
    splits = min(max(min(8, width // 8192), min(32, width // 32768)), 2 * sms // max(rows, 1))
    if splits > 1 and 2 * k <= 8192:
        held = max(held, 8192)
        return Plan(held, held, sample, 8, 8192, 16, splits, rows * splits, 0)
    limit = max(16384, int(triton.next_power_of_2(2 * k)))
    most = max(1, min(rows, 4 * sms, WORKSPACE_BYTES // (8 * limit)))
    rounds = max(1, -(-rows // most))
    programs = -(-rows // rounds)  # as many rows to one as to another
    return Plan(held, limit, sample, 8, 8192, 16 if held > 4096 else 8, 1, programs, 64)


def workspace_bytes(plan: Plan, width: int) -> int:
    """Bytes of the lists of candidates that a launch over `width` columns needs."""
    return 0 if width <= plan.held else 8 * plan.programs * plan.limit


def _mapping(context: Context | None, rows: slice, unused: torch.Tensor) -> dict[str, Any]:
    """The arguments that turn positions of some of a context's rows into slots."""
    paged = context is not None and context.table is not None
    found = {
        "request_of_row": unused if context is None else context.request_of_row[rows],
        "table": unused,
        "table_rows": unused,
        "context_starts": unused,
    }
    if context is not None:
        for name, tensor in (
            ("table", context.table),
            ("table_rows", context.table_rows),
            ("context_starts", context.starts),
        ):
            found[name] = unused if tensor is None else tensor
    return {
        **found,
        "table_stride": found["table"].stride(0),
        "SLOTS": context is not None,
        "PAGED": paged,
    }


def launch_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    out: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    slots_of: Context | None = None,
    first_row: int = 0,
    follows: bool = False,
    plan: Plan | None = None,
) -> None:
    """Select `k` of each row of `logits [rows, >= S]` into `out [rows, k]` int32.

    With `slots_of`, rows are `first_row + i` of that context and slots are written, not positions.
    `follows`: what wrote `logits` is the launch before this one, and wrote nothing else that is
    read here. Never synchronises.
    """
    rows, width = logits.shape
    device = target_of(logits)
    plan = plan or choose_plan(device, rows, width, k)
    short = width <= plan.held

    def scratch(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(1 if short else size, dtype=dtype, device=logits.device)

    # The kernels of few rows keep no bits.
    words = scratch(0 if plan.few else plan.programs * (plan.block // 32), torch.int32)
    values = scratch(plan.programs * plan.limit, torch.float32)
    positions = scratch(plan.programs * plan.limit, torch.int32)
    aligned = logits.stride(0) % 4 == 0 and logits.data_ptr() % 16 == 0 and starts is None
    unit = 4 if aligned else 1
    unused = positions
    mapping = _mapping(slots_of, slice(first_row, first_row + rows), unused)
    shape = {"HAS_STARTS": starts is not None, "STRIDE_UNIT": unit, "num_warps": plan.warps}
    stride = logits.stride(0) // unit
    row_starts = unused if starts is None else starts
    sampling = {"SAMPLE": plan.sample, "RUN": plan.run, "BLOCK": plan.block}
    if plan.splits > 1:
        counts = scratch(rows * plan.splits, torch.int32)
        floors = scratch(rows, torch.uint32)
    if plan.few:
        early = launches_early(device)
        ways = {"EARLY": early, "PTX": device.backend == "cuda", "HELD": plan.held}
        ahead = {"launch_pdl": True} if early else {}
        _collect_few[(plan.programs,)](
            logits, lengths, row_starts, values, positions, counts, floors, stride, k, plan.splits,
            **sampling, **shape, **ways, **(ahead if follows else {}),
        )  # fmt: skip
        _choose_few[(rows,)](
            logits, lengths, row_starts, values, positions, counts, floors, out,
            row_stride=stride, k=k, splits=plan.splits, **mapping,
            **(shape | {"num_warps": plan.choosing}), **ways, **ahead,
            MOST_SPLITS=triton.next_power_of_2(plan.splits),
        )  # fmt: skip
        return
    if plan.splits > 1:
        _collect_rows[(rows * plan.splits,)](
            logits, lengths, row_starts, words, values, positions, counts, floors,
            stride, k, plan.splits, **sampling, **shape, HELD=plan.held,
        )  # fmt: skip
        _choose_rows[(rows,)](
            logits, lengths, row_starts, values, positions, counts, floors, out,
            row_stride=stride, k=k, splits=plan.splits, **mapping, **shape,
            MOST_SPLITS=triton.next_power_of_2(plan.splits), HELD=plan.held,
        )  # fmt: skip
        return
    if plan.registers and device.backend == "cuda":
        shape["maxnreg"] = plan.registers
    _select_rows[(plan.programs,)](
        logits, lengths, row_starts, words, values, positions, out,
        rows=rows, row_stride=stride, k=k, programs=plan.programs, **mapping, **sampling, **shape,
        HELD=plan.held, LIMIT=plan.limit, SHORT=short,
    )  # fmt: skip


def topk(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, *, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """See `reference.topk`. Never synchronises; safe inside capture.

    Temporaries: at most `WORKSPACE_BYTES`, or what one row needs (at most 2 MB).
    """
    out = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
    if logits.shape[0] == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    launch_topk(logits, lengths, k, out, starts=starts)
    return out


def refuse_topk(problem: Problem) -> str | None:
    """Why this package cannot select `problem.topk` of a row, or None."""
    reason = refuse_device(problem)
    if reason is not None:
        return reason
    return f"selects at most 65536, got {problem.topk}" if problem.topk > 65536 else None


TOPK = Kernel("triton", "topk", refuse_topk, topk)
