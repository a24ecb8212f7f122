"""Attention of 64 heads a program on Hopper: two warpgroups compute, a third gathers.

The formula is in `reference.sparse_mla`. Knows nothing of torch: `sparse_mla` launches it.

Tokens come in pairs of tiles. Warpgroup 0 scores the even tile and owns the left half of the output
dims, warpgroup 1 scores the odd tile and owns the right half:

    warpgroup 0: S0 = Q K0'   maxima   P0    O_left  += P0 V0    O_left  += P1 V1
                              crossed  crossed
    warpgroup 1: S1 = Q K1'   maxima   P1    O_right += P1 V1    O_right += P0 V0
    warpgroup 2: gathers the halves of the next pair as each becomes free

Each half of a tile has a barrier that says it is full and one that says it is free: a half is
freed, and gathered anew, as soon as the last product that reads it is done.
"""

import tilelang.language as T

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
# Stands for -inf as a running maximum: differences of it are never NaN.
LOWEST = -1.0e30
THREADS = 384
TOKENS = 64
BLOCK_HEADS = 64
# Registers a thread, of the 3 * 168 that three warpgroups start with: were they more in all, a
# warpgroup would wait for them for ever.
COMPUTE_REGISTERS = 224
GATHER_REGISTERS = 56
# The gathers are asynchronous copies that a barrier waits for, not their own instruction stream.
UNAWAITED = {"parallel_async_without_async_commit_wait": True}


