"""The same bits for a row whatever shares its batch: alone, padded, chunked, permuted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cases import make_context
from topkapi import ops
from topkapi.context import Context


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows_of(context: Context, first: int, last: int, request: int, padded_rows: int) -> Context:
    """A step that computes rows `first:last` of one request alone, with inert rows after them."""
    assert context.table is not None
    assert context.table_rows is not None
    lengths = torch.nn.functional.pad(context.lengths[first:last], (0, padded_rows))
    return Context(
        lengths=lengths,
        request_of_row=torch.zeros_like(lengths),
        cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
        max_length=int(lengths.max()),
        max_seq_len_q=last - first,
        table=context.table,
        table_rows=context.table_rows[request : request + 1],
    )


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (1, 128), (3, 64), (5, 32), (64, 128)])
def test_logits_do_not_depend_on_the_batch(
    threads: int, heads: int, dim: int, cache: torch.dtype
) -> None:
    torch.manual_seed(0)
    q_lens, kv_lens = (70, 1, 3), (2300, 1500, 700)
    context, num_slots = make_context(q_lens, kv_lens)
    shape = (num_slots // 64, 64 * (dim + 4)) if cache == torch.uint8 else (num_slots, dim)
    index_cache = torch.zeros(shape, dtype=cache)
    ops.write_index_key(index_cache, torch.arange(num_slots), torch.randn(num_slots, dim))
    q, weights = torch.randn(74, heads, dim).bfloat16(), torch.randn(74, heads)
    whole = ops.indexer_logits(q, weights, index_cache, context, kernel="torch")
    chunks = [(0, 0, 1, 0), (0, 1, 2, 5), (0, 2, 35, 0), (0, 35, 70, 1), (1, 70, 71, 0)]
    for request, first, last, padded in [*chunks, (2, 71, 74, 2), (2, 72, 73, 0)]:
        part = rows_of(context, first, last, request, padded)
        inputs = q[first:last], weights[first:last]
        inputs = tuple(
            torch.cat((x, torch.full_like(x[:1], torch.nan).expand(padded, *x.shape[1:])))
            for x in inputs
        )
        got = ops.indexer_logits(*inputs, index_cache, part, kernel="torch")
        assert torch.equal(got[: last - first], whole[first:last, : part.max_length])


def test_logits_do_not_depend_on_where_the_tokens_lie(threads: int) -> None:
    torch.manual_seed(1)
    keys, q, weights = torch.randn(3000, 128), torch.randn(9, 16, 128), torch.randn(9, 16)
    seen: list[torch.Tensor] = []
    for addressing, page_size, seed in (("table", 64, 0), ("table", 1, 7), ("starts", 64, 0)):
        context, num_slots = make_context(
            (9,),
            (3000,),
            addressing=addressing,
            page_size=page_size,
            seed=seed,  # type: ignore[arg-type]
        )
        positions = torch.arange(3000, dtype=torch.int32)
        slots = context.slots(positions.expand(9, -1))[8]
        cache = torch.full((num_slots, 128), torch.nan)
        cache[slots.long()] = keys
        seen.append(ops.indexer_logits(q, weights, cache, context, kernel="torch"))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "k"), [(8, 128), (1, 2048), (64, 65), (3, 1), (128, 600)])
def test_attention_does_not_depend_on_the_batch(
    threads: int, heads: int, k: int, sinks: bool
) -> None:
    torch.manual_seed(2)
    cache = torch.randn(2500, 1, 576)
    q = torch.randn(7, heads, 576)
    slots = torch.stack([torch.randperm(2500)[:k] for _ in range(7)]).int()
    slots[2, k // 2 :] = -1
    options: dict[str, Any] = {
        "scale": 0.05,
        "sinks": torch.randn(heads) if sinks else None,
        "kernel": "torch",
    }
    out, lse = ops.sparse_mla(q, cache, slots, **options)
    for rows in ([0], [2], [6], [1, 0], [5, 2, 3], [6, 5, 4, 3, 2, 1, 0]):
        part_out, part_lse = ops.sparse_mla(q[rows], cache, slots[rows], **options)
        assert torch.equal(part_out, out[rows])
        assert torch.equal(part_lse, lse[rows])
    small_out, small_lse = ops.sparse_mla(q, cache, slots, **options, budget_bytes=2**16)
    assert torch.equal(small_out, out)
    assert torch.equal(small_lse, lse)


def test_one_thread_and_two_give_the_same_bits() -> None:
    torch.manual_seed(3)
    context, num_slots = make_context((40, 1), (3000, 1200))
    index_cache, kv_cache = torch.randn(num_slots, 128), torch.randn(num_slots, 1, 576)
    q, weights, q_latent = torch.randn(41, 16, 128), torch.randn(41, 16), torch.randn(41, 8, 576)
    before = torch.get_num_threads()
    seen = []
    for count in (1, 2):
        torch.set_num_threads(count)
        logits = ops.indexer_logits(q, weights, index_cache, context, kernel="torch")
        slots = ops.select(q, weights, index_cache, context, 128, kernel="torch")
        out, lse = ops.sparse_mla(q_latent, kv_cache, slots, scale=0.05, kernel="torch")
        seen.append((logits, slots, out, lse))
    torch.set_num_threads(before)
    for one, two in zip(*seen, strict=True):
        assert torch.equal(one, two)
