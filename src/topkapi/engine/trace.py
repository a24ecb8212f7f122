"""How do a step's spans become a file that chrome://tracing and Perfetto open?

The format is Chrome's Trace Event Format, as a JSON array: complete events (`X`) and counters
(`C`), times in microseconds. The file is whole after every step, however the process ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkapi.errors import ConfigError

_END = b"\n]\n"


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in seconds."""

    name: str
    start: float
    end: float


class ChromeTrace:
    """A trace file that grows step by step: the first line of it shows steps, the second phases."""

    def __init__(self, path: Path) -> None:
        """Replaces the file. Raises `ConfigError` when it cannot be written."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"trace: {path} cannot be written: {error}") from error
        self._file.write(b"[")
        self._append([_name(1, "steps"), _name(2, "phases")], first=True)

    def add_step(self, name: str, spans: Sequence[Span], counters: dict[str, int]) -> None:
        """Write one step: its phases in order, and how things stood after it."""
        if not spans:
            return
        whole = Span(name, spans[0].start, spans[-1].end)
        step = _event(1, whole) | {"args": counters}
        phases = [_event(2, span) for span in spans]
        ts = whole.end * 1e6
        counts = [
            {"name": key, "ph": "C", "pid": os.getpid(), "ts": ts, "args": {key: value}}
            for key, value in counters.items()
        ]
        self._append([step, *phases, *counts])

    def _append(self, events: Sequence[dict[str, Any]], *, first: bool = False) -> None:
        if not first:
            self._file.seek(-len(_END), os.SEEK_END)
        lines = ",\n".join(json.dumps(event) for event in events).encode()
        self._file.write((b"\n" if first else b",\n") + lines + _END)
        self._file.flush()


def _event(tid: int, span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "ph": "X",
        "pid": os.getpid(),
        "tid": tid,
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
    }


def _name(tid: int, name: str) -> dict[str, Any]:
    return {
        "name": "thread_name",
        "ph": "M",
        "pid": os.getpid(),
        "tid": tid,
        "args": {"name": name},
    }
