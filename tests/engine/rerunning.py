"""A recorder without graphs: a replay calls the captured function again, over the same inputs.

As a graph would, it sees nothing but what the static inputs and metadata hold, and writes the same
output tensors, which hold nonsense until the first replay. So what is stale, padded wrongly or
found under a wrong key shows on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from topkapi.engine.graphs import Outputs, PaddedSizes
from topkapi.engine.llm import LLM


@dataclass
class Rerun:
    """A captured function and the tensors its results go to."""

    run: Callable[[], Outputs]
    outputs: Outputs
    quiet: Callable[[], AbstractContextManager[object]]

    def replay(self) -> None:
        with self.quiet():  # a graph calls no hooks
            results = self.run()
        for out, result in zip(self.outputs, results, strict=True):
            out.copy_(result)


class RerunRecorder:
    """Keeps count of what it captured (the rows of each step's first output), and says when."""

    def __init__(self, quiet: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.rows: list[int] = []
        self.recording = False
        self._quiet = quiet

    def record(self, run: Callable[[], Outputs]) -> Rerun:
        self.recording = True
        try:
            outputs = run()
        finally:
            self.recording = False
        self.rows.append(outputs[0].shape[0])
        for out in outputs:
            out.fill_(float("nan") if out.is_floating_point() else -77)
        return Rerun(run, outputs, self._quiet)

    def pool_bytes(self) -> int:
        return 1000


def replaying(llm: LLM, sizes: list[int] | None = None) -> RerunRecorder:
    """Let `llm` replay its steps from now on."""
    runner, selection = llm.engine._runner, llm.engine._selection

    @contextmanager
    def quiet() -> Iterator[None]:
        with runner._timeline.paused(), selection.paused():
            yield

    recorder = RerunRecorder(quiet)
    most = llm.engine.scheduler.limits.max_running_requests
    runner.use_graphs(recorder, PaddedSizes(most, sizes), quiet)
    runner.next_pass_is_watched = selection.next_pass_is_watched
    return recorder
