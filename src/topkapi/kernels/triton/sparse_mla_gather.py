"""How a program of the portable sparse MLA kernel finds its slots, and loads and decodes records.

Latents and ropes come as tiles in the dtype of the products. Knows no scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkapi.kernels.triton.e4m3 import decode


@triton.jit
def merge(end, count, largest, other_end, other_count, other_largest):
    """What `scan` found in some slots, and in others."""
    return tl.maximum(end, other_end), count + other_count, tl.maximum(largest, other_largest)


@triton.jit
def load_slots(slots, first, end, BLOCK: tl.constexpr):
    """BLOCK slots from `first` on, -1 from `end` on."""
    place = first + tl.arange(0, BLOCK)
    return tl.load(slots + place, mask=place < end, other=-1).to(tl.int32)


@triton.jit
def scan(slot, first):
    """Where these slots end, how many are not missing, and the largest of them."""
    seen = slot >= 0
    place = first + tl.arange(0, slot.shape[0])
    return tl.reduce((tl.where(seen, place + 1, 0), seen.to(tl.int32), slot), 0, merge)


@triton.jit
def load_tile(slots, first, K, BLOCK_N: tl.constexpr, EVEN_K: tl.constexpr):
    """The slots of the tile from `first` on; never beyond the row."""
    if EVEN_K:
        slot = tl.load(slots + tl.minimum(first, K - BLOCK_N) + tl.arange(0, BLOCK_N))
    else:
        slot = tl.load(slots + tl.minimum(first + tl.arange(0, BLOCK_N), K - 1))
    return slot


@triton.jit
def _opaque(value):
    """`value`, of which Triton cannot tell what it was loaded as.

    Seeing codes behind it, Triton would decode them once for each product, could not load them
    ahead, and would lay out the operands for bytes, which `ldmatrix` does not load.
    """
    return tl.sum(tl.reshape(value, [value.shape[0], value.shape[1], 1]), axis=2)


@triton.jit
def load_latent(
    kv, slot, FIRST: tl.constexpr, L: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr,
    GROUP: tl.constexpr, NATIVE_FP8: tl.constexpr, WGMMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Dims FIRST.. of the latents at `slot`, `[BLOCK_N, SPAN]`, zero from dim L on."""
    dim = FIRST + tl.arange(0, SPAN)
    pointers = (kv + dim)[None, :] + (slot * W)[:, None]
    if FIRST + SPAN > L:
        value = tl.load(pointers, mask=(dim < L)[None, :], other=0)
    else:
        value = tl.load(pointers)
    if GROUP > 0:
        scales = (kv + L).to(tl.pointer_type(tl.float32)) + FIRST // GROUP
        value = decode(value, NATIVE_FP8).to(tl.float32)
        if SPAN <= GROUP:
            value *= tl.load(scales + slot * (W // 4))[:, None]
        else:
            GROUPS: tl.constexpr = (SPAN + GROUP - 1) // GROUP
            group = tl.arange(0, GROUPS)[None, :]
            scale = tl.load(
                scales + (slot * (W // 4))[:, None] + group,
                mask=FIRST + group * GROUP < L,
                other=0.0,
            )  # [BLOCK_N, GROUPS]
            value = tl.reshape(value, [slot.shape[0], GROUPS, SPAN // GROUPS])
            value = tl.reshape(value * scale[:, :, None], [slot.shape[0], SPAN])
        if not WGMMA:
            value = _opaque(value)
    return value.to(DTYPE)


@triton.jit
def load_rope(
    kv, slot, P: tl.constexpr, W: tl.constexpr, BLOCK_P: tl.constexpr, OFFSET: tl.constexpr,
    GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The rope parts at `slot`, `[BLOCK_N, BLOCK_P]`, zero from dim P on."""
    dim = tl.arange(0, BLOCK_P)
    if GROUP == 0:
        pointers = (kv + OFFSET + dim)[None, :] + (slot * W)[:, None]
    else:
        rope = (kv + OFFSET).to(tl.pointer_type(tl.bfloat16))
        pointers = (rope + dim)[None, :] + (slot * (W // 2))[:, None]
    if BLOCK_P > P:
        value = tl.load(pointers, mask=(dim < P)[None, :], other=0.0)
    else:
        value = tl.load(pointers)
    return value.to(DTYPE)
