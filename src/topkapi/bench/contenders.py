"""Who is measured side by side: our kernels, the peers' that are installed, and plain torch.

A contender is a name, a role and a call. Knows nothing of clocks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from topkapi import ops
from topkapi.bench.bare import bare_call
from topkapi.bench.cases import BenchCase
from topkapi.bench.check import WRITTEN, Tensors
from topkapi.bench.clock import Call
from topkapi.bench.inputs import Arguments
from topkapi.bench.plain import plain_select
from topkapi.errors import ConfigError
from topkapi.ops.registry import OPS

TORCH_TOPK = "torch.topk"
# The CPU's kernel, which runs on a GPU only when it is asked for by name.
_PLAIN = "torch"


def _failures() -> tuple[type[Exception], ...]:
    """What a launch may die of without ending the run: ours are compiled, peers are foreign."""
    found: tuple[type[Exception], ...] = (
        RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, AssertionError,
        ImportError, OSError,
    )  # fmt: skip
    if importlib.util.find_spec("triton") is not None:
        from triton.errors import TritonError

        found = (*found, TritonError)
    return found


FAILURES = _failures()


def in_words(error: Exception) -> str:
    """What a row says of it: its kind and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


@dataclass(frozen=True)
class Contender:
    """`call()` gives the answer. `role` is `ours`, `peer`, `bare` for a peer's own call, or
    `baseline` for plain torch. Not `exact`: its selections may come in any order, and choose among
    equals as they like. `finish` makes of the answer what can be judged, and is not timed.
    """

    name: str
    role: str
    call: Call
    exact: bool = True
    finish: Callable[[Any], Any] = lambda result: result


def check_names(option: str, names: Collection[str]) -> None:
    """Refuse names of kernels that no operation has, before any work."""
    known = {kernel.name for op in OPS.values() for kernel in op.kernels}
    known |= {"all", "none", TORCH_TOPK}
    if unknown := sorted(set(names) - known):
        raise ConfigError(
            f"{option}: no kernel named {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )


def contenders(
    case: BenchCase,
    arguments: Arguments,
    vs: Collection[str],
    without: Collection[str],
    device: torch.device,
) -> Iterator[Contender]:
    """Ours, then those that `vs` names (`all`, `none`, or names of kernels and `torch.topk`), none
    of those that `without` names.
    """
    for kernel in OPS[case.op].kernels:
        if kernel.name in without:
            continue
        plain = kernel.name == _PLAIN and device.type == "cuda"
        wanted = kernel.name in vs or (not plain and (not kernel.peer or "all" in vs))
        if wanted:
            # What a step would keep for all its layers, such as a peer's schedule, is made by the
            # first call and not timed.
            step: Arguments = {"state": {}} if case.op == "sparse_mla" else {}
            call = partial(getattr(ops, case.op), **arguments, **step, kernel=kernel.name)
            role = "peer" if kernel.peer else "ours"
            yield Contender(kernel.name, role, call, kernel.exact)
        if wanted and kernel.peer:
            bare = bare_call(kernel.name, case, arguments)
            if bare is not None:
                name = f"{kernel.name}, bare"
                exact = case.op != "topk"
                yield Contender(name, "bare", bare.call, exact, bare.finish)
    if ("all" in vs or TORCH_TOPK in vs) and TORCH_TOPK not in without:
        yield from _baselines(case, arguments, device)


def _baselines(case: BenchCase, arguments: Arguments, device: torch.device) -> Iterator[Contender]:
    """What somebody without these kernels would write."""
    if case.op == "topk":
        call = partial(_topk, arguments["logits"], case.k)
        yield Contender(TORCH_TOPK, "baseline", call, exact=False)
    if case.op == "select" and case.context >= case.k:
        scoring = {k: v for k, v in arguments.items() if k != "k"}
        for kernel in OPS["indexer_logits"].kernels:
            if kernel.name == _PLAIN and device.type == "cuda":
                call = partial(plain_select, **scoring, k=case.k)
            else:
                call = partial(_score_and_topk, scoring, kernel.name, case.k)
            yield Contender(f"{kernel.name} + {TORCH_TOPK}", "baseline", call, exact=False)


def _topk(logits: torch.Tensor, k: int) -> torch.Tensor:
    return torch.topk(logits, min(k, logits.shape[1]), dim=1).indices


def _score_and_topk(scoring: Arguments, kernel: str, k: int) -> torch.Tensor:
    return _topk(ops.indexer_logits(**scoring, kernel=kernel), k)


def answer(case: BenchCase, contender: Contender, arguments: Arguments) -> Tensors:
    """What one call gives; for a write, the cache that it changed, which is cleared before."""
    written = WRITTEN.get(case.op)
    if written:
        arguments[written].zero_()
        contender.call()
        return (arguments[written].clone(),)
    result: Any = contender.finish(contender.call())
    return result if isinstance(result, tuple) else (result,)


def spoil(tensors: Tensors) -> None:
    """Overwrite an answer that was judged: memory that is used again must not hold it."""
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 113)
