"""A recorder without graphs: a replay calls the captured function again, over the same inputs.

As a graph would, it sees nothing but what the static inputs and metadata hold, and writes the same
output tensors, which hold nonsense until the first replay. What was captured later may lie, as in
graphs of one pool, where this one computes: its outputs are nonsense after a replay. So what is
stale, read too late, padded wrongly or found under a wrong key shows on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from topkapi.engine.graphs import Outputs, PaddedSizes
from topkapi.engine.llm import LLM


@dataclass
class Rerun:
    """A captured function and the tensors its results go to."""

    run: Callable[[], Outputs]
    outputs: Outputs
    quiet: Callable[[], AbstractContextManager[object]]
    later: list[torch.Tensor]

    def replay(self) -> None:
        with self.quiet():  # a graph calls no hooks
            results = self.run()
        for out, result in zip(self.outputs, results, strict=True):
            out.copy_(result)
        spoil(self.later)


class RerunRecorder:
    """Keeps count of what it captured (the rows of each step's first output), and says when."""

    def __init__(self, quiet: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.rows: list[int] = []
        self.recording = False
        self._quiet = quiet
        self._made: list[Rerun] = []

    def record(self, run: Callable[[], Outputs]) -> Rerun:
        self.recording = True
        try:
            outputs = run()
        finally:
            self.recording = False
        self.rows.append(outputs[0].shape[0])
        spoil(outputs)
        for earlier in self._made:
            earlier.later += outputs
        self._made.append(Rerun(run, outputs, self._quiet, later=[]))
        return self._made[-1]

    def pool_bytes(self) -> int:
        return 1000


def spoil(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -77)


def replaying(llm: LLM, sizes: list[int] | None = None) -> RerunRecorder:
    """Let `llm` replay its steps from now on."""
    runner, selection = llm.engine._runner, llm.engine._watched.selection

    @contextmanager
    def quiet() -> Iterator[None]:
        with runner._timeline.paused(), selection.paused():
            yield

    recorder = RerunRecorder(quiet)
    most = llm.engine.scheduler.limits.max_running_requests
    runner.use_graphs(recorder, PaddedSizes(most, sizes), quiet)
    runner.next_pass_is_watched = selection.next_pass_is_watched
    return recorder
