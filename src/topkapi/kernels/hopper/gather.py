"""How records reach shared memory on sm90: what the gathering warps do, and what they promise.

A gathering partition owns some tokens of every tile of a row's slots. It waits until the buffer
`tile % 2` is empty, fills its part, and signals that. A filled buffer is

    latents [N, 512], ropes [N, 64]: the record in q's dtype; of an fp8 record, fp16 values that
                                     times 2^shift are the record's
    shifts  [N] int32: that power of two, 0 where records are not fp8; `ABSENT` where no slot is

and holds zeros where there is no slot, so that whatever lies in slot 0 does not matter. Whoever
waits for it makes it visible to the matrix unit (`fence_async_shared`): in a gathering warp that
fence would wait for the loads under way.

fp8 records are dequantised on the way, in two instructions for two values: e4m3 to fp16 is exact,
and one fp16 product scales by `scale / 2^shift`. fp16 keeps 11 bits of that,
where bf16 would keep 8.

What `gather` loads waits in registers until its buffer is empty. `copy`, for records that need no
work, writes to shared memory as they arrive.
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
ABSENT = tl.constexpr(-10000)
# Signals that make a tile full: those of `copy`, whose 128 threads signal for themselves.
COPIED = tl.constexpr(129)
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
PACK = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


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
def _fetch(kv, slot, RECORD: gl.constexpr, FP8: gl.constexpr):
    """Start loading records into registers: latents, scales (if any), ropes."""
    if FP8:
        latent = _words(kv, slot, RECORD, 0, LATENT_DIM // 4, 2)
        scale = _words(kv, slot, RECORD, LATENT_DIM // 4, GROUPS, 4)
        rope = _words(kv, slot, RECORD, LATENT_DIM // 4 + GROUPS, ROPE_DIM // 2, 4)
    else:
        latent = _words(kv, slot, RECORD, 0, LATENT_DIM // 2, 4)
        scale = slot
        rope = _words(kv, slot, RECORD, LATENT_DIM // 2, ROPE_DIM // 2, 4)
    return latent, scale, rope


@gluon.jit
def _dequantise(slot, codes, scale, rope):
    """fp8 records as `_fetch` left them: fp16 pairs `[N, 256]`, `[N, 32]`, and shifts `[N]`."""
    N: gl.constexpr = scale.shape[0]
    scale = scale.to(gl.float32, bitcast=True)  # [N, GROUPS]
    even = (rope << 16).to(gl.float32, bitcast=True)  # [N, ROPE_DIM / 2]
    odd = (rope & -65536).to(gl.float32, bitcast=True)
    top = gl.max(gl.maximum(gl.abs(even), gl.abs(odd)), axis=1)
    top = gl.convert_layout(top, gl.SliceLayout(1, scale.type.layout), assert_trivial=True)
    # Near the top of fp16 (65504), so that the record's smaller values keep their digits: rope
    # values below 2^15, codes (up to 448) times what is left of their scale below 448 * 2^7.
    shift = gl.maximum(exponent_of(gl.max(scale, axis=1)) - 6, exponent_of(top) - 14)
    shrink = power_of_two(-shift)
    factor = (scale * shrink[:, None]).to(gl.float16)
    bits = factor.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    codes = gl.reshape(codes, [N, GROUPS, GROUP_DIM // 4])
    pair = gl.convert_layout(
        bits | (bits << 16), gl.SliceLayout(2, codes.type.layout), assert_trivial=True
    )
    low, high = gl.inline_asm_elementwise(
        DEQUANTISE, "=r,=r,r,r", [codes, pair[:, :, None]], dtype=(gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    turned = gl.convert_layout(shrink, gl.SliceLayout(1, rope.type.layout), assert_trivial=True)
    rope = gl.inline_asm_elementwise(
        PACK, "=r,f,f", [even * turned[:, None], odd * turned[:, None]], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip
    slot = gl.convert_layout(slot, shift.type.layout, assert_trivial=True)
    latent = gl.reshape(gl.join(low, high), [N, LATENT_DIM // 2])
    return latent, rope, gl.where(slot >= 0, shift, ABSENT)


@gluon.jit
def _fill(slot, latent, scale, rope, latents, ropes, shifts, FP8: gl.constexpr):
    """Tokens that `_fetch` loaded into their places in shared memory.

    One store into each: between several into one buffer the compiler puts barriers.
    """
    if FP8:
        latent, rope, shift = _dequantise(slot, latent, scale, rope)
    else:
        shift = gl.where(slot >= 0, 0, ABSENT)
    latents.store(latent)
    ropes.store(rope)
    shifts.store(shift)


@gluon.jit
def gather(
    kv, slots, begin, tiles, end, latents, ropes, shifts, full, empty, RECORD: gl.constexpr,
    N: gl.constexpr, FIRST: gl.constexpr, HALVES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Fill the half of every tile that begins at token FIRST, or both halves, through registers.

    One half: the next tile's is loaded before this one is stored, so that loads are always under
    way, for twice the registers. Two halves: each is loaded anew once it is stored.
    """
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    HALF: gl.constexpr = N // 2
    latents = latents._reinterpret(gl.int32, [2, N, LATENT_DIM // 2], WORDS)
    ropes = ropes._reinterpret(gl.int32, [2, N, ROPE_DIM // 2], WORDS)
    begin += FIRST
    slot = _slots_at(slots, begin, end, HALF)
    latent, scale, rope = _fetch(kv, slot, RECORD, FP8)
    next_slot = _slots_at(slots, begin + N, end, HALF)
    if HALVES == 2:
        slot_b = _slots_at(slots, begin + HALF, end, HALF)
        latent_b, scale_b, rope_b = _fetch(kv, slot_b, RECORD, FP8)
        next_slot_b = _slots_at(slots, begin + HALF + N, end, HALF)
    for tile in range(0, tiles):
        stage = tile % 2
        following = begin + (tile + 2) * N
        if HALVES == 1:
            next_latent, next_scale, next_rope = _fetch(kv, next_slot, RECORD, FP8)
        mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
        _fill(
            slot, latent, scale, rope, latents.index(stage).slice(FIRST, HALF, dim=0),
            ropes.index(stage).slice(FIRST, HALF, dim=0),
            shifts.index(stage).slice(FIRST, HALF, dim=0), FP8,
        )  # fmt: skip
        if HALVES == 1:
            latent, scale, rope = next_latent, next_scale, next_rope
        else:
            latent, scale, rope = _fetch(kv, next_slot, RECORD, FP8)
        slot = next_slot
        next_slot = _slots_at(slots, following, end, HALF)
        if HALVES == 2:
            _fill(
                slot_b, latent_b, scale_b, rope_b, latents.index(stage).slice(HALF, HALF, dim=0),
                ropes.index(stage).slice(HALF, HALF, dim=0),
                shifts.index(stage).slice(HALF, HALF, dim=0), FP8,
            )  # fmt: skip
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        if HALVES == 2:
            latent_b, scale_b, rope_b = _fetch(kv, next_slot_b, RECORD, FP8)
            slot_b = next_slot_b
            next_slot_b = _slots_at(slots, following + HALF, end, HALF)


@gluon.jit
def copy(
    kv, slots, begin, tiles, end, latents, ropes, shifts, full, empty, W: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Fill every tile with records in q's dtype by asynchronous copies, 16 bytes each.

    Waits for none of them: each thread's last one signals, and one more signal says that `shifts`
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
        shifts.index(stage).store(gl.where(slot >= 0, 0, ABSENT))
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        slot = next_slot
