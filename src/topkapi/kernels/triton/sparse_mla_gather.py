"""How a program of the portable sparse MLA kernels loads records and decodes them.

Latents and ropes come as tiles in the dtype of the products. Knows no slots and no scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkapi.kernels.triton.e4m3 import decode


@triton.jit
def load_latent(
    kv, slot, FIRST: tl.constexpr, L: tl.constexpr, W: tl.constexpr, SPAN: tl.constexpr,
    GROUP: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr,
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
