"""How a tile of scores becomes weights, in an online softmax of base 2.

With s the scores of a tile in base 2 (times `rate`, which carries log2(e)), m their maximum up to
the tile before and m' that up to this one: weights are 2^(s - m'), and earlier sums shrink by
2^(m - m').
Knows no records and no products.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# Stands for -inf as a running maximum: differences of it are never NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _add(total, shrink, weight, WGMMA: tl.constexpr):
    """The sums `total` of earlier weights, shrunk, and those of this tile, `[BLOCK_H, 1]`.

    With `wgmma`, where two groups of warps share a tile, several sums a head, added up once at the
    end: `[BLOCK_H, 8]`, each of the columns that one thread holds, neighbours and those 8 apart.
    """
    if WGMMA:
        HELD: tl.constexpr = [weight.shape[0], 2, weight.shape[1] // 16, 4, 2]
        EIGHT: tl.constexpr = [weight.shape[0], 8]
        # All the same, but in the place of the sums.
        shrink = tl.reshape(tl.broadcast_to(shrink, weight.shape), HELD)
        shrink = tl.reshape(tl.max(tl.max(shrink, axis=4), axis=2), EIGHT)
        held = tl.reshape(tl.sum(tl.sum(tl.reshape(weight, HELD), axis=4), axis=2), EIGHT)
    else:
        held = tl.sum(weight, axis=1)[:, None]
    return total * shrink + held


@triton.jit
def limit(score, slots, first, end, holes, scale, cap, HAS_CAP: tl.constexpr):
    """The scores `[BLOCK_H, BLOCK_N]` of the slots from `first` on, capped; missing ones -inf."""
    if HAS_CAP:
        # cap * tanh(x) = cap - 2 * cap / (exp(2 * x) + 1)
        score = cap - 2.0 * cap / (tl.exp2(score * (2.0 * LOG2E * scale / cap)) + 1.0)
    if holes | (first + score.shape[1] > end):
        place = first + tl.arange(0, score.shape[1])
        seen = tl.load(slots + place, mask=place < end, other=-1) >= 0
        score = tl.where(seen[None, :], score, float("-inf"))
    return score


@triton.jit
def weigh(score, best, total, rate, WGMMA: tl.constexpr):
    """The weights of a tile, how much earlier sums shrink, the new maxima and sums of weights."""
    new_best = tl.maximum(best, tl.max(score, axis=1) * rate)
    # One fused multiply-add: the exponent is rounded once, after the difference.
    weight = tl.exp2(score * rate - new_best[:, None])  # [BLOCK_H, BLOCK_N]
    shrink = tl.exp2(best - new_best)[:, None]
    return weight, shrink, new_best, _add(total, shrink, weight, WGMMA)
