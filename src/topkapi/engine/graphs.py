"""Which steps are captured, at which padded sizes, and what happens where one cannot be?

`Graphs` keeps captured steps by key and captures a new one when it is first wanted. The first
failure turns its steps eager for good, is said once, and stays readable: a request never notices.
What capturing means is a `Recorder`'s business (`cuda_recorder` on a GPU); what a step computes is
`step_graphs` and `draft_graphs`.

Captured when first wanted, not all at the start: speculation alone has dozens of (drafts, size)
pairs, and most engines meet few of them. Sizes named by the user are captured at the start, the
largest first, so that smaller ones fit into its memory. All graphs of an engine share one pool.
"""

from __future__ import annotations

import time
import traceback
import warnings
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from topkapi.errors import ConfigError, TopkapiError

# What a step that cannot be captured may raise; out-of-memory is a RuntimeError.
FAULTS = (TopkapiError, RuntimeError, ValueError, TypeError, LookupError)

Outputs = tuple[torch.Tensor, ...]


class Recording(Protocol):
    """One captured step over static inputs."""

    @property
    def outputs(self) -> Outputs:
        """The same tensors after every replay."""

    def replay(self) -> None:
        """Compute the outputs from what the static inputs now hold. Never synchronises."""


class Recorder(Protocol):
    """Captures steps into one pool of memory."""

    def record(self, run: Callable[[], Outputs]) -> Recording:
        """Capture what `run` does, after running it to warm up; its inputs are inert by then.

        Raises one of `FAULTS` where that cannot be, and leaves device and allocator in order.
        """

    def pool_bytes(self) -> int:
        """Memory that all recordings hold together."""


class CapturedStep(Protocol):
    """What `Graphs` keeps."""

    @property
    def nbytes(self) -> int:
        """Bytes of static inputs and metadata, outside of the recorder's pool."""


Step = TypeVar("Step", bound=CapturedStep)


@dataclass(frozen=True)
class GraphStats:
    """What is replayed instead of run.

    Attributes:
        off: why nothing (more) is captured; empty where graphs are in use.
        num_graphs: captured and kept.
        num_replays: steps, and rounds of drafting, that were replayed.
        pool_bytes: memory for what is computed inside the graphs, shared by all.
        static_bytes: their inputs and metadata.
        capture_seconds: what capturing took, warming up included.
    """

    off: str = ""
    num_graphs: int = 0
    num_replays: int = 0
    pool_bytes: int = 0
    static_bytes: int = 0
    capture_seconds: float = 0.0


class PaddedSizes:
    """The batch sizes that are captured: a batch is filled up to the next one."""

    def __init__(self, most: int, sizes: Sequence[int] | None = None) -> None:
        """By default the powers of two below `most`, and `most`. Raises `ConfigError`."""
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise ConfigError(
                "cuda_graph_batch_sizes: expected None or sizes of 1 or more (cuda_graphs=False "
                f"turns graphs off), got {sizes}"
            )
        wanted = sizes or [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
        self.sizes = tuple(sorted({min(size, most) for size in wanted}))

    def holding(self, count: int) -> int | None:
        """The smallest size for `count` requests; None above the largest, and for none."""
        place = bisect_left(self.sizes, count)
        return self.sizes[place] if count and place < len(self.sizes) else None


class Graphs(Generic[Step]):
    """The captured steps of one kind.

    Attributes:
        off: why they run eagerly; empty while they do not.
        num_replays: counted by whoever replays.
        capture_seconds: what capturing has taken.
    """

    def __init__(
        self,
        kind: str,
        recorder: Recorder,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`kind` names the steps in messages; `quiet()` holds off whoever watches the model's
        modules while they are captured.
        """
        self.kind = kind
        self.off = ""
        self.num_replays = 0
        self.capture_seconds = 0.0
        self._recorder = recorder
        self._quiet = quiet
        self._steps: dict[Hashable, Step] = {}

    def find(self, key: Hashable, capture: Callable[[Recorder], Step]) -> Step | None:
        """The step of `key`, captured now if it is new; None where it must be run eagerly."""
        if self.off:
            return None
        if key not in self._steps:
            began = time.perf_counter()
            try:
                with self._quiet():
                    self._steps[key] = capture(self._recorder)
            except FAULTS as error:
                self._give_up(error)
                return None
            finally:
                self.capture_seconds += time.perf_counter() - began
        return self._steps[key]

    def _give_up(self, error: Exception) -> None:
        self.off = f"{self.kind} cannot be captured: {_told(error)}"
        # The few sizes that went well are not worth their memory.
        self._steps.clear()
        warnings.warn(
            f"CUDA graphs: {self.off}. These steps run eagerly from now on, with the same results "
            "(cuda_graphs=False turns graphs off without a word)",
            RuntimeWarning,
            stacklevel=2,
        )

    def stats(self) -> GraphStats:
        """The pool is the recorder's: kinds that share one report the same bytes."""
        return GraphStats(
            off=self.off,
            num_graphs=len(self._steps),
            num_replays=self.num_replays,
            pool_bytes=self._recorder.pool_bytes(),
            static_bytes=sum(step.nbytes for step in self._steps.values()),
            capture_seconds=self.capture_seconds,
        )


def total(parts: Sequence[GraphStats]) -> GraphStats:
    """Kinds of steps over one recorder, as one."""
    return GraphStats(
        off="; ".join(part.off for part in parts if part.off),
        num_graphs=sum(part.num_graphs for part in parts),
        num_replays=sum(part.num_replays for part in parts),
        pool_bytes=max((part.pool_bytes for part in parts), default=0),
        static_bytes=sum(part.static_bytes for part in parts),
        capture_seconds=sum(part.capture_seconds for part in parts),
    )


def _told(error: BaseException) -> str:
    """What went wrong, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else ''}{place}"