def attend_wide(
    heads: int, latent: int, rope: int, dtype: str, split: bool, has_sinks: bool, has_cap: bool
):
    """The program of `heads` heads over records of `latent + rope` values of `dtype`.

    `split` has several programs share a row's slots and leave partial results in fp32. `slots` has
    a multiple of 128 columns. Sizes that change from call to call are not compiled in.
    """
    rows, records, selected, shares = (T.dynamic(name) for name in ("R", "S", "K", "N"))
    width = latent + rope
    half = latent // 2
    head_blocks = -(-heads // BLOCK_HEADS)
    out_dtype = "float32" if split else dtype
    zero = 0.0

    @T.macro
    def gather(tile, kv, slots, row, first, offset, columns):
        """Columns of 64 selected records into `tile`; zeros where there is no slot."""
        for step in T.unroll(4, unroll_factor=1):
            for j, d in T.Parallel(16, columns, prefer_async=True, annotations=UNAWAITED):
                tile[step * 16 + j, d] = T.if_then_else(
                    slots[row, first + step * 16 + j] >= 0,
                    kv[T.cast(T.max(slots[row, first + step * 16 + j], 0), "int64"), offset + d],
                    T.cast(zero, dtype),
                )

    @T.macro
    def load_heads(tile, q, row, head, offset, columns):
        """Columns of the block's queries into `tile`; zeros past the last head."""
        for i, d in T.Parallel(BLOCK_HEADS, columns):
            tile[i, d] = T.if_then_else(
                head + i < heads,
                q[row, T.min(head + i, heads - 1), offset + d],
                T.cast(zero, dtype),
            )

    @T.macro
    def mask(score, allowed, scale, cap):
        """Cap the scores if asked, then hide the tokens without a slot."""
        if has_cap:
            # cap * tanh(x) = cap - 2 * cap / (exp(2 * x) + 1)
            for i, j in T.Parallel(BLOCK_HEADS, TOKENS):
                score[i, j] = cap - 2.0 * cap / (
                    T.exp2(score[i, j] * (2.0 * LOG2E * scale / cap)) + 1.0
                )
        for i, j in T.Parallel(BLOCK_HEADS, TOKENS):
            score[i, j] = T.if_then_else(allowed[j] >= 0, score[i, j], -T.infinity("float32"))

    @T.macro
    def invert(inverse, total, best, sinks, head, rate):
        """1 / (total + sink), or 0 for a row without a slot."""
        for i in T.Parallel(BLOCK_HEADS):
            inverse[i] = total[i]
        if has_sinks and not split:
            for i in T.Parallel(BLOCK_HEADS):
                inverse[i] += T.exp2(sinks[T.min(head + i, heads - 1)] * LOG2E - best[i] * rate)
        for i in T.Parallel(BLOCK_HEADS):
            inverse[i] = T.if_then_else(total[i] != 0, 1.0 / inverse[i], 0.0)

    @T.macro
    def compute(
        tile, q, q_first, q_second, own, own_other, own_rope, other, own_weights, other_weights,
        allowed, own_best, other_best, full, marked, free, best_known, weights_known,
        sinks, out, lse, share, row, head, count, scale, cap, rate,
    ):  # fmt: skip
        """The part of warpgroup `tile`, 0 or 1: it scores that tile of each pair, and sums its half
        of the dims, `own` and `other`, over both.
        """
        acc = T.alloc_fragment((BLOCK_HEADS, half), "float32")
        score = T.alloc_fragment((BLOCK_HEADS, TOKENS), "float32")
        weights = T.alloc_fragment((BLOCK_HEADS, TOKENS), dtype)
        q_rope = T.alloc_fragment((BLOCK_HEADS, rope), dtype)
        best = T.alloc_fragment((BLOCK_HEADS,), "float32")
        before = T.alloc_fragment((BLOCK_HEADS,), "float32")
        shrink = T.alloc_fragment((BLOCK_HEADS,), "float32")
        total = T.alloc_fragment((BLOCK_HEADS,), "float32")
        part = T.alloc_fragment((BLOCK_HEADS,), "float32")
        T.fill(acc, 0)
        T.fill(total, 0)
        T.fill(best, LOWEST)
        load_heads(q_rope, q, row, head, latent, rope)
        for t in T.serial(count):
            T.barrier_wait(full[tile], t & 1)
            T.fence_proxy_async()
            T.wgmma_gemm(q_first, own, score, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(q_rope, own_rope, score, transpose_B=True)
            T.barrier_wait(full[tile + 2], t & 1)
            T.fence_proxy_async()
            T.wgmma_gemm(q_second, own_other, score, transpose_B=True)
            T.barrier_wait(marked[tile], t & 1)
            T.wait_wgmma(0)
            mask(score, allowed, scale, cap)
            T.copy(best, before)
            T.reduce_max(score, best, dim=1, clear=False)
            T.copy(best, own_best)
            T.barrier_arrive(best_known[tile])
            T.barrier_wait(best_known[1 - tile], t & 1)
            for i in T.Parallel(BLOCK_HEADS):
                best[i] = T.max(best[i], other_best[i])
            for i in T.Parallel(BLOCK_HEADS):
                shrink[i] = T.exp2((before[i] - best[i]) * rate)
            for i, j in T.Parallel(BLOCK_HEADS, TOKENS):
                score[i, j] = T.exp2(score[i, j] * rate - best[i] * rate)
            T.copy(score, weights)
            T.copy(weights, own_weights)
            T.fence_proxy_async()
            T.barrier_arrive(weights_known[tile])
            for i, d in T.Parallel(BLOCK_HEADS, half):
                acc[i, d] *= shrink[i]
            T.wgmma_gemm(weights, own, acc)
            T.reduce_sum(score, part, dim=1)
            for i in T.Parallel(BLOCK_HEADS):
                total[i] = total[i] * shrink[i] + part[i]
            T.barrier_wait(weights_known[1 - tile], t & 1)
            T.wgmma_gemm(other_weights, other, acc)
            T.wait_wgmma(1)
            T.barrier_arrive(free[tile])
            T.wait_wgmma(0)
            T.barrier_arrive(free[3 - tile])
        T.copy(total, own_best)
        T.barrier_arrive(best_known[tile])
        T.barrier_wait(best_known[1 - tile], count & 1)
        for i in T.Parallel(BLOCK_HEADS):
            total[i] += other_best[i]
        invert(shrink, total, best, sinks, head, rate)
        for i, d in T.Parallel(BLOCK_HEADS, half):
            if head + i < heads:
                out[share, row, head + i, tile * half + d] = acc[i, d] * shrink[i]
        if tile == 0:
            for i in T.Parallel(BLOCK_HEADS):
                if head + i < heads:
                    lse[share, row, head + i] = T.if_then_else(
                        total[i] != 0,
                        (best[i] * rate + T.log2(total[i])) * LN2,
                        -T.infinity("float32"),
                    )

    @T.prim_func
    def attend(
        q: T.Tensor((rows, heads, width), dtype),
        kv: T.Tensor((records, width), dtype),
        slots: T.Tensor((rows, selected), "int32"),
        sinks: T.Tensor((heads,), "float32"),
        out: T.Tensor((shares, rows, heads, latent), out_dtype),
        lse: T.Tensor((shares, rows, heads), "float32"),
        scale: T.float32,
        cap: T.float32,
    ):
        with T.Kernel(rows * head_blocks, shares, threads=THREADS) as (block, share):
            thread = T.get_thread_binding(0)
            row = block // head_blocks
            head = (block % head_blocks) * BLOCK_HEADS
            q_left = T.alloc_shared((BLOCK_HEADS, half), dtype)
            q_right = T.alloc_shared((BLOCK_HEADS, half), dtype)
            left0 = T.alloc_shared((TOKENS, half), dtype)
            right0 = T.alloc_shared((TOKENS, half), dtype)
            rope0 = T.alloc_shared((TOKENS, rope), dtype)
            left1 = T.alloc_shared((TOKENS, half), dtype)
            right1 = T.alloc_shared((TOKENS, half), dtype)
            rope1 = T.alloc_shared((TOKENS, rope), dtype)
            weights0 = T.alloc_shared((BLOCK_HEADS, TOKENS), dtype)
            weights1 = T.alloc_shared((BLOCK_HEADS, TOKENS), dtype)
            allowed0 = T.alloc_shared((TOKENS,), "int32")
            allowed1 = T.alloc_shared((TOKENS,), "int32")
            best0 = T.alloc_shared((BLOCK_HEADS,), "float32")
            best1 = T.alloc_shared((BLOCK_HEADS,), "float32")
            # In this order: left 0, right 1, right 0, left 1.
            full = T.alloc_barrier([128, 128, 128, 128])
            free = T.alloc_barrier([128, 128, 128, 128])
            marked = T.alloc_barrier([128, 128])
            best_known = T.alloc_barrier([128, 128])
            weights_known = T.alloc_barrier([128, 128])

            # Up to the last slot that is not -1: padding is usually at the end, and costs nothing.
            end = T.alloc_var("int32", init=0)
            for step in T.serial(T.ceildiv(selected, THREADS)):
                if step * THREADS + thread < selected:
                    if slots[row, step * THREADS + thread] >= 0:
                        end = step * THREADS + thread + 1
            for bit in T.unroll(5):
                end = T.max(end, T.shfl_xor(end, 1 << bit))
            if thread % 32 == 0:
                allowed0[thread // 32] = end
            with T.ws(0):
                load_heads(q_left, q, row, head, 0, half)
            with T.ws(1):
                load_heads(q_right, q, row, head, half, half)
            T.fence_proxy_async()
            T.sync_threads()
            for warp in T.unroll(THREADS // 32):
                end = T.max(end, allowed0[warp])
            T.sync_threads()
            begin = T.alloc_var("int32", init=0)
            count = T.alloc_var("int32", init=0)
            count = T.ceildiv(end, 2 * TOKENS)
            if split:
                begin = T.truncdiv(count + shares - 1, shares) * share
                count = T.min(count - begin, T.truncdiv(count + shares - 1, shares))
                count = T.max(count, 0)
            rate = LOG2E if has_cap else scale * LOG2E

            with T.ws(0):
                T.set_max_nreg(COMPUTE_REGISTERS, 1)
                compute(
                    0, q, q_left, q_right, left0, right0, rope0, left1, weights0, weights1,
                    allowed0, best0, best1, full, marked, free, best_known, weights_known,
                    sinks, out, lse, share, row, head, count, scale, cap, rate,
                )  # fmt: skip
            with T.ws(1):
                T.set_max_nreg(COMPUTE_REGISTERS, 1)
                compute(
                    1, q, q_right, q_left, right1, left1, rope1, right0, weights1, weights0,
                    allowed1, best1, best0, full, marked, free, best_known, weights_known,
                    sinks, out, lse, share, row, head, count, scale, cap, rate,
                )  # fmt: skip
            with T.ws(2):
                T.set_max_nreg(GATHER_REGISTERS, 0)
                lane = thread - 256
                ahead = T.alloc_var("int32", init=-1)
                if begin * 128 + lane < selected:
                    ahead = slots[row, begin * 128 + lane]
                for t in T.serial(count):
                    first = (begin + t) * 128
                    T.barrier_wait(free[0], (t & 1) ^ 1)
                    gather(left0, kv, slots, row, first, 0, half)
                    gather(rope0, kv, slots, row, first, latent, rope)
                    T.cp_async_barrier_noinc(full[0])
                    if lane < 64:
                        allowed0[lane] = ahead
                    T.barrier_arrive(marked[0])
                    T.barrier_wait(free[1], (t & 1) ^ 1)
                    gather(right1, kv, slots, row, first + 64, half, half)
                    gather(rope1, kv, slots, row, first + 64, latent, rope)
                    T.cp_async_barrier_noinc(full[1])
                    if lane >= 64:
                        allowed1[lane - 64] = ahead
                    T.barrier_arrive(marked[1])
                    ahead = -1
                    if first + 128 + lane < selected:
                        ahead = slots[row, first + 128 + lane]
                    T.barrier_wait(free[2], (t & 1) ^ 1)
                    gather(right0, kv, slots, row, first, half, half)
                    T.cp_async_barrier_noinc(full[2])
                    T.barrier_wait(free[3], (t & 1) ^ 1)
                    gather(left1, kv, slots, row, first + 64, 0, half)
                    T.cp_async_barrier_noinc(full[3])

    return attend
