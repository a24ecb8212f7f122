"""Where does a step's time go? To scheduling, metadata, attention, the rest of the model, sampling.

`Timeline` is told when a phase has ended; the spans add up in counters and, where asked for, go
into a Chrome trace. Knows nothing about what the phases do.

On a CPU the clock is the host's. On a GPU the host runs ahead, so that true times need events on
the device, and reading them needs the device to have caught up: this is done for a trace alone.
Without one, a GPU's counters say how long the host was busy or waiting, attention is not told from
the rest, and most of the time is in `sample`, where the host waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from topkapi.engine.trace import ChromeTrace, Span

# `graph` is a replayed step of the model: its attention and its rest at once.
PHASES = ("schedule", "draft", "metadata", "attention", "rest", "graph", "sample", "output")


class Clock(Protocol):
    """Marks a moment now, says later when it was."""

    def mark(self) -> Any: ...

    def seconds(self, marks: list[Any]) -> list[float]: ...


class HostClock:
    """The host's own clock."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, marks: list[float]) -> list[float]:
        return [mark - self._start for mark in marks]


class DeviceClock:
    """Events on a GPU's current stream. Reading them waits for the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: list[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [self._start.elapsed_time(mark) / 1e3 for mark in marks]


class Timeline:
    """Phases of one engine's steps.

    Attributes:
        seconds: total of each phase so far.
        measures_attention: whether attention is told from the rest.
    """

    def __init__(self, device: torch.device | None = None, trace: Path | None = None) -> None:
        """Without a device all work is the host's. Raises `ConfigError` when the trace cannot be
        written.
        """
        on_gpu = device is not None and device.type == "cuda"
        self.measures_attention = trace is not None or not on_gpu
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._trace = None if trace is None else ChromeTrace(trace)
        self._clock: Clock = DeviceClock(device) if device and on_gpu and trace else HostClock()
        self._marks: list[tuple[str, Any]] = []

    def watch(self, attention_modules: Iterable[Any]) -> None:
        """Have every call of these `nn.Module`s counted as attention, for the timeline's life."""
        if self.measures_attention:
            for module in attention_modules:
                module.register_forward_pre_hook(lambda *_: self.end("rest"))
                module.register_forward_hook(lambda *_: self.end("attention"))

    def begin(self) -> None:
        """A step begins now; one that did not finish is forgotten."""
        self._marks = [("", self._clock.mark())]

    def end(self, phase: str) -> None:
        """What has happened since the last mark was `phase`. Nothing outside of a step."""
        if self._marks:
            self._marks.append((phase, self._clock.mark()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What ends in here is not noted: a module that is captured, not run."""
        marks, self._marks = self._marks, []
        try:
            yield
        finally:
            self._marks = marks

    def finish(self, name: str, counters: dict[str, int]) -> None:
        """The step called `name` is over; `counters` are drawn beside it in a trace."""
        marks, self._marks = self._marks, []
        times = self._clock.seconds([mark for _, mark in marks])
        spans = [
            Span(phase, start, end)
            for (phase, _), (start, end) in zip(marks[1:], pairwise(times), strict=True)
        ]
        for span in spans:
            self.seconds[span.name] += span.end - span.start
        if self._trace is not None:
            self._trace.add_step(name, spans, counters)
