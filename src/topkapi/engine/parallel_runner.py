"""How is one step run by all ranks at once?

Rank 0 decides and samples; the others run the same decoder over the same plan, each with its share
of the heads and experts, and keep the same caches. Every rank selects for itself, with an indexer
that is whole, and now and then the ranks compare what they selected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.ranks import Message, RankGroup
from topkapi.engine.runner import Runner
from topkapi.engine.step_plan import StepPlan
from topkapi.engine.timeline import Timeline
from topkapi.errors import TopkapiError
from topkapi.models.decoder import compute_logits

# What a forward pass may raise; alone on a rank it leaves the others waiting in the middle of one.
_FAULTS = (TopkapiError, RuntimeError, ValueError, ArithmeticError, LookupError)
_MULTIPLIER = 0x2545F4914F6CDD1D


class CheckedBackend(NativeSparseAttnBackend):
    """A backend that can sum up what all layers of a step select.

    Attributes:
        checksum: `[]` int64 on the device while a step is verified, else None.
    """

    checksum: torch.Tensor | None = None

    def forward_indexer(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor,
        weights: torch.Tensor | None,
        layer_id: int,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        """As the backend's own. A few small kernels more while a step is verified, no sync."""
        selected = super().forward_indexer(q, k, weights, layer_id, batch)
        if selected is not None and self.checksum is not None:
            self.checksum = checksum(selected, self.checksum)
        return selected


def checksum(selected: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Fold `selected [R, K]` into `previous []` int64: sum of entry times odd number of its place.

    Arithmetic modulo 2^64, exact in any order. Never synchronises.
    """
    place = torch.arange(selected.numel(), device=selected.device)
    weight = (place * 2 + 1) * _MULTIPLIER
    return previous * _MULTIPLIER + ((selected.reshape(-1).long() + 2) * weight).sum()


@dataclass
class Place:
    """Where an engine's runner stands among the ranks.

    Attributes:
        group: the ranks.
        verify_every: every so many steps the selections are compared; 0 never compares them.
        runner: the engine's runner, once `make_runner` has made it.
    """

    group: RankGroup
    verify_every: int
    runner: ParallelRunner | None = None

    def make_runner(
        self,
        model: Any,
        backend: NativeSparseAttnBackend,
        rows: ReqToTokenPool,
        pool: NSATokenToKVPool,
        timeline: Timeline | None = None,
    ) -> ParallelRunner:
        """A runner that runs every step on all ranks. `backend` must be a `CheckedBackend`."""
        assert isinstance(backend, CheckedBackend), "ranks compare what their backends select"
        self.runner = ParallelRunner(model, backend, rows, pool, self, timeline)
        return self.runner


class ParallelRunner(Runner):
    """A runner of one rank. On rank 0 every forward pass is announced to the others first."""

    def __init__(
        self,
        model: Any,
        backend: CheckedBackend,
        rows: ReqToTokenPool,
        pool: NSATokenToKVPool,
        place: Place,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(model, backend, rows, pool, timeline)
        group = place.group
        self._group = group
        self._checked = backend
        self._verify_every = place.verify_every
        self._steps = 0
        if group.rank == 0:
            head = model.get_output_embeddings()
            head.forward = _AnnouncedHead(head.forward, group)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """As a runner's own. Raises `ParallelError`: the ranks are out of step after any fault."""
        self._steps += 1
        verify = self._verify_every > 0 and self._steps % self._verify_every == 0
        try:
            with self._group.reporting():
                self._group.send(Message("step", plan.to_ints(), verify))
                return self.run_plan(plan, verify)
        except _FAULTS as error:
            raise self._group.failure(error) from error

    def run_plan(self, plan: StepPlan, verify: bool) -> torch.Tensor:
        """This rank's part of a step, hidden states `[T, hidden]` equal on all ranks. Collective.

        Synchronises where it verifies, and raises `SelectionMismatchError`.
        """
        self._checked.checksum = (
            torch.zeros((), dtype=torch.int64, device=self._group.device) if verify else None
        )
        hidden = super().forward(plan)
        if self._checked.checksum is not None:
            self._group.compare(self._checked.checksum)
        return hidden

    @torch.inference_mode()
    def follow(self) -> None:
        """Any rank but 0: do what rank 0 announces, until it says stop."""
        hidden: torch.Tensor | None = None
        while (message := self._group.receive()).kind != "stop":
            if message.kind == "step":
                hidden = self.run_plan(message.plan, message.verify)
            else:
                assert hidden is not None, "logits are of a step's hidden states"
                [count] = message.numbers
                rows = hidden.new_empty(count, hidden.shape[1])
                self._group.share(rows)
                compute_logits(self._model, rows)


class _AnnouncedHead:
    """Rank 0's output head: the others compute their shares of the same logits."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], group: RankGroup) -> None:
        self._forward = forward
        self._group = group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden [n, hidden]` to logits `[n, V]`."""
        try:
            with self._group.reporting():
                rows = hidden.contiguous()
                self._group.send(Message("logits", (rows.shape[0],)))
                self._group.share(rows)
                return self._forward(rows)
        except _FAULTS as error:
            raise self._group.failure(error) from error
