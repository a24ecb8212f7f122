"""fp8 codes as left operands on sm90: dequantised in the registers that a product reads.

A register holds two pairs of codes, as they lie in the record. For the scores rows are tokens, and
it becomes the first and the second pair of four dims; the query lies in shared memory in the same
order. For the output rows are pairs of dims and a register holds two tokens of a pair: it becomes
both tokens' even dim and both tokens' odd dim. Scales are applied elsewhere.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from topkapi.kernels.hopper.gather import LATENT_DIM
from topkapi.kernels.triton.powers_of_two import exponent_of, power_of_two
from topkapi.kernels.triton.sparse_mla_codes import PARTED

# Pairs of codes in a group of dims.
PAIRS = tl.constexpr(64)
# As PARTED, but of codes as they lie: the first pair, and the second.
IN_PAIRS = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@gluon.jit
def prepare_query(q_latent, q_rope, stretches):
    """Of a query `[BLOCK_H, 512]`, `[BLOCK_H, 64]` as it is given what the products take, in place.

    The latent in fp16 below 2^9, to be multiplied by `stretches`, by which the rope is divided. Of
    four dims the first two lie in the first half.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCK_H: gl.constexpr = q_latent.shape[0]
    HALF: gl.constexpr = LATENT_DIM // 2
    given = q_latent._reinterpret(q_rope.dtype, q_latent.shape, q_latent.layout)
    latent, rope = given.load(ROW).to(gl.float32), q_rope.load(ROW).to(gl.float32)
    gl.thread_barrier()
    exponent = exponent_of(gl.max(gl.abs(latent), axis=1)) - 8
    stretches.store(power_of_two(exponent))
    shrink = power_of_two(-exponent)[:, None]
    q_rope.store((rope * shrink).to(q_rope.dtype))
    latent = gl.reshape((latent * shrink).to(gl.float16), [BLOCK_H, LATENT_DIM // 4, 2, 2])
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
def by_tokens(codes, GROUP: gl.constexpr, OPERAND: gl.constexpr):
    """First and second pairs of a group's four dims, each `[N, 64]` fp16."""
    pairs = codes.slice(GROUP * PAIRS, PAIRS, dim=1).load(OPERAND)
    return gl.inline_asm_elementwise(
        IN_PAIRS, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def turned(codes, GROUP: gl.constexpr, OPERAND: gl.constexpr):
    """A group's pairs of codes `[64, N]`, for `by_dims`."""
    return codes.slice(GROUP * PAIRS, PAIRS, dim=1).permute((1, 0)).load(OPERAND)


@gluon.jit
def by_dims(pairs):
    """Even and odd dims of a group's codes, each `[64, N]` fp16."""
    return gl.inline_asm_elementwise(
        PARTED, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def start_score(first, second, query, zero, GROUP: gl.constexpr):
    """Start the product of what `by_tokens` returned with the query `[BLOCK_H, 512]`."""
    HALF: gl.constexpr = LATENT_DIM // 2
    part = query.slice(GROUP * PAIRS, PAIRS, dim=1).permute((1, 0))
    score = warpgroup_mma(first, part, zero, use_acc=False, is_async=True)
    part = query.slice(HALF + GROUP * PAIRS, PAIRS, dim=1).permute((1, 0))
    return warpgroup_mma(second, part, score, is_async=True)
