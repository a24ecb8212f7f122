"""How records reach shared memory on sm90: what the gathering warps do, and what they promise.

Programs that share a row take its tiles of N slots in turn, so where a program begins does not
depend on where the row ends: gathering begins while that is looked for (`tell_count`).

A gathering partition waits until the next buffer is empty, fills it, and signals that. What lies in
a filled buffer each of `gather_whole`, `copy` and `gather_codes.copy_codes` says; wherever there is

    latents [N, 512]  the record's, in q's dtype; of an fp8 record, fp16 values that times 2^shift
                      are the record's
    ropes   [N, 64]   the record's
    shifts  [N] fp32  shift (0 where there is none), or -inf where no slot is
    grown   [N] fp32  of fp8 records, 2^shift, or 0

it holds zeros where there is no slot, so that whatever lies in slot 0 does not matter. Whoever
waits for it makes it visible to the matrix unit (`fence_async_shared`): in a gathering warp that
fence would wait for the loads under way.

For 64 heads fp8 latents are dequantised on the way, in two instructions for two values: e4m3 to
fp16 is exact, and one fp16 product scales by `scale / 2^shift`. fp16 keeps 11 bits of that, bf16
would keep 8. What needs no work is copied asynchronously, and signals by itself when it is there.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from topkapi.kernels.triton.powers_of_two import exponent_of, power_of_two

LATENT_DIM = tl.constexpr(512)
ROPE_DIM = tl.constexpr(64)
GROUP_DIM = tl.constexpr(128)
GROUPS = tl.constexpr(4)
# Signals that make a tile full: of a gathering partition 128 threads, whose copies signal by
# themselves, and one when the rest is written.
COPIED = tl.constexpr(129)
# Tokens of fp8 records that a gathering partition holds in one set of registers.
PIECE = tl.constexpr(16)
# Tiles whose slots lie in shared memory: one in use, and those to come.
LISTED = tl.constexpr(4)
# Slots that a program looks at in one go for the last one of its row.
SCANNED = tl.constexpr(2048)
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
def row_end(slots, K):
    """Where a row's slots end, after the last that is not -1: padding at the end costs nothing.

    Addresses are clamped. Of masked loads, each with a predicate of its own, seven would be under
    way at a time.
    """
    SCAN: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    end = 0
    for first in range(0, K, SCANNED):
        place = gl.minimum(first + gl.arange(0, SCANNED, layout=SCAN), K - 1)
        slot = gl.load(slots + place)
        end = gl.maximum(end, gl.max(gl.where(slot >= 0, place + 1, 0), axis=0))
    return end


@gluon.jit
def tell_count(slots, K, splits, count, counted, N: gl.constexpr, MULTIPLE: gl.constexpr):
    """Find how many tiles of N slots a program has that takes every `splits`-th of its row.

    Rounded up to MULTIPLE; into `count [1]`, and signalled by `counted`.
    """
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles = (row_end(slots, K) + N - 1) // N
    tiles = gl.maximum(tiles - gl.program_id(1) + splits - 1, 0) // splits
    tiles = (tiles + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    count.store(gl.full([1], 1, gl.int32, layout=ONE) * tiles)
    gl.thread_barrier()
    mbarrier.arrive(counted, count=1)


@gluon.jit
def told_count(count):
    """The tiles that `tell_count` found, once it has signalled."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(count.load(ONE), axis=0)


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
def _fill(slot, codes, scale, latents, grown, shifts, stage, line, FIRST: gl.constexpr):
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
    grown.index(line).slice(FIRST, PIECE, dim=0).store(gl.where(valid, power_of_two(shift), 0.0))
    shift = gl.where(valid, shift.to(gl.float32), float("-inf"))
    shifts.index(line).slice(FIRST, PIECE, dim=0).store(shift)


@gluon.jit
def copy_rope(kv, slot, ropes, stage, RECORD: gl.constexpr):
    """Start copying the ropes of a tile's records as they are."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    slot = gl.convert_layout(slot, gl.SliceLayout(1, ROW), assert_trivial=True)
    words = kv.to(gl.pointer_type(gl.int32)) + (LATENT_DIM // 4 + GROUPS)
    word = gl.arange(0, ROPE_DIM // 2, layout=gl.SliceLayout(0, ROW))
    record = gl.maximum(slot, 0).to(gl.int64) * RECORD
    async_copy.async_copy_global_to_shared(
        ropes.index(stage),
        words + record[:, None] + word[None, :],
        mask=(slot >= 0)[:, None],
    )


@gluon.jit
def _list(slots, lists, turn, step, K, N: gl.constexpr):
    """Start copying the slots of a program's tile `turn` into their line of `lists`."""
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.program_id(1) * N + turn * step + gl.arange(0, N, layout=ROW)
    async_copy.async_copy_global_to_shared(
        lists.index(turn % LISTED), slots + place, mask=place < K
    )
    async_copy.commit_group()


@gluon.jit
def _listed(lists, turn, step, K, FIRST: gl.constexpr, COUNT: gl.constexpr, N: gl.constexpr):
    """COUNT slots that `_list` copied, from token FIRST of their tile; -1 past K."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
    place = gl.program_id(1) * N + turn * step + FIRST + gl.arange(0, COUNT, layout=ROW)
    return gl.where(place < K, lists.index(turn % LISTED).slice(FIRST, COUNT).load(ROW), -1)


@gluon.jit
def gather_whole(
    kv, slots, K, splits, count, counted, latents, ropes, grown, shifts, lists, full, empty,
    RECORD: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Fill every tile with fp8 records: latents, ropes, shifts and grown.

    The last two in line `tile % 4`: they are read after the buffer is handed back. Ropes are copied
    as they are. Latents pass through registers, 16 tokens at a time: four pieces have registers of
    their own, the whole of a tile. As soon as one is stored, the same piece of the next tile is
    loaded in its place. Slots come by way of shared memory: from a register they would be waited
    for together with whatever shares its scoreboard, which is a tile's records.
    """
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    latents = latents._reinterpret(gl.int32, [2, N, LATENT_DIM // 2], WORDS)
    ropes = ropes._reinterpret(gl.int32, [2, N, ROPE_DIM // 2], WORDS)
    first = gl.program_id(1) * N
    step = splits * N
    slot_a = _slots_at(slots, first, K, PIECE)
    slot_b = _slots_at(slots, first + PIECE, K, PIECE)
    slot_c = _slots_at(slots, first + 2 * PIECE, K, PIECE)
    slot_d = _slots_at(slots, first + 3 * PIECE, K, PIECE)
    for turn in gl.static_range(LISTED - 1):
        _list(slots, lists, turn, step, K, N)
    codes_a, scale_a = _fetch(kv, slot_a, RECORD)
    codes_b, scale_b = _fetch(kv, slot_b, RECORD)
    codes_c, scale_c = _fetch(kv, slot_c, RECORD)
    codes_d, scale_d = _fetch(kv, slot_d, RECORD)
    mbarrier.wait(counted, 0)
    tiles = told_count(count)
    for turn in range(0, tiles):
        stage = turn % 2
        line = turn % 4
        async_copy.wait_group(1)
        gl.thread_barrier()
        # All slots of this turn at once: behind a piece's stores each load would wait for them.
        slot_a = _listed(lists, turn, step, K, 0, PIECE, N)
        slot_b = _listed(lists, turn, step, K, PIECE, PIECE, N)
        slot_c = _listed(lists, turn, step, K, 2 * PIECE, PIECE, N)
        slot_d = _listed(lists, turn, step, K, 3 * PIECE, PIECE, N)
        next_a = _listed(lists, turn + 1, step, K, 0, PIECE, N)
        next_b = _listed(lists, turn + 1, step, K, PIECE, PIECE, N)
        next_c = _listed(lists, turn + 1, step, K, 2 * PIECE, PIECE, N)
        next_d = _listed(lists, turn + 1, step, K, 3 * PIECE, PIECE, N)
        slot = _listed(lists, turn, step, K, 0, N, N)
        _list(slots, lists, turn + LISTED - 1, step, K, N)
        mbarrier.wait(empty.index(stage), ((turn // 2) & 1) ^ 1)
        copy_rope(kv, slot, ropes, stage, RECORD)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        _fill(slot_a, codes_a, scale_a, latents, grown, shifts, stage, line, 0)
        codes_a, scale_a = _fetch(kv, next_a, RECORD)
        _fill(slot_b, codes_b, scale_b, latents, grown, shifts, stage, line, PIECE)
        codes_b, scale_b = _fetch(kv, next_b, RECORD)
        _fill(slot_c, codes_c, scale_c, latents, grown, shifts, stage, line, 2 * PIECE)
        codes_c, scale_c = _fetch(kv, next_c, RECORD)
        _fill(slot_d, codes_d, scale_d, latents, grown, shifts, stage, line, 3 * PIECE)
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        codes_d, scale_d = _fetch(kv, next_d, RECORD)
    async_copy.wait_group(0)


@gluon.jit
def signal_full(slot, shifts, full, stage):
    """That a tile is full: of each thread when its copies are there, and once for `shifts`."""
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    shifts.index(stage).store(gl.where(slot >= 0, 0.0, float("-inf")))
    gl.thread_barrier()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def copy(
    kv, slots, K, splits, count, counted, latents, ropes, shifts, full, empty, W: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Fill every tile with records in q's dtype by asynchronous copies, 16 bytes each.

    Waits for none of them: each thread's last one signals, and one more signal says that `shifts`
    are written. How many tiles there are is waited for after the second: the first two are filled
    in any case.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first = gl.program_id(1) * N
    slot = _slots_at(slots, first, K, N)
    tile, tiles = 0, 2
    while tile < tiles:
        stage = tile % 2
        slot = gl.convert_layout(slot, gl.SliceLayout(1, ROW), assert_trivial=True)
        valid = (slot >= 0)[:, None]
        record = (kv + gl.maximum(slot, 0).to(gl.int64) * W)[:, None]
        dim = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, ROW))
        rope_dim = LATENT_DIM + gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, ROW))
        next_slot = _slots_at(slots, first + (tile + 1) * splits * N, K, N)
        mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(
            latents.index(stage), record + dim[None, :], mask=valid
        )
        async_copy.async_copy_global_to_shared(
            ropes.index(stage), record + rope_dim[None, :], mask=valid
        )
        signal_full(slot, shifts, full, stage)
        slot = next_slot
        if tile == 1:
            mbarrier.wait(counted, 0)
            tiles = gl.maximum(told_count(count), 2)
        tile += 1
