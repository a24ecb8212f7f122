"""Which kernel runs an operation, and why the others do not.

A `Problem` states what is asked. A `Kernel` is a record that either refuses a problem with a
reason in words, or takes it. An `Op` holds the kernels of one operation in order of preference.
Nothing here knows any formula or imports any kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from topkapi.device import DeviceInfo
from topkapi.errors import KernelRefusedError


@dataclass(frozen=True)
class Problem:
    """What a call asks of a kernel: static facts only, never tensor contents.

    Sizes an operation does not have stay 0. `cache_format` is `bf16`, `fp32`, `fp16` or `fp8`.
    `features` names optional parts in use: `sinks`, `logit_cap`, `starts`, `lse`, `unaligned`.
    `capture` says that the launch must be safe inside CUDA-graph capture.
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
    features: frozenset[str] = frozenset()
    capture: bool = False


@dataclass(frozen=True)
class Kernel:
    """One implementation of one operation.

    `refuse(problem)` returns a reason, or None when the problem is taken. `launch` has the
    signature of the operation's reference, minus `kernel`. `prepare`, where present, makes
    per-step state that the step's metadata owns. `heads_computed(problem)`, where present, is how
    many heads a launch computes, those that only fill up its tiles included.
    """

    name: str
    op: str
    refuse: Callable[[Problem], str | None]
    launch: Callable[..., Any]
    prepare: Callable[..., Any] | None = None
    heads_computed: Callable[[Problem], int] | None = None

    def padded_heads(self, problem: Problem) -> int:
        """Heads that a launch computes and throws away."""
        if self.heads_computed is None:
            return 0
        return self.heads_computed(problem) - problem.num_heads


@dataclass(frozen=True)
class Verdict:
    """One line of `explain`: a kernel, the reason it refuses (None when usable), and the heads it
    would compute for nothing.
    """

    kernel: str
    reason: str | None
    padded_heads: int = 0


@dataclass(frozen=True)
class Op:
    """One operation and its kernels, best first."""

    name: str
    kernels: tuple[Kernel, ...] = field(default=())

    def choose(self, problem: Problem, name: str = "auto") -> Kernel:
        """The first kernel that takes `problem`, or the named one.

        Raises `KernelRefusedError` when the named kernel does not exist or refuses, or when all do;
        the message carries every reason. There is no silent fallback.
        """
        candidates = [kernel for kernel in self.kernels if name in ("auto", kernel.name)]
        if not candidates:
            known = ", ".join(kernel.name for kernel in self.kernels)
            raise KernelRefusedError(f"{self.name}: no kernel named {name!r}; known: auto, {known}")
        reasons = []
        for kernel in candidates:
            reason = kernel.refuse(problem)
            if reason is None:
                return kernel
            reasons.append(f"{kernel.name}: {reason}")
        raise KernelRefusedError(f"{self.name}: no usable kernel. " + "; ".join(reasons))

    def explain(self, problem: Problem) -> list[Verdict]:
        """Every kernel with its reason to refuse `problem`, in order of preference."""
        return [self._verdict(kernel, problem) for kernel in self.kernels]

    @staticmethod
    def _verdict(kernel: Kernel, problem: Problem) -> Verdict:
        reason = kernel.refuse(problem)
        return Verdict(kernel.name, reason, kernel.padded_heads(problem) if reason is None else 0)
