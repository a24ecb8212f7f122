"""Attention of 16 to 64 heads a program, and the merge of several programs' results.

The formula is in `reference.sparse_mla`. Knows nothing of torch: `sparse_mla` launches it.

All warps gather, score and sum together: while a tile of tokens is computed, the next ones are
copied into the other stages of a ring in shared memory. The warps split the tokens of the scores
and the dims of the output, so that 16 heads fill the tensor cores' smallest tile. fp8 records lie
in the ring as they are, and a tile of them is dequantised when its turn comes.
"""

import tilelang.language as T

from topkapi.kernels.tilelang.sparse_mla_wide import LN2, LOG2E, LOWEST, UNAWAITED


def attend_narrow(
    heads: int, latent: int, rope: int, dtype: str, split: bool, has_sinks: bool, has_cap: bool,
    block_heads: int, tokens: int, stages: int, threads: int, record_bytes: int = 0,
):  # fmt: skip
    """The program of `heads` heads over records of `latent + rope` values of `dtype`.

    `split` has several programs share a row's slots and leave partial results in fp32. `slots` has
    a multiple of `tokens` columns. `record_bytes`, where not 0, is the length of an fp8 record,
    whose parts are given one by one. Sizes that change from call to call are not compiled in.
    """
    rows, records, selected, shares = (T.dynamic(name) for name in ("R", "S", "K", "N"))
    scaled = T.dynamic("M")
    width = latent + rope
    head_blocks = -(-heads // block_heads)
    out_dtype = "float32" if split else dtype
    fp8 = record_bytes > 0
    groups = -(-latent // 128)
    kept = "float8_e4m3fn" if fp8 else dtype
    # Elements from one record to the next, of latents, scales and ropes.
    strides = (
        (record_bytes, record_bytes // 4, record_bytes // 2) if fp8 else (width, groups, width)
    )
    warps = T.GemmWarpPolicy.FullCol
    # Rows of a tile that one thread holds: reduced across warps together.
    row_pairs = block_heads // 8

    @T.macro
    def gather(ring, stage, kv, slots, row, first, columns, filler):
        """A part of the selected records into one stage of its ring; zeros without a slot."""
        for step in T.unroll(tokens // 16, unroll_factor=1):
            for j, d in T.Parallel(16, columns, prefer_async=True, annotations=UNAWAITED):
                ring[stage, step * 16 + j, d] = T.if_then_else(
                    slots[row, first + step * 16 + j] >= 0,
                    kv[T.cast(T.max(slots[row, first + step * 16 + j], 0), "int64"), d],
                    T.cast(0.0, filler),
                )

    @T.macro
    def gather_records(ring, ring_scales, ring_rope, stage, kv, scales, kv_rope, slots, row, first):
        gather(ring, stage, kv, slots, row, first, latent, kept)
        if fp8:
            gather(ring_scales, stage, scales, slots, row, first, groups, "float32")
        if rope > 0:
            gather(ring_rope, stage, kv_rope, slots, row, first, rope, dtype)

    @T.prim_func
    def attend(
        q: T.Tensor((rows, heads, width), dtype),
        kv: T.StridedTensor((records, latent), (strides[0], 1), kept),
        scales: T.StridedTensor((scaled, groups), (strides[1], 1), "float32"),
        kv_rope: T.StridedTensor((records, max(rope, 1)), (strides[2], 1), dtype),
        slots: T.Tensor((rows, selected), "int32"),
        sinks: T.Tensor((heads,), "float32"),
        out: T.Tensor((shares, rows, heads, latent), out_dtype),
        lse: T.Tensor((shares, rows, heads), "float32"),
        scale: T.float32,
        cap: T.float32,
    ):
        with T.Kernel(rows * head_blocks, shares, threads=threads) as (block, share):
            thread = T.get_thread_binding(0)
            row = block // head_blocks
            head = (block % head_blocks) * block_heads
            q_latent = T.alloc_shared((block_heads, latent), dtype)
            ring = T.alloc_shared((stages, tokens, latent), kept)
            q_rope = T.alloc_shared((block_heads, max(rope, 1)), dtype)
            ring_rope = T.alloc_shared((stages, tokens, max(rope, 1)), dtype)
            ring_scales = T.alloc_shared((stages, tokens, groups), "float32")
            tile = T.alloc_shared((tokens, latent), dtype)
            marks = T.alloc_shared((stages, tokens), "int32")
            weights = T.alloc_shared((block_heads, tokens), dtype)
            ends = T.alloc_shared((threads // 32,), "int32")
            acc = T.alloc_fragment((block_heads, latent), "float32")
            score = T.alloc_fragment((block_heads, tokens), "float32")
            best = T.alloc_fragment((block_heads,), "float32")
            before = T.alloc_fragment((block_heads,), "float32")
            shrink = T.alloc_fragment((block_heads,), "float32")
            total = T.alloc_fragment((block_heads,), "float32")
            # Summed across threads once, at the end.
            sums = T.alloc_fragment((block_heads, tokens), "float32")

            # Up to the last slot that is not -1: padding is usually at the end, and costs nothing.
            end = T.alloc_var("int32", init=0)
            for step in T.serial(T.ceildiv(selected, threads)):
                if step * threads + thread < selected:
                    if slots[row, step * threads + thread] >= 0:
                        end = step * threads + thread + 1
            for bit in T.unroll(5):
                end = T.max(end, T.shfl_xor(end, 1 << bit))
            if thread % 32 == 0:
                ends[thread // 32] = end
            for i, d in T.Parallel(block_heads, latent):
                q_latent[i, d] = T.if_then_else(
                    head + i < heads, q[row, T.min(head + i, heads - 1), d], T.cast(0.0, dtype)
                )
            if rope > 0:
                for i, d in T.Parallel(block_heads, rope):
                    q_rope[i, d] = T.if_then_else(
                        head + i < heads,
                        q[row, T.min(head + i, heads - 1), latent + d],
                        T.cast(0.0, dtype),
                    )
            T.sync_threads()
            for warp in T.unroll(threads // 32):
                end = T.max(end, ends[warp])
            begin = T.alloc_var("int32", init=0)
            count = T.alloc_var("int32", init=0)
            count = T.ceildiv(end, tokens)
            if split:
                begin = T.truncdiv(count + shares - 1, shares) * share
                count = T.min(count - begin, T.truncdiv(count + shares - 1, shares))
            rate = LOG2E if has_cap else scale * LOG2E

            T.fill(acc, 0)
            T.fill(sums, 0)
            T.fill(best, LOWEST)
            ahead = T.alloc_var("int32", init=-1)
            for t in T.unroll(stages - 1):
                if t < count:
                    gather_records(
                        ring, ring_scales, ring_rope, t, kv, scales, kv_rope, slots, row,
                        (begin + t) * tokens,
                    )  # fmt: skip
                    if thread < tokens:
                        marks[t, thread] = slots[row, (begin + t) * tokens + thread]
                T.ptx_commit_group()
            if stages - 1 < count:
                if thread < tokens:
                    ahead = slots[row, (begin + stages - 1) * tokens + thread]
            for t in T.serial(count):
                T.ptx_wait_group(stages - 2)
                T.sync_threads()
                stage = t % stages
                free = (t + stages - 1) % stages
                if t + stages - 1 < count:
                    if thread < tokens:
                        marks[free, thread] = ahead
                    gather_records(
                        ring, ring_scales, ring_rope, free, kv, scales, kv_rope, slots, row,
                        (begin + t + stages - 1) * tokens,
                    )  # fmt: skip
                T.ptx_commit_group()
                if t + stages < count:
                    if thread < tokens:
                        ahead = slots[row, (begin + t + stages) * tokens + thread]
                if fp8:
                    for j, d in T.Parallel(tokens, latent):
                        tile[j, d] = (
                            T.cast(ring[stage, j, d], "float32") * (ring_scales[stage, j, d // 128])
                        )
                    T.sync_threads()
                    T.gemm(q_latent, tile, score, transpose_B=True, policy=warps, clear_accum=True)
                else:
                    T.gemm(
                        q_latent, ring[stage, :, :], score,
                        transpose_B=True, policy=warps, clear_accum=True,
                    )  # fmt: skip
                if rope > 0:
                    T.gemm(q_rope, ring_rope[stage, :, :], score, transpose_B=True, policy=warps)
                if has_cap:
                    # cap * tanh(x) = cap - 2 * cap / (exp(2 * x) + 1)
                    for i, j in T.Parallel(block_heads, tokens):
                        score[i, j] = cap - 2.0 * cap / (
                            T.exp2(score[i, j] * (2.0 * LOG2E * scale / cap)) + 1.0
                        )
                for i, j in T.Parallel(block_heads, tokens):
                    score[i, j] = T.if_then_else(
                        marks[stage, j] >= 0, score[i, j], -T.infinity("float32")
                    )
                T.copy(best, before)
                T.reduce_max(score, best, dim=1, clear=False, batch=row_pairs)
                for i in T.Parallel(block_heads):
                    shrink[i] = T.exp2((before[i] - best[i]) * rate)
                for i, j in T.Parallel(block_heads, tokens):
                    score[i, j] = T.exp2(score[i, j] * rate - best[i] * rate)
                T.copy(score, weights)
                T.sync_threads()
                for i, j in T.Parallel(block_heads, tokens):
                    sums[i, j] = sums[i, j] * shrink[i] + score[i, j]
                for i, d in T.Parallel(block_heads, latent):
                    acc[i, d] *= shrink[i]
                if fp8:
                    T.gemm(weights, tile, acc, policy=warps)
                else:
                    T.gemm(weights, ring[stage, :, :], acc, policy=warps)

            T.reduce_sum(sums, total, dim=1, batch=row_pairs)
            for i in T.Parallel(block_heads):
                shrink[i] = total[i]
            if has_sinks and not split:
                for i in T.Parallel(block_heads):
                    shrink[i] += T.exp2(sinks[T.min(head + i, heads - 1)] * LOG2E - best[i] * rate)
            for i in T.Parallel(block_heads):
                shrink[i] = T.if_then_else(total[i] != 0, 1.0 / shrink[i], 0.0)
            for i, d in T.Parallel(block_heads, latent):
                if head + i < heads:
                    out[share, row, head + i, d] = acc[i, d] * shrink[i]
            for i in T.Parallel(block_heads):
                if head + i < heads:
                    lse[share, row, head + i] = T.if_then_else(
                        total[i] != 0,
                        (best[i] * rate + T.log2(total[i])) * LN2,
                        -T.infinity("float32"),
                    )

    return attend


def combine(heads: int, latent: int, dtype: str, has_sinks: bool):
    """Merge the partial results of each (row, head), each weighing exp(lse - their maximum)."""
    rows, shares = (T.dynamic(name) for name in ("R", "N"))
    # Each takes as many dims as the next.
    threads = next(count for count in (128, 64, 32) if latent % count == 0)

    @T.prim_func
    def merge(
        partial: T.Tensor((shares, rows, heads, latent), "float32"),
        partial_lse: T.Tensor((shares, rows, heads), "float32"),
        sinks: T.Tensor((heads,), "float32"),
        out: T.Tensor((rows, heads, latent), dtype),
        lse: T.Tensor((rows, heads), "float32"),
    ):
        with T.Kernel(heads, rows, threads=threads) as (head, row):
            acc = T.alloc_fragment((latent,), "float32")
            best = T.alloc_var("float32", init=LOWEST)
            total = T.alloc_var("float32", init=0.0)
            weight = T.alloc_var("float32", init=0.0)
            T.fill(acc, 0)
            for share in T.serial(shares):
                best = T.max(best, partial_lse[share, row, head])
            for share in T.serial(shares):
                weight = T.exp2((partial_lse[share, row, head] - best) * LOG2E)
                total += weight
                for d in T.Parallel(latent):
                    acc[d] += weight * partial[share, row, head, d]
            if T.get_thread_binding(0) == 0:
                lse[row, head] = T.if_then_else(
                    total != 0, best + T.log2(total) * LN2, -T.infinity("float32")
                )
            weight = total
            if has_sinks:
                weight += T.exp2((sinks[head] - best) * LOG2E)
            weight = T.if_then_else(total != 0, 1.0 / weight, 0.0)
            for d in T.Parallel(latent):
                out[row, head, d] = acc[d] * weight

    return merge
