"""Scoring a context and keeping the best of it, as public functions.

Checks arguments, chooses a kernel, launches it. The formulas are in `reference.indexer`.
"""

from __future__ import annotations

from typing import Literal, cast

import torch

from topkapi.context import Context
from topkapi.errors import ShapeError
from topkapi.ops.records import check_index_cache
from topkapi.ops.registry import OPS, problem_for
from topkapi.shapes import FLOATS, INTS, check


@torch.no_grad()
def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    *,
    kernel: str = "auto",
) -> torch.Tensor:
    """How much each query row wants each position of its context.

    Args:
        q: `[R, Hi, Di]` fp32, bf16, fp16 or e4m3 (its scale then is in `weights`).
        weights: `[R, Hi]` fp32, `Hi^-1/2 * Di^-1/2` (and the q scale) already in them.
        index_cache: `[slots, Di]` float, or fp8 uint8 `[pages, page * (Di + 4)]`.
        context: lengths and addresses of the R rows.
        kernel: a kernel's name, or `auto`.

    Returns `[R, context.max_length]` fp32, -inf at columns >= `context.lengths[r]`. Holds the whole
    matrix: `select` does not. Raises `ShapeError`, `KernelRefusedError`.
    """
    cache_format = _check(q, weights, index_cache, context)
    problem = problem_for(
        "indexer_logits",
        q,
        cache_format=cache_format,
        phase=_phase(context),
        num_heads=q.shape[1],
        index_dim=q.shape[2],
        rows=q.shape[0],
        context=context.max_length,
    )
    launch = OPS["indexer_logits"].choose(problem, kernel).launch
    if context.num_requests == 0:
        # Padding alone: there is no request whose addresses a kernel could look up.
        return torch.full((q.shape[0], context.max_length), float("-inf"), device=q.device)
    return cast("torch.Tensor", launch(q, weights, index_cache, context.contiguous()))


@torch.no_grad()
def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Exactly the k highest candidates of each row, ties to the lowest position.

    Args:
        logits: `[R, S]` fp32. Row r's candidates are columns `starts[r] + i`, `i < lengths[r]`.
        lengths: `[R]` int32, with `starts[r] + lengths[r] <= S`.
        k: how many to keep, at least 1; may exceed S.
        starts: `[R]` int32, or None for 0.

    Returns positions `[R, k]` int32 relative to `starts`, ascending, -1 at the end. -0.0 equals
    0.0; NaN ranks as -inf. Raises `ShapeError`, `KernelRefusedError`.
    """
    sizes: dict[str, int] = {}
    check("logits", logits, "R S", sizes, dtypes=(torch.float32,))
    check("lengths", lengths, "R", sizes, dtypes=INTS, like=logits)
    if starts is not None:
        check("starts", starts, "R", sizes, dtypes=INTS, like=logits)
    _check_k(k)
    features = frozenset() if starts is None else frozenset({"starts"})
    problem = problem_for(
        "topk",
        logits,
        topk=k,
        rows=logits.shape[0],
        context=logits.shape[1],
        features=features,
    )
    launch = OPS["topk"].choose(problem, kernel).launch
    starts = None if starts is None else starts.contiguous()
    return cast("torch.Tensor", launch(logits, lengths.contiguous(), k, starts=starts))


@torch.no_grad()
def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    k: int,
    *,
    output: Literal["slots", "positions"] = "slots",
    budget_bytes: int = 256 * 2**20,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> torch.Tensor:
    """`topk(indexer_logits(...))`, without ever holding `[R, S]`.

    Args:
        q, weights, index_cache, context: as in `indexer_logits`.
        k: how many to keep, at least 1; may exceed the context.
        output: `slots` of the cache, or `positions` in the request.
        budget_bytes: bound on temporary memory.
        batch_invariant: a row's choice must not depend on what shares its batch, not even where
            two logits are as close as rounding.

    Returns `[R, k]` int32, ascending by position, -1 at the end. Raises `ShapeError`,
    `KernelRefusedError`.
    """
    cache_format = _check(q, weights, index_cache, context)
    _check_k(k)
    if output not in ("slots", "positions"):
        raise ShapeError(f"output: expected slots or positions, got {output!r}")
    problem = problem_for(
        "select",
        q,
        cache_format=cache_format,
        phase=_phase(context),
        num_heads=q.shape[1],
        index_dim=q.shape[2],
        topk=k,
        rows=q.shape[0],
        context=context.max_length,
        features=frozenset({"batch_invariant"} if batch_invariant else ()),
    )
    launch = OPS["select"].choose(problem, kernel).launch
    if context.num_requests == 0:
        return torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    context = context.contiguous()
    positions = launch(
        q, weights, index_cache, context, k, output=output, budget_bytes=budget_bytes
    )
    return cast("torch.Tensor", positions)


def _phase(context: Context) -> str:
    """`decode` where no request has more than one row."""
    return "decode" if context.max_seq_len_q <= 1 else "prefill"


def _check_k(k: int) -> None:
    if k < 1:
        raise ShapeError(f"k: expected at least 1, got {k}")


def _check(
    q: torch.Tensor, weights: torch.Tensor, index_cache: torch.Tensor, context: Context
) -> str:
    """Check what scoring takes; return the name of the cache's layout."""
    sizes: dict[str, int] = {}
    check("q", q, "R Hi Di", sizes, dtypes=(*FLOATS, torch.float8_e4m3fn))
    check("weights", weights, "R Hi", sizes, dtypes=(torch.float32,), like=q)
    cache_format = check_index_cache(index_cache, sizes["Di"], like=q)
    check_context(context, sizes, q)
    return cache_format


def check_context(context: Context, sizes: dict[str, int], like: torch.Tensor) -> None:
    """Hold the tensors of a context to R rows and B requests."""
    check("context.lengths", context.lengths, "R", sizes, dtypes=INTS, like=like)
    check("context.request_of_row", context.request_of_row, "R", sizes, dtypes=INTS, like=like)
    sizes["B+1"] = context.num_requests + 1
    sizes["B"] = context.num_requests
    check("context.cu_seqlens_q", context.cu_seqlens_q, "B+1", sizes, dtypes=INTS, like=like)
    if context.table is not None:
        check("context.table", context.table, "requests *", sizes, dtypes=INTS, like=like)
        if context.table_rows is None:
            raise ShapeError("context.table_rows: expected [B] beside a table, got None")
        check("context.table_rows", context.table_rows, "B", sizes, dtypes=INTS, like=like)
        if context.max_length > context.table.shape[1]:
            raise ShapeError(
                f"context.max_length: expected at most the table's {context.table.shape[1]} "
                f"columns, got {context.max_length}"
            )
    elif context.starts is None:
        raise ShapeError("context: expected a table or starts, got neither")
    else:
        check("context.starts", context.starts, "B", sizes, dtypes=INTS, like=like)
