"""Attention over fp8 records whose codes become fp16 in the registers that a product reads.

Nothing decoded lies in shared memory: a tile holds pairs of codes, 16 bits each, as they are in the
record, and loading a pair as a 16-bit operand leaves both codes in the thread that needs their
values. So each product is two, with the even and with the odd dims, and so are query and output:

    score_j = stretch * sum_g rate[j, g] * (even[j, g] . q_even[g] + odd[j, g] . q_odd[g])
              + rope_j . q_rope
    out     = sum_j (w_j * rate[j, g]) * even[j, g], and the same with odd

Scales (`rate`, one for 128 dims) stay out of both products: they multiply the sums of their group,
in fp32, and the weights, of which there are as many sets as groups. fp16 has its range seen to: the
query is divided by a power of two of its head (`stretch`), and rates by `2^shift` of their record,
which the softmax carries along. All else is what `sparse_mla._attend` does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from topkapi.kernels.triton.e4m3 import decode
from topkapi.kernels.triton.powers_of_two import exponent_of, power_of_two
from topkapi.kernels.triton.softmax import LOG2E, LOWEST, limit
from topkapi.kernels.triton.sparse_mla_gather import load_rope
from topkapi.kernels.triton.sparse_mla_row import (
    close,
    load_slots,
    load_tile,
    readable,
    row_and_heads,
    scan_row,
    stretch_of_row,
)

# Two pairs of codes: the fp16 values of the first of each, and of the second of each.
PARTED = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 turned;
    prmt.b32 turned, $2, 0, 0x3120;
    mov.b32 {low, high}, turned;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# The same by bits, which are those of a value times 2^-8 (see `e4m3.decode`). The NaN would be 480:
# times 9 * 2^12 it alone becomes infinite, and that times zero is a NaN.
BY_BITS = tl.constexpr("""{
    .reg .b32 sign, even, odd, spoiled, zero, nine, moved;
    mov.b32 zero, 0;
    shl.b32 sign, $2, 8;
    shl.b32 even, $2, 7;
    and.b32 even, even, 0x3f803f80;
    lop3.b32 even, sign, 0x80008000, even, 0xea;
    shr.b32 odd, $2, 1;
    and.b32 odd, odd, 0x3f803f80;
    lop3.b32 odd, $2, 0x80008000, odd, 0xea;
    mov.b32 nine, 0x78807880;
    mov.b32 moved, 0x5c005c00;
    mul.rn.f16x2 spoiled, even, nine;
    mul.rn.f16x2 spoiled, spoiled, zero;
    fma.rn.f16x2 $0, even, moved, spoiled;
    mul.rn.f16x2 spoiled, odd, nine;
    mul.rn.f16x2 spoiled, spoiled, zero;
    fma.rn.f16x2 $1, odd, moved, spoiled;
}""")


@triton.jit
def decode_pairs(pairs, DECODER: tl.constexpr):
    """fp16 values of the first and the second code of int16 pairs, exactly; NaN stays NaN."""
    KINDS: tl.constexpr = (tl.float16, tl.float16)
    if DECODER == "plain":
        first = decode((pairs & 0xFF).to(tl.uint8), False)
        second = decode(((pairs >> 8) & 0xFF).to(tl.uint8), False)
    else:
        ASM: tl.constexpr = PARTED if DECODER == "native" else BY_BITS
        first, second = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [pairs], KINDS, is_pure=True, pack=2
        )
    return first, second


@triton.jit
def _prepare_query(given, PARTS: tl.constexpr):
    """Even and odd dims of the query's parts in fp16 below 2^9, and what to multiply sums by."""
    BLOCK_H: tl.constexpr = given[0].shape[0]
    PAIRS: tl.constexpr = given[0].shape[1] // 2
    top = tl.abs(given[0])
    for part in tl.static_range(1, PARTS):
        top = tl.maximum(top, tl.abs(given[part]))
    exponent = exponent_of(tl.max(top, axis=1)) - 8
    shrink = power_of_two(-exponent)[:, None]
    evens, odds = (), ()
    for part in tl.static_range(PARTS):
        value = (given[part] * shrink).to(tl.float16)
        even, odd = tl.split(tl.reshape(value, [BLOCK_H, PAIRS, 2]))
        evens += (even,)  # type: ignore[assignment]
        odds += (odd,)  # type: ignore[assignment]
    return evens, odds, power_of_two(exponent)


