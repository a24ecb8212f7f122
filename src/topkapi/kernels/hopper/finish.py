"""How what the warp groups of a program have summed up becomes its result, on sm90.

For programs with heads in the columns of products, whose groups take tiles in turn: each leaves its
sums in shared memory, where its tiles were, and finishes a share of the heads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from topkapi.kernels.hopper.gather import LATENT_DIM
from topkapi.kernels.hopper.softmax import close


@gluon.jit
def kept(buffer, BLOCK_H: gl.constexpr, DIMS: gl.constexpr):
    """Where a group leaves sums `[BLOCK_H, DIMS]` fp32, so that heads are read in one piece."""
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    return buffer._reinterpret(gl.float32, [BLOCK_H, DIMS], TURNED)


@gluon.jit
def finish(
    sinks, out, lse, row, rows_stride, first, second, bests, totals_kept, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, FIRST_DIM: gl.constexpr, H, SPLIT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Merge what the groups left in `first` and `second`, dims from FIRST_DIM, and store it.

    Each group finishes its share of the heads; with dim 0 their lse, too.
    """
    BLOCK_H: gl.constexpr = first.shape[0]
    EACH: gl.constexpr = BLOCK_H // GROUPS
    FIRST: gl.constexpr = GROUP * EACH
    READ: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    HEADS: gl.constexpr = gl.SliceLayout(1, READ)
    best = bests.index(0).slice(FIRST, EACH, dim=0).load(HEADS)
    total = gl.sum(totals_kept.index(0).slice(FIRST, EACH, dim=0).load(READ), axis=1)
    rate = gl.full([EACH], 1.0, gl.float32, layout=HEADS)
    other_rate = rate
    if GROUPS == 2:
        other = bests.index(1).slice(FIRST, EACH, dim=0).load(HEADS)
        new_best = gl.maximum(best, other)
        rate, other_rate = gl.exp2(best - new_best), gl.exp2(other - new_best)
        best = new_best
        other = gl.sum(totals_kept.index(1).slice(FIRST, EACH, dim=0).load(READ), axis=1)
        total = total * rate + other * other_rate
    head = FIRST + gl.arange(0, EACH, layout=HEADS)
    inverse, logarithm = close(total, best, sinks, head, H, SPLIT, HAS_SINKS)
    result = first.slice(FIRST, EACH, dim=0).load(READ) * (rate * inverse)[:, None]
    if GROUPS == 2:
        others = second.slice(FIRST, EACH, dim=0).load(READ)
        result += others * (other_rate * inverse)[:, None]
    place = gl.program_id(1).to(gl.int64) * rows_stride + row * H + head
    dim = FIRST_DIM + gl.arange(0, first.shape[1], layout=gl.SliceLayout(0, READ))
    pointers = out + place[:, None] * LATENT_DIM + dim[None, :]
    gl.store(pointers, result.to(out.dtype.element_ty), mask=(head < H)[:, None])
    if FIRST_DIM == 0:
        gl.store(lse + place, logarithm, mask=head < H)
