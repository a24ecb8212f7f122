"""fp8 codes as left operands on sm90: dequantised in the registers that a product reads.

A register holds two pairs of codes, as they lie in the record. For the scores rows are tokens, and
it becomes the first and the second pair of four dims, times the scale of their group; the query
lies in shared memory in the same order. For the output rows are pairs of dims and a register holds
two tokens of a pair: it becomes both tokens' even dim and both tokens' odd dim, unscaled.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from topkapi.kernels.hopper.gather import (
    DEQUANTISE,
    LATENT_DIM,
    ROPE_DIM,
    TWICE,
    exponent_of,
    power_of_two,
)

# Pairs of codes in a group of dims.
PAIRS = tl.constexpr(64)
# Two pairs of codes: the fp16 values of the first of each, and of the second of each.
PARTED = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 turned;
    prmt.b32 turned, $2, 0, 0x3120;
    mov.b32 {low, high}, turned;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@gluon.jit
def load_query(q, row, BLOCK_H: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, H):
    """Dims `FIRST : FIRST + WIDTH` of a row's heads `[BLOCK_H, WIDTH]`, zero past H."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, ROW))
    dim = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROW))
    place = (row * H + head)[:, None] * (LATENT_DIM + ROPE_DIM) + dim[None, :]
    return gl.load(q + place, mask=(head < H)[:, None], other=0.0)


@gluon.jit
def prepare_query(latent, rope, q_latent, q_rope, stretches):
    """The latent in fp16 below 2^9, to be multiplied by `stretches`, by which the rope is divided.

    Of four dims the first two lie in the first half of `q_latent [BLOCK_H, 512]`.
    """
    BLOCK_H: gl.constexpr = latent.shape[0]
    HALF: gl.constexpr = LATENT_DIM // 2
    exponent = exponent_of(gl.max(gl.abs(latent.to(gl.float32)), axis=1)) - 8
    stretches.store(power_of_two(exponent))
    shrink = power_of_two(-exponent)[:, None]
    q_rope.store((rope.to(gl.float32) * shrink).to(q_rope.dtype))
    latent = (latent.to(gl.float32) * shrink).to(gl.float16)
    latent = gl.reshape(latent, [BLOCK_H, LATENT_DIM // 4, 2, 2])
    first, second = gl.split(gl.permute(latent, (0, 1, 3, 2)))
    q_latent.slice(0, HALF, dim=1).store(gl.reshape(first, [BLOCK_H, HALF]))
    q_latent.slice(HALF, HALF, dim=1).store(gl.reshape(second, [BLOCK_H, HALF]))


@gluon.jit
def columns(scales, TOKENS: gl.constexpr):
    """The four scales of each of 64 tokens."""
    FOUR: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]],
        [], [64, 4],
    )  # fmt: skip
    even, odd = gl.split(gl.reshape(scales.load(FOUR), [64, 2, 2]))
    scale_0, scale_2 = gl.split(even)
    scale_1, scale_3 = gl.split(odd)
    return (
        gl.convert_layout(scale_0, TOKENS, assert_trivial=True),
        gl.convert_layout(scale_1, TOKENS, assert_trivial=True),
        gl.convert_layout(scale_2, TOKENS, assert_trivial=True),
        gl.convert_layout(scale_3, TOKENS, assert_trivial=True),
    )


@gluon.jit
def by_tokens(codes, FIRST: gl.constexpr, COUNT: gl.constexpr, OPERAND: gl.constexpr):
    """Pairs of codes `[N, COUNT]` from pair FIRST."""
    return codes.slice(FIRST, COUNT, dim=1).load(OPERAND)


@gluon.jit
def by_dims(codes, GROUP: gl.constexpr, OPERAND: gl.constexpr):
    """A group's pairs of codes `[64, N]`."""
    return codes.slice(GROUP * PAIRS, PAIRS, dim=1).permute((1, 0)).load(OPERAND)


@gluon.jit
def add_score(score, pairs, scale, query, FIRST: gl.constexpr, OPERAND: gl.constexpr):
    """Start adding the product of codes, times `scale [N]`, with the query `[BLOCK_H, 512]`."""
    COUNT: gl.constexpr = pairs.shape[1]
    HALF: gl.constexpr = LATENT_DIM // 2
    pair = gl.inline_asm_elementwise(TWICE, "=r,f", [scale], dtype=gl.int32, is_pure=True, pack=1)
    pair = gl.convert_layout(pair, gl.SliceLayout(1, OPERAND), assert_trivial=True)
    first, second = gl.inline_asm_elementwise(
        DEQUANTISE, "=r,=r,r,r,r", [pairs, pair[:, None]], dtype=(gl.float16, gl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip
    turned = query.slice(FIRST, COUNT, dim=1).permute((1, 0))
    score = warpgroup_mma(first, turned, score, use_acc=FIRST > 0, is_async=True)
    turned = query.slice(HALF + FIRST, COUNT, dim=1).permute((1, 0))
    return warpgroup_mma(second, turned, score, is_async=True)


@gluon.jit
def part(pairs):
    """Even and odd dims of a group's codes, each `[64, N]` fp16."""
    return gl.inline_asm_elementwise(
        PARTED, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )
