"""How records reach shared memory on sm90: what the gathering warps do, and what they promise.

A gathering partition owns some tokens of every tile of a row's slots. It waits until the buffer
`tile % 2` is empty, fills its part, and signals that. A filled buffer is

    latents [N, 512], ropes [N, 64]: the record in q's dtype; of an fp8 record, fp16 values that
                                     times 2^shift are the record's
    tokens  [4, N] fp32: shift, 2^shift and 2^-shift, or -inf, 0 and 0 where no slot is;
                         of other records only 0 or -inf

and holds zeros where there is no slot, so that whatever lies in slot 0 does not matter. Whoever
waits for it makes it visible to the matrix unit (`fence_async_shared`): in a gathering warp that
fence would wait for the loads under way.

fp8 records are dequantised on the way, in two instructions for two values: e4m3 to fp16 is exact,
and one fp16 product scales by `scale / 2^shift`. fp16 keeps 11 bits of that, bf16 would keep 8.

What `gather_whole` and `gather_half` load waits in registers until its buffer is empty. `copy`, for
records that need no work, writes to shared memory as they arrive.
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
# Rows of a tile's `tokens`: four, the last one unused, since sizes are powers of two.
ROWS = tl.constexpr(4)
GROWN = tl.constexpr(1)
SHIFT = tl.constexpr(0)
SHRUNK = tl.constexpr(2)
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
def _fetch(kv, slot, RECORD: gl.constexpr):
    """Start loading fp8 records into registers: codes, scales, rope."""
    codes = _words(kv, slot, RECORD, 0, LATENT_DIM // 4, 2)
    scale = _words(kv, slot, RECORD, LATENT_DIM // 4, GROUPS, 4)
    rope = _words(kv, slot, RECORD, LATENT_DIM // 4 + GROUPS, ROPE_DIM // 2, 4)
    return codes, scale, rope


@gluon.jit
def _fill(slot, codes, scale, rope, latents, ropes, tokens, stage, FIRST: gl.constexpr):
    """fp8 records that `_fetch` loaded into their places from token FIRST of a tile.

    One store into each: between several into one buffer the compiler puts barriers.
    """
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
    latents.index(stage).slice(FIRST, N, dim=0).store(
        gl.reshape(gl.join(low, high), [N, LATENT_DIM // 2])
    )
    turned = gl.convert_layout(shrink, gl.SliceLayout(1, rope.type.layout), assert_trivial=True)
    rope = gl.inline_asm_elementwise(
        PACK, "=r,f,f", [even * turned[:, None], odd * turned[:, None]], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip
    ropes.index(stage).slice(FIRST, N, dim=0).store(rope)
    valid = gl.convert_layout(slot, shift.type.layout, assert_trivial=True) >= 0
    tokens.index(ROWS * stage + GROWN).slice(FIRST, N, dim=0).store(
        gl.where(valid, power_of_two(shift), 0.0)
    )
    tokens.index(ROWS * stage + SHIFT).slice(FIRST, N, dim=0).store(
        gl.where(valid, shift.to(gl.float32), float("-inf"))
    )
    tokens.index(ROWS * stage + SHRUNK).slice(FIRST, N, dim=0).store(gl.where(valid, shrink, 0.0))


@gluon.jit
def gather_whole(
    kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty, RECORD: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Fill every tile of fp8 records, through registers: each half is loaded anew once stored."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    HALF: gl.constexpr = N // 2
    latents = latents._reinterpret(gl.int32, [2, N, LATENT_DIM // 2], WORDS)
    ropes = ropes._reinterpret(gl.int32, [2, N, ROPE_DIM // 2], WORDS)
    slot_a = _slots_at(slots, begin, end, HALF)
    slot_b = _slots_at(slots, begin + HALF, end, HALF)
    codes_a, scale_a, rope_a = _fetch(kv, slot_a, RECORD)
    codes_b, scale_b, rope_b = _fetch(kv, slot_b, RECORD)
    for tile in range(0, tiles):
        stage = tile % 2
        following = begin + (tile + 1) * N
        next_slot = _slots_at(slots, following, end, HALF)
        mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
        _fill(
            slot_a, codes_a, scale_a, rope_a, latents, ropes, tokens, stage, 0,
        )  # fmt: skip
        slot_a = next_slot
        codes_a, scale_a, rope_a = _fetch(kv, slot_a, RECORD)
        next_slot = _slots_at(slots, following + HALF, end, HALF)
        _fill(
            slot_b, codes_b, scale_b, rope_b, latents, ropes, tokens, stage, HALF,
        )  # fmt: skip
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        slot_b = next_slot
        codes_b, scale_b, rope_b = _fetch(kv, slot_b, RECORD)


@gluon.jit
def gather_half(
    kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty, RECORD: gl.constexpr,
    N: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Fill the half from token FIRST of every tile of fp8 records, through registers.

    The next tile's half is loaded before this one's is stored, so that loads are always under way.
    Even and odd tiles have registers of their own: moving what is not there yet would wait for it.
    """
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    HALF: gl.constexpr = N // 2
    latents = latents._reinterpret(gl.int32, [2, N, LATENT_DIM // 2], WORDS)
    ropes = ropes._reinterpret(gl.int32, [2, N, ROPE_DIM // 2], WORDS)
    begin += FIRST
    slot_a = _slots_at(slots, begin, end, HALF)
    slot_b = _slots_at(slots, begin + N, end, HALF)
    codes_a, scale_a, rope_a = _fetch(kv, slot_a, RECORD)
    for pair in range(0, (tiles + 1) // 2):
        phase = (pair & 1) ^ 1
        following = begin + (2 * pair + 2) * N
        codes_b, scale_b, rope_b = _fetch(kv, slot_b, RECORD)
        next_slot = _slots_at(slots, following, end, HALF)
        mbarrier.wait(empty.index(0), phase)
        _fill(
            slot_a, codes_a, scale_a, rope_a, latents, ropes, tokens, 0, FIRST,
        )  # fmt: skip
        gl.thread_barrier()
        mbarrier.arrive(full.index(0), count=1)
        slot_a = next_slot
        codes_a, scale_a, rope_a = _fetch(kv, slot_a, RECORD)
        next_slot = _slots_at(slots, following + N, end, HALF)
        if 2 * pair + 1 < tiles:
            mbarrier.wait(empty.index(1), phase)
            _fill(
                slot_b, codes_b, scale_b, rope_b, latents, ropes, tokens, 1, FIRST,
            )  # fmt: skip
            gl.thread_barrier()
            mbarrier.arrive(full.index(1), count=1)
        slot_b = next_slot


@gluon.jit
def _slots_of_copies(slots, first, end, N: gl.constexpr):
    """N slots, -1 past `end`, in the layouts that codes, ropes and scales are copied in."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    ROPES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    place = first + gl.arange(0, N, layout=gl.SliceLayout(1, CODES))
    of_codes = gl.load(slots + place, mask=place < end, other=-1)
    place = first + gl.arange(0, N, layout=gl.SliceLayout(1, ROPES))
    of_ropes = gl.load(slots + place, mask=place < end, other=-1)
    place = first + gl.arange(0, N, layout=gl.SliceLayout(1, SCALES))
    return of_codes, of_ropes, gl.load(slots + place, mask=place < end, other=-1)


@gluon.jit
def _copy_part(kv, slot, target, FIRST: gl.constexpr, RECORD: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """Start copying elements FIRST.. of the records `slot`, RECORD elements each."""
    dim = FIRST + gl.arange(0, target.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    record = gl.maximum(slot, 0).to(gl.int64) * RECORD
    async_copy.async_copy_global_to_shared(
        target, kv + record[:, None] + dim[None, :], mask=(slot >= 0)[:, None]
    )


@gluon.jit
def _copy_fp8(kv, of_codes, of_ropes, of_scales, codes, scales, ropes, W: gl.constexpr):
    """Start copying fp8 records as they are: bytes of codes, words of the rest."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    ROPES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    words = kv.to(gl.pointer_type(gl.int32))
    _copy_part(kv, of_codes, codes, 0, W, CODES)
    _copy_part(words, of_ropes, ropes, LATENT_DIM // 4 + GROUPS, W // 4, ROPES)
    _copy_part(words, of_scales, scales, LATENT_DIM // 4, W // 4, SCALES)
    async_copy.commit_group()


@gluon.jit
def gather_staged(
    kv, slots, begin, tiles, end, latents, ropes, tokens, full, empty, codes, scales, words,
    W: gl.constexpr, N: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Fill the half from token FIRST of every tile of fp8 records, through a buffer of their bytes.

    The next half's bytes arrive while this one's are dequantised.
    """
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    HALF: gl.constexpr = N // 2
    latents = latents._reinterpret(gl.int32, [2, N, LATENT_DIM // 2], WORDS)
    ropes = ropes._reinterpret(gl.int32, [2, N, ROPE_DIM // 2], WORDS)
    CODES: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    codes_as_words = codes._reinterpret(gl.int32, [HALF, LATENT_DIM // 4], PLAIN)
    begin += FIRST
    of_codes, slot, of_scales = _slots_of_copies(slots, begin, end, HALF)
    _copy_fp8(kv, of_codes, slot, of_scales, codes, scales, words, W)
    for tile in range(0, tiles):
        stage = tile % 2
        of_codes, next_slot, of_scales = _slots_of_copies(slots, begin + (tile + 1) * N, end, HALF)
        async_copy.wait_group(0)
        gl.thread_barrier()
        code = codes_as_words.load(CODES)
        scale = scales.load(SCALES)
        rope = words.load(SCALES)
        gl.thread_barrier()
        _copy_fp8(kv, of_codes, next_slot, of_scales, codes, scales, words, W)
        mbarrier.wait(empty.index(stage), ((tile // 2) & 1) ^ 1)
        _fill(slot, code, scale, rope, latents, ropes, tokens, stage, FIRST)
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        slot = next_slot
    async_copy.wait_group(0)


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
        tokens.index(ROWS * stage + SHIFT).store(gl.where(slot >= 0, 0.0, float("-inf")))
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        slot = next_slot
