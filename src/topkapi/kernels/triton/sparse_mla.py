"""Attention over selected latents, prefill and decode, on any GPU that Triton compiles for.

For row r and head h, over the selected slots j of the row:

    s_j = scale * (q[r, h] . kv[slot_j])          (then cap * tanh(s_j / cap) if capped)
    out = sum_j exp(s_j) * latent[slot_j] / (sum_j exp(s_j) + exp(sink[h]))
    lse = log(sum_j exp(s_j))

One program owns BLOCK_H heads of one row and walks over its slots BLOCK_N at a time with an online
softmax (base 2). The latent part of a gathered tile is key and value: it is loaded once. Heads fill
the rows of the matrix tile, so 8 or 16 heads cost a tile of 16, not of 64. With few rows,
several programs share a row's slots and leave partial results that `_combine` merges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from topkapi.device import DeviceInfo
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.e4m3 import decode
from topkapi.kernels.triton.target import (
    native_fp8,
    refuse_device,
    target_of,
)
from topkapi.layout.latent import LATENT_FP8, latent_layout

TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# Stands for -inf as a running maximum: differences of it are never NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _load_latent(
    kv, slot, valid, L: tl.constexpr, W: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The latent part `[BLOCK_N, BLOCK_L]` of the records `slot`, zero where not valid."""
    dim = tl.arange(0, BLOCK_L)
    mask = valid[:, None] & (dim < L)[None, :] if BLOCK_L != L else valid[:, None]
    pointers = kv + (slot * W)[:, None] + dim[None, :]
    if GROUP == 0:
        value = tl.load(pointers, mask=mask, other=0.0)
    else:
        code = tl.load(pointers, mask=mask, other=0)
        GROUPS: tl.constexpr = (BLOCK_L + GROUP - 1) // GROUP
        SPAN: tl.constexpr = BLOCK_L // GROUPS
        group = tl.arange(0, GROUPS)
        scale = tl.load(
            (kv + L).to(tl.pointer_type(tl.float32)) + (slot * (W // 4))[:, None] + group[None, :],
            mask=valid[:, None] & (group * GROUP < L)[None, :],
            other=0.0,
        )  # [BLOCK_N, GROUPS]
        spread = tl.reshape(decode(code, NATIVE_FP8).to(tl.float32), [BLOCK_N, GROUPS, SPAN])
        value = tl.reshape(spread * scale[:, :, None], [BLOCK_N, BLOCK_L])
    return value.to(DTYPE)


@triton.jit
def _load_rope(
    kv, slot, valid, P: tl.constexpr, W: tl.constexpr, BLOCK_P: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The rope part `[BLOCK_N, BLOCK_P]` of the records `slot`, zero where not valid."""
    dim = tl.arange(0, BLOCK_P)
    mask = valid[:, None] & (dim < P)[None, :] if BLOCK_P != P else valid[:, None]
    if GROUP == 0:
        pointers = kv + OFFSET + (slot * W)[:, None] + dim[None, :]
    else:
        rope = (kv + OFFSET).to(tl.pointer_type(tl.bfloat16))
        pointers = rope + (slot * (W // 2))[:, None] + dim[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _soften(score, valid, best, total, scale, cap, HAS_CAP: tl.constexpr, DTYPE: tl.constexpr):
    """One step of the online softmax: weights of this tile, and what the earlier ones shrink by."""
    if HAS_CAP:
        # cap * tanh(x) = cap - 2 * cap / (exp(2 * x) + 1)
        grown = tl.exp2(score * (2.0 * LOG2E * scale / cap)) + 1.0
        score = cap - 2.0 * cap / grown
        rate = LOG2E
    else:
        rate = scale * LOG2E
    score = tl.where(valid[None, :], score, float("-inf"))  # [BLOCK_H, BLOCK_N]
    new_best = tl.maximum(best, tl.max(score, axis=1) * rate)
    # One fused multiply-add: the exponent is rounded once, after the difference.
    weight = tl.exp2(score * rate - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    return weight.to(DTYPE), shrink, new_best, total * shrink + tl.sum(weight, axis=1)


@triton.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits"])
def _attend(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H: tl.constexpr, L: tl.constexpr, P: tl.constexpr, W: tl.constexpr, ROPE_OFFSET: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_SCAN: tl.constexpr, SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr, NATIVE_FP8: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    HEAD_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    head_block = program % HEAD_BLOCKS
    row = (program // HEAD_BLOCKS).to(tl.int64)
    split = tl.program_id(1)
    slots += row * slots_stride

    # Up to the last slot that is not -1: padding costs nothing, and it is usually at the end.
    end = 0
    for first in range(0, K, BLOCK_SCAN):
        place = first + tl.arange(0, BLOCK_SCAN)
        slot = tl.load(slots + place, mask=place < K, other=-1)
        end = tl.maximum(end, tl.max(tl.where(slot >= 0, place + 1, 0), axis=0))
    begin = 0
    if SPLIT:
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        span = ((tiles + splits - 1) // splits) * BLOCK_N
        begin = split * span
        end = tl.minimum(end, begin + span)

    head = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_L)
    query = q + row * (H * (L + P)) + head[:, None] * (L + P)
    in_heads = (head < H)[:, None]
    q_latent = tl.load(query + dim[None, :], mask=in_heads & (dim < L)[None, :], other=0.0)
    q_latent = q_latent.to(DTYPE)  # [BLOCK_H, BLOCK_L]
    if P > 0:
        rope_dim = tl.arange(0, BLOCK_P)
        q_rope = tl.load(
            query + L + rope_dim[None, :], mask=in_heads & (rope_dim < P)[None, :], other=0.0
        ).to(DTYPE)  # [BLOCK_H, BLOCK_P]

    best = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        place = first + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + place, mask=place < end, other=-1)
        valid = slot >= 0
        slot = tl.where(valid, slot, 0).to(tl.int64)
        latent = _load_latent(kv, slot, valid, L, W, BLOCK_L, BLOCK_N, GROUP, NATIVE_FP8, DTYPE)
        if P > 0:
            rope = _load_rope(kv, slot, valid, P, W, BLOCK_P, ROPE_OFFSET, GROUP, DTYPE)
        score = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        if P > 0:
            score = tl.dot(q_rope, tl.trans(rope), score, input_precision=PRECISION)
        score = tl.dot(q_latent, tl.trans(latent), score, input_precision=PRECISION)
        weight, shrink, best, total = _soften(score, valid, best, total, scale, cap, HAS_CAP, DTYPE)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight, latent, acc, input_precision=PRECISION)

    seen = total != 0.0
    lse2 = tl.where(seen, best + tl.log2(total), float("-inf"))
    denominator = total
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=head < H, other=0.0).to(tl.float32)
        if not SPLIT:
            denominator += tl.exp2(sink * LOG2E - best)
    inverse = tl.where(seen, 1.0 / denominator, 0.0)
    place = split.to(tl.int64) * rows_stride + row * H + head
    pointers = out + place[:, None] * L + dim[None, :]
    result = (acc * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(pointers, result, mask=in_heads & (dim < L)[None, :])
    tl.store(lse + place, lse2 * (1.0 if SPLIT else LN2), mask=head < H)


@triton.jit(do_not_specialize=["rows_stride", "splits"])
def _combine(
    partial, partial_lse2, sinks, out, lse, rows_stride, splits,
    H: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one (row, head), each weighing exp2(lse2 - their maximum)."""
    if EARLY:
        gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_L)
    split = tl.arange(0, BLOCK_SPLITS)
    share = split.to(tl.int64) * rows_stride + place
    lse2 = tl.load(partial_lse2 + share, mask=split < splits, other=float("-inf"))
    best = tl.maximum(tl.max(lse2, axis=0), LOWEST)
    weight = tl.exp2(lse2 - best)
    total = tl.sum(weight, axis=0)
    denominator = total
    if HAS_SINKS:
        denominator += tl.exp2(tl.load(sinks + place % H).to(tl.float32) * LOG2E - best)
    inverse = tl.where(total != 0.0, 1.0 / denominator, 0.0)
    value = tl.load(
        partial + share[:, None] * L + dim[None, :],
        mask=(lse2 != float("-inf"))[:, None] & (dim < L)[None, :],
        other=0.0,
    )
    result = tl.sum(value * (weight * inverse)[:, None], axis=0)
    tl.store(out + place * L + dim, result.to(out.dtype.element_ty), mask=dim < L)
    tl.store(lse + place, tl.where(total != 0.0, (best + tl.log2(total)) * LN2, float("-inf")))


@dataclass(frozen=True)
class Tile:
    """How the work is cut: heads and tokens a tile, warps, pipeline stages, programs of an SM."""

    heads: int
    tokens: int
    warps: int
    stages: int
    per_sm: int = 1


def choose_tile(device: DeviceInfo, heads: int, latent: int, rope: int, itemsize: int) -> Tile:
    """The launch configuration for `heads` heads over records of `latent` and `rope` dims."""
    block_heads = min(64, max(16, triton.next_power_of_2(heads)))
    hopper = device.backend == "cuda" and int(device.arch) in (90, 100)
    if hopper and itemsize == 2:
        if block_heads == 64:
            row = 2 * (triton.next_power_of_2(latent) + triton.next_power_of_2(max(rope, 1)))
            fits = device.arch == 90 and (64 + 2 * 64) * row <= device.shared_memory
            return Tile(64, 64 if fits else 32, 8, 2)
        return Tile(block_heads, 32, 4, 5, per_sm=2)
    if itemsize == 4:
        return Tile(16, 16, 8, 1)
    row = (triton.next_power_of_2(latent) + triton.next_power_of_2(max(rope, 1))) * itemsize
    for tile in (Tile(32, 32, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2)):
        block = min(tile.heads, block_heads)
        # The query, two buffers of tokens and room to convert one.
        if (block + 3 * tile.tokens) * row <= device.shared_memory:
            return Tile(block, tile.tokens, tile.warps, tile.stages)
    return Tile(16, 16, 4, 1)


def choose_splits(
    device: DeviceInfo,
    tile: Tile,
    rows: int,
    heads: int,
    selected: int,
    row_bytes: int,
    budget: int,
) -> int:
    """How many programs share one row's slots: enough to fill the device, within the budget."""
    programs = rows * -(-heads // tile.heads)
    wanted = max(1, device.num_sms * tile.per_sm // max(programs, 1))
    useful = max(1, selected // (2 * tile.tokens))
    affordable = max(1, budget // max(rows * row_bytes, 1))
    return min(wanted, useful, affordable, 64)


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    v_dim: int = 512,
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
    phase: str = "prefill",
    budget_bytes: int = 256 * 2**20,
    batch_invariant: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sparse_mla`. Never synchronises; safe inside capture.

    `tile` and `splits` override what is chosen, for measuring. `batch_invariant` never splits a
    row: how many programs share one depends on how many rows there are. Temporaries: nothing, or
    with several programs a row `splits * R * H * (v_dim + 1)` fp32, within `budget_bytes`.
    """
    rows, heads, dims = q.shape
    rope_dim = dims - v_dim
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    q, slots = q.contiguous(), slots.contiguous()
    kv_cache = kv_cache if kv_cache.stride(2) == 1 else kv_cache.contiguous()
    layout = latent_layout(kv_cache.dtype)
    mixed = kv_cache.dtype not in (q.dtype, LATENT_FP8.dtype)
    compute = torch.float32 if mixed else q.dtype
    device = target_of(q)
    block_l = max(16, triton.next_power_of_2(v_dim))
    block_p = max(16, triton.next_power_of_2(rope_dim)) if rope_dim else 16
    tile = tile or choose_tile(device, heads, v_dim, rope_dim, compute.itemsize)
    if splits is None and batch_invariant:
        splits = 1
    if splits is None:
        splits = choose_splits(
            device, tile, rows, heads, slots.shape[1], 4 * heads * (v_dim + 1), budget_bytes
        )
    target, target_lse = out, lse
    if splits > 1:
        target = torch.empty(splits, rows, heads, v_dim, dtype=torch.float32, device=q.device)
        target_lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    rope_offset = v_dim
    if layout is LATENT_FP8:
        rope_offset = layout.bytes_per_token(v_dim, 0)
    grid = (rows * triton.cdiv(heads, tile.heads), splits)
    arguments = (
        q, kv_cache, slots, lse if sinks is None else sinks, target, target_lse,
        slots.shape[1], slots.stride(0), rows * heads, splits, scale, logit_cap,
    )  # fmt: skip
    _attend[grid](
        *arguments, H=heads, L=v_dim, P=rope_dim, W=kv_cache.stride(0), ROPE_OFFSET=rope_offset,
        GROUP=layout.group, BLOCK_H=tile.heads, BLOCK_N=tile.tokens, BLOCK_L=block_l,
        BLOCK_P=block_p,
        BLOCK_SCAN=min(2048, max(256, triton.next_power_of_2(slots.shape[1]))),
        SPLIT=splits > 1, HAS_SINKS=sinks is not None, HAS_CAP=logit_cap > 0,
        NATIVE_FP8=native_fp8(device), PRECISION="ieee", DTYPE=TRITON_DTYPE[compute],
        STAGES=tile.stages, num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if splits > 1:
        combine(target, target_lse, sinks, out, lse)
    return out, lse


def combine(
    partial: torch.Tensor,
    partial_lse2: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """Merge `partial [splits, R, H, L]` fp32 and their base-2 lse into `out` and `lse`.

    `early` (sm90 on) launches before the kernel that writes them has ended, and waits there.
    """
    splits, rows, heads, latent = partial.shape
    _combine[(rows * heads,)](
        partial, partial_lse2, lse if sinks is None else sinks, out, lse, rows * heads, splits,
        H=heads, L=latent, BLOCK_L=max(16, triton.next_power_of_2(latent)),
        BLOCK_SPLITS=triton.next_power_of_2(splits), HAS_SINKS=sinks is not None, EARLY=early,
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _refuse(problem: Problem) -> str | None:
    reason = refuse_device(problem)
    if reason is not None:
        return reason
    if problem.latent_dim > 512 or problem.rope_dim > 128:
        return f"holds at most 512 + 128 dims, got {problem.latent_dim} + {problem.rope_dim}"
    if problem.cache_format == "fp8" and (problem.latent_dim % 4 or problem.rope_dim % 2):
        return "reads fp8 records whose latent is a multiple of 4 values and whose rope is even"
    return None


def _heads_computed(problem: Problem) -> int:
    sizes = problem.num_heads, problem.latent_dim, problem.rope_dim
    block = choose_tile(problem.device, *sizes, problem.dtype.itemsize).heads
    return -(-problem.num_heads // block) * block


SPARSE_MLA = Kernel(
    "triton",
    "sparse_mla",
    _refuse,
    sparse_mla,
    heads_computed=_heads_computed,
    batch_invariant=True,
)
