"""Peers' calls as they come: without what our contract asks of a peer beyond its own work.

A record of `kernels.external` sorts a peer's selection, and overwrites columns outside a row's
range; it lays keys and tables out as the peer wants them. Somebody who uses the peer directly may
do without the first, and does the second once a step. So those are measured bare, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from topkapi.bench.cases import BenchCase
from topkapi.bench.clock import Call
from topkapi.bench.inputs import Arguments
from topkapi.context import Context
from topkapi.device import device_info
from topkapi.kernels.external import deep_gemm, topk_sgl_kernel, topk_vllm
from topkapi.kernels.external.packages import loaded
from topkapi.layout import PAGE_SIZE
from topkapi.ops.registry import problem_for
from topkapi.reference.indexer import context_slots
from topkapi.reference.records import read_index_key


@dataclass(frozen=True)
class Bare:
    """`call()` is what is timed; `finish` makes an answer of its result that can be judged."""

    call: Call
    finish: Callable[[torch.Tensor], torch.Tensor]


def bare_call(name: str, case: BenchCase, arguments: Arguments) -> Bare | None:
    """The peer's own call, laid out at the first call; None where it has none, or refuses (then its
    record has a row that says why).
    """
    if case.op == "topk" and name in _TOPK:
        module, make = _TOPK[name]
        if module.TOPK.refuse(problem_for("topk", arguments["logits"], topk=case.k)):
            return None
        call = _lazily(lambda: make(loaded(module.PROVIDERS).call, **arguments))
        return Bare(call, lambda positions: positions)
    if case.op != "indexer_logits" or name != deep_gemm.DEEP_GEMM_LOGITS.name:
        return None
    problem = problem_for(
        case.op,
        arguments["q"],
        cache_format=case.cache,
        num_heads=case.index_heads,
        index_dim=case.index_dim,
    )
    if deep_gemm.DEEP_GEMM_LOGITS.refuse(problem):
        return None
    lay_out = paged_scores if case.rows == case.requests else ragged_scores
    context = arguments["context"]
    return Bare(
        _lazily(lambda: lay_out(loaded(deep_gemm.PROVIDERS).call, **arguments)),
        lambda logits: cleaned(logits, context),
    )


def _lazily(make: Callable[[], Call]) -> Call:
    """Make the call when it is called first; whoever calls it meets what making it raises."""
    made: list[Call] = []

    def call() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return call


def sgl_topk(peer: Any, logits: torch.Tensor, lengths: torch.Tensor, k: int) -> Call:
    """In any order, into an output that is there already."""
    out = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)

    def call() -> torch.Tensor:
        peer(logits, out, lengths, None)
        return out

    return call


def vllm_topk(peer: Any, logits: torch.Tensor, lengths: torch.Tensor, k: int) -> Call:
    """In any order, into an output that is there already."""
    out = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
    begins = torch.zeros_like(lengths)

    def call() -> torch.Tensor:
        peer(logits, begins, lengths, out, out.shape[0], *logits.stride(), k)
        return out

    return call


def ragged_scores(
    peer: deep_gemm.Scoring,
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
) -> Call:
    """Keys of one request gathered beforehand, garbage outside a row's range."""
    width = context.max_length
    slots = context_slots(context, 0, width)
    codes, scales = read_index_key(index_cache, slots, q.shape[2])
    assert scales is not None, "a record that reads fp8 keys alone did not refuse"
    begins = torch.zeros_like(context.lengths)

    def call() -> torch.Tensor:
        keys = codes, scales
        bounds = begins, context.lengths
        return peer.ragged(q, keys, weights, *bounds, clean_logits=False, max_seqlen_k=width)

    return call


def paged_scores(
    peer: deep_gemm.Scoring,
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
) -> Call:
    """Page table and schedule made beforehand, as once a step; garbage outside a row's range."""
    assert context.table is not None, "measured contexts have a table"
    assert context.table_rows is not None, "a table comes with table_rows"
    lengths = context.lengths[:, None].contiguous()
    rows = context.table_rows[context.request_of_row.long()]
    table = (context.table[rows, ::PAGE_SIZE] // PAGE_SIZE).int().contiguous()
    cache = index_cache.view(index_cache.shape[0], PAGE_SIZE, 1, -1)
    schedule = peer.schedule(lengths, PAGE_SIZE, device_info(q.device).num_sms)
    width, queries = table.shape[1] * PAGE_SIZE, q[:, None].contiguous()

    def call() -> torch.Tensor:
        where = lengths, table, schedule, width
        return peer.paged(queries, cache, weights, *where, clean_logits=False)

    return call


def cleaned(logits: torch.Tensor, context: Context) -> torch.Tensor:
    """`[R, max_length]` fp32 with -inf where there is no candidate, for judging."""
    logits = logits[:, : context.max_length].float()
    column = torch.arange(context.max_length, device=logits.device)
    return logits.masked_fill(column >= context.lengths[:, None], float("-inf"))


_TOPK: Mapping[str, tuple[Any, Callable[..., Call]]] = MappingProxyType(
    {
        topk_sgl_kernel.TOPK.name: (topk_sgl_kernel, sgl_topk),
        topk_vllm.TOPK.name: (topk_vllm, vllm_topk),
    }
)