@triton.jit
def _load_rates(kv, slot, L: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr):
    """The scales of each group of dims, `PARTS` times `[BLOCK_N]` fp32; one load for all."""
    BLOCK_N: tl.constexpr = slot.shape[0]
    WIDTH: tl.constexpr = triton.next_power_of_2(PARTS)
    place = tl.arange(0, WIDTH)[None, :]
    pointers = (kv + L).to(tl.pointer_type(tl.float32)) + (slot * (W // 4))[:, None] + place
    rates = tl.load(pointers, mask=place < PARTS if WIDTH > PARTS else None)
    found = ()
    if WIDTH == 1:
        found += (tl.reshape(rates, [BLOCK_N]),)  # type: ignore[assignment]
    elif WIDTH == 2:
        found += tl.split(rates)
    else:
        even, odd = tl.split(tl.reshape(rates, [BLOCK_N, 2, 2]))
        rate_0, rate_2 = tl.split(even)
        rate_1, rate_3 = tl.split(odd)
        found += (rate_0, rate_1, rate_2, rate_3)  # type: ignore[assignment]
    return found


@triton.jit
def _relative(rates, PARTS: tl.constexpr):
    """`rates` divided by `2^shift`, in fp16: the largest almost 2^15, for the others to fit below.

    Returns them, shift, and `2^-shift`.
    """
    largest = tl.abs(rates[0])
    for part in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, tl.abs(rates[part]))
    shift = exponent_of(largest) - 14
    shrink = power_of_two(-shift)
    parts = ()
    for part in tl.static_range(PARTS):
        parts += ((rates[part] * shrink).to(tl.float16),)  # type: ignore[assignment]
    return parts, shift, shrink


@triton.jit
def _weigh(score, best, total, rate, shift, shrink):
    """Weights relative to `best`, now the maximum of scores and shifts, and `total` with them.

    In the sums of weights, one for each column, counts what they are without the shift.
    """
    exponent = score * rate + shift.to(tl.float32)[None, :]
    new_best = tl.maximum(best, tl.max(exponent, axis=1))
    weight = tl.exp2(exponent - new_best[:, None])
    moved = tl.exp2(best - new_best)[:, None]
    return weight, moved, new_best, total * moved + weight * shrink[None, :]


@triton.jit
def _score(pairs, rates, evens, odds, PARTS: tl.constexpr, DECODER: tl.constexpr):
    """`[BLOCK_H, BLOCK_N]` products with the latents, but for the query's stretch."""
    score = tl.zeros([evens[0].shape[0], pairs[0].shape[0]], tl.float32)
    for part in tl.static_range(PARTS):
        even, odd = decode_pairs(tl.trans(pairs[part]), DECODER)
        product = tl.dot(odds[part], odd, tl.dot(evens[part], even))
        score += product * rates[part][None, :]
    return score


@triton.jit
def _grow(accs, moved, pairs, weight, rates, PARTS: tl.constexpr, DECODER: tl.constexpr):
    """Even and odd dims of each part of the output with those of one more tile."""
    weights, grown = (), ()
    for part in tl.static_range(PARTS):
        weights += (weight * rates[part][None, :],)  # type: ignore[assignment]
    for part in tl.static_range(PARTS):
        even, odd = decode_pairs(pairs[part], DECODER)
        grown += (  # type: ignore[assignment]
            tl.dot(weights[part], even, accs[2 * part] * moved),
            tl.dot(weights[part], odd, accs[2 * part + 1] * moved),
        )
    return grown


@triton.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits"])
def attend_codes(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H: tl.constexpr, L: tl.constexpr, P: tl.constexpr, W: tl.constexpr, ROPE_OFFSET: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_SCAN: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, DECODER: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for each row, block of heads and split, as `sparse_mla._attend`.

    Dims come in parts of SPAN, each a group of scales.
    """
    PARTS: tl.constexpr = (L + GROUP - 1) // GROUP
    row, head = row_and_heads(H, BLOCK_H)
    split = tl.program_id(1)
    slots += row * slots_stride
    if EARLY:
        gdc_wait()
    begin, stop = stretch_of_row(K, split, splits, BLOCK_N, SPLIT)
    # Scanned below, when the query is under way as well.
    found = load_slots(slots, begin, stop, BLOCK_SCAN)

    in_heads = (head < H)[:, None]
    dim = tl.arange(0, SPAN)[None, :]
    query = q + row * (H * (L + P)) + head[:, None] * (L + P)
    given, accs = (), ()
    for part in tl.static_range(PARTS):
        in_part = in_heads & (part * GROUP + dim < L)
        # Past the first-level cache, where the slots shall stay: the tiles read them again.
        value = tl.load(query + part * GROUP + dim, mask=in_part, other=0.0, cache_modifier=".cg")
        given += (value.to(tl.float32),)  # type: ignore[assignment]
        zero = tl.zeros([BLOCK_H, SPAN // 2], tl.float32)
        accs += (zero, zero)  # type: ignore[assignment]
    if P > 0:
        rope_dim = tl.arange(0, BLOCK_P)[None, :]
        q_rope = tl.load(query + L + rope_dim, mask=in_heads & (rope_dim < P), other=0.0)
        q_rope = q_rope.to(DTYPE)

    end, holes, largest = scan_row(found, slots, begin, stop, BLOCK_SCAN)
    evens, odds, stretch = _prepare_query(given, PARTS)
    best = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    rate = LOG2E if HAS_CAP else scale * LOG2E
    words = kv.to(tl.pointer_type(tl.int16))
    pair = tl.arange(0, SPAN // 2)[None, :]
    for offset in tl.range(0, tl.maximum(end - begin, 1), BLOCK_N, num_stages=STAGES):
        first = begin + offset
        slot = readable(load_tile(slots, first, K, BLOCK_N, EVEN_K), largest)
        rates = _load_rates(kv, slot, L, W, PARTS)
        pairs = ()
        for part in tl.static_range(PARTS):
            pointers = words + (slot * (W // 2))[:, None] + part * (GROUP // 2) + pair
            if part * GROUP + SPAN > L:
                inside = part * GROUP + 2 * pair < L
                pairs += (tl.load(pointers, mask=inside, other=0),)  # type: ignore[assignment]
            else:
                pairs += (tl.load(pointers),)  # type: ignore[assignment]
        score = _score(pairs, rates, evens, odds, PARTS, DECODER) * stretch[:, None]
        if P > 0:
            rope = load_rope(kv, slot, P, W, BLOCK_P, ROPE_OFFSET, GROUP, DTYPE)
            score = tl.dot(q_rope, tl.trans(rope), score)
        # A branch that all but an empty row take, for the copies of the next tile to come first:
        # Triton puts branches last.
        if first < end:
            score = limit(score, slots, first, end, holes, scale, cap, HAS_CAP)
            parts, shift, shrink = _relative(rates, PARTS)
            weight, moved, best, total = _weigh(score, best, total, rate, shift, shrink)
            accs = _grow(accs, moved, pairs, weight.to(tl.float16), parts, PARTS, DECODER)

    total = tl.sum(total, axis=1)
    seen, inverse, logarithm = close(total, best, sinks, head, H, SPLIT, HAS_SINKS)
    place = split.to(tl.int64) * rows_stride + row * H + head
    for part in tl.static_range(PARTS):
        both = tl.reshape(tl.join(accs[2 * part], accs[2 * part + 1]), [BLOCK_H, SPAN])
        result = tl.where(seen[:, None], both * inverse[:, None], 0.0).to(out.dtype.element_ty)
        pointers = out + place[:, None] * L + part * GROUP + dim
        in_part = in_heads & (part * GROUP + dim < L)
        # Results leave the second-level cache first, latents stay; shares of them are read at once.
        tl.store(pointers, result, mask=in_part, cache_modifier="" if SPLIT else ".cs")
    tl.store(lse + place, logarithm, mask=head < H)
