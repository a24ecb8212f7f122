"""How records reach shared memory on sm90: what the gathering warps do, and what they promise.

A gathering partition owns some tokens of every tile of a row's slots. It waits until the buffer
`tile % 2` is empty, fills its part, and signals that. A filled buffer is

    latents [N, 512]  the record's, in q's dtype; of an fp8 record, fp16 values that times 2^shift
                      are the record's
    ropes   [N, 64]   the record's
    tokens  [N] fp32  2^shift (1 where there is none), or 0 where no slot is

and holds zeros where there is no slot, so that whatever lies in slot 0 does not matter. Whoever
waits for it makes it visible to the matrix unit (`fence_async_shared`): in a gathering warp that
fence would wait for the loads under way.

fp8 latents are dequantised on the way, in two instructions for two values: e4m3 to fp16 is exact,
and one fp16 product scales by `scale / 2^shift`. fp16 keeps 11 bits of that, bf16 would keep 8.
What needs no work is copied asynchronously, and signals by itself when it is there.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

LATENT_DIM = tl.constexpr(512)
ROPE_DIM = tl.constexpr(64)
GROUP_DIM = tl.constexpr(128)
GROUPS = tl.constexpr(4)
# Signals that make a tile full: of a gathering partition 128 threads, whose copies signal by
# themselves, and one when the rest is written.
COPIED = tl.constexpr(129)
# Tokens of fp8 records that a gathering partition holds in one set of registers.
PIECE = tl.constexpr(16)
# Slots that a program looks at in one go for the last one of its row.
SCANNED = tl.constexpr(2048)
# Magnitudes all below 2^LEAST count as zeros; fp16 overflows where they are far above 2^MOST.
LEAST = tl.constexpr(-60)
MOST = tl.constexpr(120)
# Four e4m3 codes times a pair of equal fp16 factors: two pairs of fp16.
DEQUANTISE = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 pair;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mul.rn.f16x2 $0, pair, $3;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mul.rn.f16x2 $1, pair, $3;
}""")
# The same fp16 value twice.
TWICE = tl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")


@gluon.jit
def power_of_two(exponent):
    """`2^exponent` of int32 exponents between -126 and 127, exactly."""
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def exponent_of(value):
    """`floor(log2(value))` of fp32 values that are not negative, within LEAST .. MOST."""
    bits = value.to(gl.int32, bitcast=True)
    return gl.minimum(gl.maximum((bits >> 23) - 127, LEAST), MOST)


@gluon.jit
def places(slots, K, splits, BLOCK_N: gl.constexpr, SPLIT: gl.constexpr):
    """Where this program's share of a row's slots begins and ends.

    A row ends after its last slot that is not -1: padding at the end costs nothing.
    """
    SCAN: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    end = 0
    for first in range(0, K, SCANNED):
        place = first + gl.arange(0, SCANNED, layout=SCAN)
        slot = gl.load(slots + place, mask=place < K, other=-1)
        end = gl.maximum(end, gl.max(gl.where(slot >= 0, place + 1, 0), axis=0))
    begin = 0
    if SPLIT:
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        span = ((tiles + splits - 1) // splits) * BLOCK_N
        begin = gl.minimum(gl.program_id(1) * span, end)
        end = gl.minimum(end, begin + span)
    return begin, end


@gluon.jit
def _slots_at(slots, first, end, N: gl.constexpr):
    """N slots, -1 past `end`, in the rows of the layout that records are loaded in."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    place = first + gl.arange(0, N, layout=gl.SliceLayout(1, ROW))
    return gl.load(slots + place, mask=place < end, other=-1)


@gluon.jit
def _words(kv, slot, RECORD: gl.constexpr, FIRST: gl.constexpr, WORDS: gl.constexpr,
           WIDTH: gl.constexpr):  # fmt: skip
    """`WORDS` words of 4 bytes from word FIRST of the records, `[N, WORDS]` int32.

    Smaller values that a loop carries would take a register each.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, WIDTH], [4, 8], [4, 1], [1, 0])
    words = kv.to(gl.pointer_type(gl.int32)) + FIRST
    slot = gl.convert_layout(slot, gl.SliceLayout(1, ROW), assert_trivial=True)
    record = gl.maximum(slot, 0).to(gl.int64) * RECORD
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, ROW))
    return gl.load(words + record[:, None] + word[None, :], mask=(slot >= 0)[:, None], other=0)


