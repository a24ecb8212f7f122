"""Which kernel runs an operation, and why the others do not.

A `Problem` states what is asked. A `Kernel` is a record that either refuses a problem with a
reason in words, or takes it. An `Op` holds the kernels of one operation in order of preference.
Nothing here knows any formula or imports any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from topkapi.device import DeviceInfo
from topkapi.errors import KernelRefusedError


@dataclass(frozen=True)
class Problem:
    """What a call asks of a kernel: static facts only, never tensor contents.

    Sizes an operation does not have stay 0. `cache_format` is `bf16`, `fp32`, `fp16` or `fp8`.
    `rows` is R and `context` the width of the logits: what a table of measured times is asked by.
    `features` names optional parts in use: `sinks`, `logit_cap`, `starts`, `lse`, `unaligned`, and
    `batch_invariant`, that a row's bits must not depend on what shares its batch. `capture` says
    that the launch must be safe inside CUDA-graph capture.
    """

    op: str
    device: DeviceInfo
    dtype: torch.dtype
    phase: str = "prefill"
    cache_format: str = "bf16"
    num_heads: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    index_dim: int = 0
    topk: int = 0
    rows: int = 0
    context: int = 0
    features: frozenset[str] = frozenset()
    capture: bool = False


@dataclass(frozen=True)
class Kernel:
    """One implementation of one operation.

    `refuse(problem)` returns a reason, or None when the problem is taken. `launch` has the
    signature of the operation's reference, minus `kernel`. `prepare(problem)`, where present, makes
    state that the step's buffers own, and that `launch` takes as `prepared`. `heads_computed(
    problem)`, where present, is how many heads a launch computes, those that only fill up its tiles
    included. `peer` marks another project's kernel: `auto` takes it only where the measured table
    names it. `exact` is False for one whose answer may differ from the reference's beyond rounding:
    it runs only by name. `provider()`, where present, names the installed package and version that
    a launch would call. `batch_invariant` promises a row the same bits in any batch, where the
    problem asks for it: of `sparse_mla` by launching with `batch_invariant=True`. `note` is what
    its user should know, in a few words.
    """

    name: str
    op: str
    refuse: Callable[[Problem], str | None]
    launch: Callable[..., Any]
    prepare: Callable[..., Any] | None = None
    heads_computed: Callable[[Problem], int] | None = None
    peer: bool = False
    exact: bool = True
    batch_invariant: bool = False
    provider: Callable[[], str | None] | None = None
    note: str = ""

    def reason(self, problem: Problem) -> str | None:
        """Why this kernel does not take `problem`, or None."""
        if "batch_invariant" in problem.features and not self.batch_invariant:
            return "a row's bits depend on its batch, and deterministic=True forbids that"
        return self.refuse(problem)

    def padded_heads(self, problem: Problem) -> int:
        """Heads that a launch computes and throws away."""
        if self.heads_computed is None:
            return 0
        return self.heads_computed(problem) - problem.num_heads


@dataclass(frozen=True)
class Verdict:
    """One line of `explain`: a kernel, the reason it refuses (None when usable), the heads it would
    compute for nothing, whether `auto` may take it, the package and version that provide it, and
    what its user should know.
    """

    kernel: str
    reason: str | None
    padded_heads: int = 0
    auto: bool = True
    provider: str | None = None
    note: str = ""


def no_order(problem: Problem) -> tuple[str, ...]:
    """The table of measured times that says nothing."""
    return ()


@dataclass(frozen=True)
class Op:
    """One operation and its kernels, our own best first.

    `fastest(problem)` names kernels in measured order, fastest first, where a table knows such a
    problem on such a device; () elsewhere.
    """

    name: str
    kernels: tuple[Kernel, ...] = field(default=())
    fastest: Callable[[Problem], tuple[str, ...]] = no_order

    @cached_property
    def _ours(self) -> tuple[Kernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.exact and not kernel.peer)

    def preferred(self, problem: Problem) -> Sequence[Kernel]:
        """What `auto` may take, in its order: those the table names, then our others.

        Inexact kernels are never among them, and peers only where the table names them. Depends on
        the problem's static facts alone, and on `rows` only where bits may depend on the batch.
        """
        # Another kernel for another number of rows would give a row other bits.
        named = () if "batch_invariant" in problem.features else self.fastest(problem)
        if not named:
            return self._ours
        rank = {name: place for place, name in enumerate(named)}
        able = [k for k in self.kernels if k.exact and (k.name in rank or not k.peer)]
        return sorted(able, key=lambda kernel: rank.get(kernel.name, len(rank)))

    def choose(self, problem: Problem, name: str = "auto") -> Kernel:
        """The first of `preferred` that takes `problem`, or the named one.

        Raises `KernelRefusedError` when the named kernel does not exist or refuses, or when all do;
        the message carries every reason. There is no silent fallback.
        """
        if name == "auto":
            candidates = self.preferred(problem)
        else:
            candidates = tuple(kernel for kernel in self.kernels if kernel.name == name)
        if not candidates:
            known = ", ".join(kernel.name for kernel in self.kernels)
            raise KernelRefusedError(f"{self.name}: no kernel named {name!r}; known: auto, {known}")
        reasons = []
        for kernel in candidates:
            reason = kernel.reason(problem)
            if reason is None:
                return kernel
            reasons.append(f"{kernel.name}: {reason}")
        raise KernelRefusedError(f"{self.name}: no usable kernel. " + "; ".join(reasons))

    def explain(self, problem: Problem) -> list[Verdict]:
        """Every kernel with its reason to refuse `problem`, as they are listed."""
        order = self.preferred(problem)
        return [self._verdict(kernel, problem, kernel in order) for kernel in self.kernels]

    @staticmethod
    def _verdict(kernel: Kernel, problem: Problem, auto: bool) -> Verdict:
        reason = kernel.reason(problem)
        if reason is not None:
            return Verdict(kernel.name, reason, auto=auto, note=kernel.note)
        provider = kernel.provider() if kernel.provider else None
        padded = kernel.padded_heads(problem)
        return Verdict(kernel.name, None, padded, auto, provider, kernel.note)
