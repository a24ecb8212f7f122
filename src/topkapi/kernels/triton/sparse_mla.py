"""Attention over selected latents, prefill and decode, on any GPU that Triton compiles for.

For row r and head h, over the selected slots j of the row:

    s_j = scale * (q[r, h] . kv[slot_j])          (then cap * tanh(s_j / cap) if capped)
    out = sum_j exp(s_j) * latent[slot_j] / (sum_j exp(s_j) + exp(sink[h]))
    lse = log(sum_j exp(s_j))

One program owns BLOCK_H heads of one row and walks over its slots BLOCK_N at a time with an online
softmax (base 2). The latent part of a gathered tile is key and value: it is loaded once. Heads fill
the rows of the matrix tile, so 8 or 16 heads cost a tile of 16, not of 64. With few rows,
several programs share a row's slots and leave partial results that `sparse_mla_merge` merges. Over
fp8 records few heads have a loop of their own, `sparse_mla_codes`. Why the loop is written as it
is, and what each trait of it gained, stands in docs/kernels/sparse_mla.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.triton.softmax import LOG2E, LOWEST, limit, weigh
from topkapi.kernels.triton.sparse_mla_codes import attend_codes
from topkapi.kernels.triton.sparse_mla_gather import load_latent, load_rope
from topkapi.kernels.triton.sparse_mla_merge import combine
from topkapi.kernels.triton.sparse_mla_row import (
    close,
    load_slots,
    load_tile,
    readable,
    row_and_heads,
    scan_row,
    stretch_of_row,
)
from topkapi.kernels.triton.sparse_mla_tiles import (
    Tile,
    choose_span,
    choose_splits,
    choose_tile,
    shares_scores,
)
from topkapi.kernels.triton.target import (
    decoder_of,
    launches_early,
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


@triton.jit
def _grow(accs, shrink, weight, values, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """The parts of the output, `[BLOCK_H, SPAN]` each, with those of one more tile."""
    grown = ()
    for part in tl.static_range(PARTS):
        acc = tl.dot(weight, values[part], accs[part] * shrink, input_precision=PRECISION)
        grown += (acc,)  # type: ignore[assignment]
    return grown


@triton.jit(do_not_specialize=["K", "slots_stride", "rows_stride", "splits"])
def _attend(
    q, kv, slots, sinks, out, lse, K, slots_stride, rows_stride, splits, scale, cap,
    H: tl.constexpr, L: tl.constexpr, P: tl.constexpr, W: tl.constexpr, ROPE_OFFSET: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_SCAN: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, NATIVE_FP8: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, WGMMA: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (L + SPAN - 1) // SPAN
    # Slots are loaded a turn before they are needed, and kept in registers.
    AHEAD: tl.constexpr = WGMMA and GROUP == 0
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
    # The latent comes in PARTS of SPAN dims, each with its part of the query and of the output.
    queries, accs = (), ()
    for part in tl.static_range(PARTS):
        in_part = in_heads & (part * SPAN + dim < L)
        # Past the first-level cache, where the slots shall stay: the tiles read them again.
        q_latent = tl.load(query + part * SPAN + dim, mask=in_part, other=0.0, cache_modifier=".cg")
        queries += (q_latent.to(DTYPE),)  # type: ignore[assignment]  # [BLOCK_H, SPAN]
        accs += (tl.zeros([BLOCK_H, SPAN], tl.float32),)  # type: ignore[assignment]
    if P > 0:
        rope_dim = tl.arange(0, BLOCK_P)[None, :]
        q_rope = tl.load(query + L + rope_dim, mask=in_heads & (rope_dim < P), other=0.0)
        q_rope = q_rope.to(DTYPE)  # [BLOCK_H, BLOCK_P]

    end, holes, largest = scan_row(found, slots, begin, stop, BLOCK_SCAN)
    best = tl.full([BLOCK_H], LOWEST, tl.float32)
    # With `wgmma` so many sums of weights a head that no thread needs another's: two barriers less.
    total = tl.zeros([BLOCK_H, 8 if WGMMA else 1], tl.float32)
    rate = LOG2E if HAS_CAP else scale * LOG2E
    near = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    far = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    coming = tl.zeros([BLOCK_N], slots.dtype.element_ty)
    if AHEAD:
        coming = load_tile(slots, begin, K, BLOCK_N, EVEN_K)
    # One tile at least, be it empty: where the loop may be left out, ptxas cannot tell that nothing
    # else writes `acc` while a product is under way, and waits after each `wgmma`.
    for offset in tl.range(0, tl.maximum(end - begin, 1), BLOCK_N, num_stages=STAGES):
        first = begin + offset
        if AHEAD:
            slot = coming
            coming = load_tile(slots, first + BLOCK_N, K, BLOCK_N, EVEN_K)
        else:
            slot = load_tile(slots, first, K, BLOCK_N, EVEN_K)
        slot = readable(slot, largest)
        values = ()
        if WGMMA:
            # Both products stay under way until the branch below, which Triton puts last: the loads
            # of the next tile come before it. For that it wants to find the sums among what the
            # loop carries: there they are, and the branch makes them zeros again. Masking has a
            # branch of its own: of products that follow from one another each group of warps
            # computes all, and these two groups share.
            if AHEAD:
                latent = load_latent(kv, slot, 0, L, W, SPAN, GROUP, NATIVE_FP8, DTYPE)
                far = tl.dot(queries[0], tl.trans(latent), far, input_precision=PRECISION)  # type: ignore[misc]
            if P > 0:
                rope = load_rope(kv, slot, P, W, BLOCK_P, ROPE_OFFSET, GROUP, DTYPE)
                near = tl.dot(q_rope, tl.trans(rope), near, input_precision=PRECISION)
            if not AHEAD:
                # Decoded while the product with the ropes is under way.
                latent = load_latent(kv, slot, 0, L, W, SPAN, GROUP, NATIVE_FP8, DTYPE)
                far = tl.dot(queries[0], tl.trans(latent), far, input_precision=PRECISION)  # type: ignore[misc]
            values += (latent,)  # type: ignore[assignment]
            # LLVM knows that the former is true, Triton does not: it needs a branch, the GPU none.
            going = (first | 1) != 0 if AHEAD else first < end
            if going:
                score = tl.fma(near, 1.0, far) if P > 0 else far
                near = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
                far = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
                score = limit(score, slots, first, end, holes, scale, cap, HAS_CAP)
                weight, shrink, best, total = weigh(score, best, total, rate, WGMMA)
                accs = _grow(accs, shrink, weight.to(DTYPE), values, PARTS, PRECISION)
        else:
            score = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            if P > 0:
                rope = load_rope(kv, slot, P, W, BLOCK_P, ROPE_OFFSET, GROUP, DTYPE)
                score = tl.dot(q_rope, tl.trans(rope), score, input_precision=PRECISION)
            for part in tl.static_range(PARTS):
                latent = load_latent(kv, slot, part * SPAN, L, W, SPAN, GROUP, NATIVE_FP8, DTYPE)
                values += (latent,)  # type: ignore[assignment]
                keys = tl.trans(latent)
                score = tl.dot(queries[part], keys, score, input_precision=PRECISION)
            score = limit(score, slots, first, end, holes, scale, cap, HAS_CAP)
            weight, shrink, best, total = weigh(score, best, total, rate, WGMMA)
            accs = _grow(accs, shrink, weight.to(DTYPE), values, PARTS, PRECISION)

    total = tl.sum(total, axis=1)
    seen, inverse, logarithm = close(total, best, sinks, head, H, SPLIT, HAS_SINKS)
    place = split.to(tl.int64) * rows_stride + row * H + head
    for part in tl.static_range(PARTS):
        result = tl.where(seen[:, None], accs[part] * inverse[:, None], 0.0)
        pointers = out + place[:, None] * L + part * SPAN + dim
        in_part = in_heads & (part * SPAN + dim < L)
        result = result.to(out.dtype.element_ty)
        # Results leave the second-level cache first, latents stay; shares of them are read at once.
        tl.store(pointers, result, mask=in_part, cache_modifier="" if SPLIT else ".cs")
    tl.store(lse + place, logarithm, mask=head < H)


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
    if 0 in (rows, slots.shape[1], kv_cache.shape[0]):
        return out.zero_(), lse.fill_(float("-inf"))
    q, slots = q.contiguous(), slots.contiguous()
    layout = latent_layout(kv_cache.dtype)
    mixed = kv_cache.dtype not in (q.dtype, LATENT_FP8.dtype)
    compute = torch.float32 if mixed else q.dtype
    device = target_of(q)
    block_k = triton.next_power_of_2(slots.shape[1])
    block_p = max(16, triton.next_power_of_2(rope_dim)) if rope_dim else 16
    fp8 = layout is LATENT_FP8
    tile = tile or choose_tile(device, heads, v_dim, rope_dim, compute.itemsize, fp8)
    if splits is None and batch_invariant:
        splits = 1
    programs = rows * triton.cdiv(heads, tile.heads)
    if splits is None:
        splits = choose_splits(
            device.num_sms, programs, slots.shape[1], heads=tile.heads, tokens=tile.tokens,
            bytes_each=4 * rows * heads * (v_dim + 1), budget=budget_bytes, per_sm=tile.per_sm,
        )  # fmt: skip
    target, target_lse = out, lse
    if splits > 1:
        target = torch.empty(splits, rows, heads, v_dim, dtype=torch.float32, device=q.device)
        target_lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    rope_offset = v_dim
    if fp8:
        rope_offset = layout.bytes_per_token(v_dim, 0)
    grid = (programs, splits)
    # Fewer programs than SMs would land two on one, where the kernel ahead is not on the others;
    # where rows are not shared it is too little of the whole to be worth another variant.
    early = launches_early(device) and splits > 1 and programs * splits > device.num_sms
    arguments = (
        q, kv_cache, slots, lse if sinks is None else sinks, target, target_lse,
        slots.shape[1], slots.stride(0), rows * heads, splits, scale, logit_cap,
    )  # fmt: skip
    constants = {
        "H": heads, "L": v_dim, "P": rope_dim, "W": kv_cache.stride(0), "ROPE_OFFSET": rope_offset,
        "GROUP": layout.group, "BLOCK_H": tile.heads, "BLOCK_N": tile.tokens,
        "SPAN": choose_span(tile, v_dim, layout.group), "BLOCK_P": block_p,
        "BLOCK_SCAN": min(512 if splits > 1 else 2048, max(64, block_k)),
        "SPLIT": splits > 1, "EVEN_K": slots.shape[1] % tile.tokens == 0,
        "HAS_SINKS": sinks is not None, "HAS_CAP": logit_cap > 0, "DTYPE": TRITON_DTYPE[compute],
        "STAGES": tile.stages, "num_stages": tile.stages, "num_warps": tile.warps, "EARLY": early,
    }  # fmt: skip
    if early:
        constants["launch_pdl"] = True
    if tile.codes:
        attend_codes[grid](*arguments, DECODER=decoder_of(device), **constants)
    else:
        _attend[grid](
            *arguments, NATIVE_FP8=native_fp8(device), PRECISION="ieee",
            WGMMA=shares_scores(device, tile, v_dim, rope_dim), **constants,
        )  # fmt: skip
    if splits > 1:
        combine(target, target_lse, sinks, out, lse, early=launches_early(device))
    return out, lse


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
    sizes = problem.num_heads, problem.latent_dim, problem.rope_dim, problem.dtype.itemsize
    block = choose_tile(problem.device, *sizes, problem.cache_format == "fp8").heads
    return -(-problem.num_heads // block) * block


SPARSE_MLA = Kernel(
    "triton",
    "sparse_mla",
    _refuse,
    sparse_mla,
    heads_computed=_heads_computed,
    batch_invariant=True,
)
