"""A recorder without graphs: a replay calls the captured function again, over the same inputs.

As a graph would, it sees nothing but what the static inputs and metadata hold, and writes the same
output tensors, which hold nonsense until the first replay. So what is stale, padded wrongly or
found under a wrong key shows on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from topkapi.engine.graphs import Outputs, PaddedSizes
from topkapi.engine.llm import LLM


@dataclass
class Rerun:
    """A captured function and the tensors its results go to."""

    run: Callable[[], Outputs]
    outputs: Outputs

    def replay(self) -> None:
        for out, result in zip(self.outputs, self.run(), strict=True):
            out.copy_(result)


class RerunRecorder:
    """Keeps count of what it captured: the rows of each step's first output."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def record(self, run: Callable[[], Outputs]) -> Rerun:
        outputs = run()
        self.rows.append(outputs[0].shape[0])
        for out in outputs:
            out.fill_(float("nan") if out.is_floating_point() else -77)
        return Rerun(run, outputs)

    def pool_bytes(self) -> int:
        return 1000


def replaying(llm: LLM, sizes: list[int] | None = None) -> RerunRecorder:
    """Let `llm` replay its steps from now on."""
    recorder = RerunRecorder()
    most = llm.engine.scheduler.limits.max_running_requests
    llm.engine._runner.use_graphs(recorder, PaddedSizes(most, sizes))
    return recorder
