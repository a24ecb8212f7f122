"""How fp8 records reach shared memory as they are on sm90, and a program's slots before them.

The promises are those of `gather.py`. Slots lie in shared memory, those of many tiles at a time:
what a thread loads returns in order, so that a slot loaded behind a tile's records would come when
they have come.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from topkapi.kernels.hopper.gather import (
    GROUPS,
    LATENT_DIM,
    ROPE_DIM,
    copy_rope,
    signal_full,
    told_count,
)

# Tiles whose slots lie in shared memory.
LINES = tl.constexpr(32)
# Tiles that a program asks for before the first of them has come. With more under way in all
# programs at once, every one of them comes later.
ASKED = tl.constexpr(2)


@gluon.jit
def _places(turn, splits, N: gl.constexpr):
    """Where the slots of a program's tiles `turn : turn + LINES` stand in their row."""
    index = gl.arange(0, LINES * N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return (gl.program_id(1) + (turn + index // N) * splits) * N + index % N


@gluon.jit
def load_turns(slots, turn, splits, K, N: gl.constexpr):
    """Start loading the slots of a program's tiles `turn : turn + LINES`; anything past K.

    Addresses are clamped, so that one predicate does for all: see `gather.row_end`.
    """
    return gl.load(slots + gl.minimum(_places(turn, splits, N), K - 1), mask=K > 0, other=-1)


@gluon.jit
def _within(slot, turn, splits, K, N: gl.constexpr):
    """What `load_turns` loaded, -1 past K."""
    return gl.where(_places(turn, splits, N) < K, slot, -1)


@gluon.jit
def _list(slot, lists):
    lists._reinterpret(gl.int32, [lists.shape[0] * lists.shape[1]], lists.layout).store(slot)
    gl.thread_barrier()


@gluon.jit
def _last_turn(slot, N: gl.constexpr):
    """How many tiles there are up to the last one with a slot in it."""
    index = gl.arange(0, LINES * N, layout=slot.type.layout)
    return gl.max(gl.where(slot >= 0, index // N + 1, 0), axis=0)


@gluon.jit
def list_turns(loaded, turns, N: gl.constexpr):
    """List the slots of a program's first tiles, and find how many tiles it has.

    `loaded` is what `load_turns` loaded of those; `turns` what `copy_codes` takes. `listed` and
    `counted` signal.
    """
    slots, K, splits, lists, listed, count, counted = turns
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = _within(loaded, 0, splits, K, N)
    _list(slot, lists)
    mbarrier.arrive(listed, count=1)
    tiles = _last_turn(slot, N)
    for turn in range(LINES, (K + N - 1) // N // splits + 1, LINES):
        slot = _within(load_turns(slots, turn, splits, K, N), turn, splits, K, N)
        last = _last_turn(slot, N)
        tiles = gl.where(last > 0, turn + last, tiles)
    count.store(gl.full([1], 1, gl.int32, layout=ONE) * tiles)
    gl.thread_barrier()
    mbarrier.arrive(counted, count=1)


@gluon.jit
def _copy_tile(kv, slot, records, stage, RECORD: gl.constexpr):
    """Start filling a tile, 16 bytes a copy."""
    codes, scales, ropes, shifts, full, _ = records
    ROW: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    STAGES: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    codes = codes._reinterpret(gl.int32, [STAGES, N, LATENT_DIM // 4], WORDS)
    scales = scales._reinterpret(gl.int32, [STAGES, N, GROUPS], scales.layout)
    ropes = ropes._reinterpret(gl.int32, [STAGES, N, ROPE_DIM // 2], WORDS)
    words = kv.to(gl.pointer_type(gl.int32))
    there = (slot >= 0)[:, None]
    record = (words + gl.maximum(slot, 0).to(gl.int64) * RECORD)[:, None]
    word = gl.arange(0, LATENT_DIM // 4, layout=gl.SliceLayout(0, ROW))
    async_copy.async_copy_global_to_shared(codes.index(stage), record + word[None, :], mask=there)
    word = LATENT_DIM // 4 + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, ROW))
    async_copy.async_copy_global_to_shared(scales.index(stage), record + word[None, :], mask=there)
    copy_rope(kv, slot, ropes, stage, RECORD)
    signal_full(slot, shifts, full, stage)


@gluon.jit
def copy_codes(kv, turns, records, RECORD: gl.constexpr):
    """Fill every tile by asynchronous copies, waiting for none but the one ASKED tiles before.

    Of as many tiles as there is room for, `records` holds `codes [N, 256]` pairs, `scales [N, 4]`,
    `ropes [N, 64]`, `shifts [N]`, and what signals that a tile is full and that it is empty. The
    first two tiles are filled in any case: how many there are is waited for after that.
    """
    slots, K, splits, lists, listed, count, counted = turns
    codes, _, _, _, full, empty = records
    ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
    STAGES: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    mbarrier.wait(listed, 0)
    tile, tiles = 0, 2
    stage, phase = 0, 1
    while tile < tiles:
        if tile % LINES == 0 and tile > 0:
            _list(_within(load_turns(slots, tile, splits, K, N), tile, splits, K, N), lists)
        slot = lists.index(tile % LINES).load(ROW)
        if tile >= ASKED:
            before = tile - ASKED
            mbarrier.wait(full.index(before % STAGES), (before // STAGES) & 1)
        mbarrier.wait(empty.index(stage), phase)
        _copy_tile(kv, slot, records, stage, RECORD)
        if tile == 1:
            mbarrier.wait(counted, 0)
            tiles = gl.maximum(told_count(count), 2)
        tile += 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