@gluon.jit
def _fetch(kv, slot, RECORD: gl.constexpr):
    """Start loading codes and scales into registers."""
    codes = _words(kv, slot, RECORD, 0, LATENT_DIM // 4, 2)
    return codes, _words(kv, slot, RECORD, LATENT_DIM // 4, GROUPS, 4)


@gluon.jit
def _fill(slot, codes, scale, latents, tokens, stage, FIRST: gl.constexpr):
    """Latents that `_fetch` loaded into their places from token FIRST of a tile.

    One store into each: between several into one buffer the compiler puts barriers.
    """
    scale = scale.to(gl.float32, bitcast=True)  # [PIECE, GROUPS]
    # Codes (up to 448) times what is left of their scale stay below 448 * 2^7, fp16 ends at 65504.
    shift = exponent_of(gl.max(scale, axis=1)) - 6
    pair = gl.inline_asm_elementwise(
        TWICE, "=r,f", [scale * power_of_two(-shift)[:, None]], dtype=gl.int32, is_pure=True, pack=1
    )
    codes = gl.reshape(codes, [PIECE, GROUPS, GROUP_DIM // 4])
    pair = gl.convert_layout(pair, gl.SliceLayout(2, codes.type.layout), assert_trivial=True)
    low, high = gl.inline_asm_elementwise(
        DEQUANTISE, "=r,=r,r,r", [codes, pair[:, :, None]], dtype=(gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    latents.index(stage).slice(FIRST, PIECE, dim=0).store(
        gl.reshape(gl.join(low, high), [PIECE, LATENT_DIM // 2])
    )
    valid = gl.convert_layout(slot, shift.type.layout, assert_trivial=True) >= 0
    tokens.index(stage).slice(FIRST, PIECE, dim=0).store(gl.where(valid, power_of_two(shift), 0.0))


@gluon.jit
def _copy_rope(kv, slot, ropes, stage, RECORD: gl.constexpr, FIRST: gl.constexpr):
    """Start copying the rope of PIECE records, as it is, into a tile from token FIRST."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    slot = gl.convert_layout(slot, gl.SliceLayout(1, ROW), assert_trivial=True)
    words = kv.to(gl.pointer_type(gl.int32)) + (LATENT_DIM // 4 + GROUPS)
    word = gl.arange(0, ROPE_DIM // 2, layout=gl.SliceLayout(0, ROW))
    record = gl.maximum(slot, 0).to(gl.int64) * RECORD
    async_copy.async_copy_global_to_shared(
        ropes.index(stage).slice(FIRST, PIECE, dim=0),
        words + record[:, None] + word[None, :],
        mask=(slot >= 0)[:, None],
    )


@gluon.jit
def gather_fp8(
    kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty, RECORD: gl.constexpr,
    N: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """Fill tokens `FIRST : FIRST + COUNT` of every tile with fp8 records.

    Ropes are copied as they are. Latents pass through registers, 16 tokens at a time: four pieces
    have registers of their own, `a` to `d`, the whole of a tile or its half and the next tile's.
    As soon as one is stored, the piece after the next three is loaded in its place. A register that
    is moved or spilled before its load has ended waits for it; so the slots, which are moved, are
    loaded a whole turn before that.
    """
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    # Tiles of four pieces, and where the third of them lies after the first.
    TURN: gl.constexpr = 4 * PIECE // COUNT
    THIRD: gl.constexpr = 2 * PIECE if TURN == 1 else N
    latents = latents._reinterpret(gl.int32, [2, N, LATENT_DIM // 2], WORDS)
    ropes = ropes._reinterpret(gl.int32, [2, N, ROPE_DIM // 2], WORDS)
    first = begin + FIRST
    slot_a = _slots_at(slots, first, end, PIECE)
    slot_b = _slots_at(slots, first + PIECE, end, PIECE)
    slot_c = _slots_at(slots, first + THIRD, end, PIECE)
    slot_d = _slots_at(slots, first + THIRD + PIECE, end, PIECE)
    first += TURN * N
    next_a = _slots_at(slots, first, end, PIECE)
    next_b = _slots_at(slots, first + PIECE, end, PIECE)
    next_c = _slots_at(slots, first + THIRD, end, PIECE)
    next_d = _slots_at(slots, first + THIRD + PIECE, end, PIECE)
    codes_a, scale_a = _fetch(kv, slot_a, RECORD)
    codes_b, scale_b = _fetch(kv, slot_b, RECORD)
    codes_c, scale_c = _fetch(kv, slot_c, RECORD)
    codes_d, scale_d = _fetch(kv, slot_d, RECORD)
    for turn in range(0, (tiles + TURN - 1) // TURN):
        first += TURN * N
        later_a = _slots_at(slots, first, end, PIECE)
        later_b = _slots_at(slots, first + PIECE, end, PIECE)
        later_c = _slots_at(slots, first + THIRD, end, PIECE)
        later_d = _slots_at(slots, first + THIRD + PIECE, end, PIECE)
        even = turn % 2 if TURN == 1 else 0
        phase = ((turn // 2) & 1) ^ 1 if TURN == 1 else (turn & 1) ^ 1
        mbarrier.wait(empty.index(even), phase)
        _copy_rope(kv, slot_a, ropes, even, RECORD, FIRST)
        _copy_rope(kv, slot_b, ropes, even, RECORD, FIRST + PIECE)
        if TURN == 1:
            _copy_rope(kv, slot_c, ropes, even, RECORD, FIRST + 2 * PIECE)
            _copy_rope(kv, slot_d, ropes, even, RECORD, FIRST + 3 * PIECE)
        async_copy.mbarrier_arrive(full.index(even), increment_count=False)
        _fill(slot_a, codes_a, scale_a, latents, tokens, even, FIRST)
        codes_a, scale_a = _fetch(kv, next_a, RECORD)
        _fill(slot_b, codes_b, scale_b, latents, tokens, even, FIRST + PIECE)
        codes_b, scale_b = _fetch(kv, next_b, RECORD)
        if TURN == 1:
            _fill(slot_c, codes_c, scale_c, latents, tokens, even, FIRST + 2 * PIECE)
            codes_c, scale_c = _fetch(kv, next_c, RECORD)
            _fill(slot_d, codes_d, scale_d, latents, tokens, even, FIRST + 3 * PIECE)
            gl.thread_barrier()
            mbarrier.arrive(full.index(even), count=1)
        else:
            gl.thread_barrier()
            mbarrier.arrive(full.index(0), count=1)
            # There may be no odd tile; what lies in its buffer then is not a gatherer's any more.
            if 2 * turn + 1 < tiles:
                mbarrier.wait(empty.index(1), phase)
                _copy_rope(kv, slot_c, ropes, 1, RECORD, FIRST)
                _copy_rope(kv, slot_d, ropes, 1, RECORD, FIRST + PIECE)
                async_copy.mbarrier_arrive(full.index(1), increment_count=False)
                _fill(slot_c, codes_c, scale_c, latents, tokens, 1, FIRST)
            codes_c, scale_c = _fetch(kv, next_c, RECORD)
            if 2 * turn + 1 < tiles:
                _fill(slot_d, codes_d, scale_d, latents, tokens, 1, FIRST + PIECE)
                gl.thread_barrier()
                mbarrier.arrive(full.index(1), count=1)
        codes_d, scale_d = _fetch(kv, next_d, RECORD)
        slot_a, slot_b, slot_c, slot_d = next_a, next_b, next_c, next_d
        next_a, next_b, next_c, next_d = later_a, later_b, later_c, later_d


@gluon.jit
def copy(
    kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty, W: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Fill every tile with records in q's dtype by asynchronous copies, 16 bytes each.

    Waits for none of them: each thread's last one signals, and one more signal says that `tokens`
    are written.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = _slots_at(slots, begin, end, N)
    for tile in range(0, tiles):
        stage = tile % 2
        slot = gl.convert_layout(slot, gl.SliceLayout(1, ROW), assert_trivial=True)
        valid = (slot >= 0)[:, None]
        record = (kv + gl.maximum(slot, 0).to(gl.int64) * W)[:, None]
        dim = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, ROW))
        rope_dim = LATENT_DIM + gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, ROW))
        next_slot = _slots_at(slots, begin + (tile + 1) * N, end, N)
        mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(
            latents.index(stage), record + dim[None, :], mask=valid
        )
        async_copy.async_copy_global_to_shared(
            ropes.index(stage), record + rope_dim[None, :], mask=valid
        )
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        tokens.index(stage).store(gl.where(slot >= 0, 1.0, 0.0))
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        slot = next_slot
