"""How long does one call take? The one clock of every kernel measurement.

On a GPU a call is captured in a CUDA graph and replayed between two events, the second-level cache
flushed before each replay; on a CPU it is called between two readings of the wall clock. Several
calls are measured in turn, round by round, so that a drift of the machine's speed meets all of
them. Knows nothing about operations.

Calls in line are one graph, and the time of each is its share: what a call takes between others.

The cache is flushed by reading, which leaves it full of lines that may be dropped, as the weights
of a model's other layers do. Lines that a flush wrote would have to go back to memory while the
call that is timed reads from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from topkapi.bench.record import quantiles
from topkapi.errors import KernelRefusedError

Call = Callable[[], Any]

# Read before each timed replay: more than the second-level cache of any GPU holds.
FLUSH_BYTES = 256 * 2**20
# Calls in one graph: enough that what a replay adds to them is small.
MOST_IN_LINE = 64
# Rounds on a GPU that are run and thrown away.
WARM_ROUNDS = 2
# Keeps the device busy while the host enqueues a call that cannot be captured: about half a
# millisecond.
_HEAD_START_CYCLES = 1_000_000


@dataclass(frozen=True)
class Timed:
    """A call ready to be timed, or `calls` of them in line. `how` is `graph`, `launches` or
    `wall clock`; `graph` (if any) owns the memory of what was captured, and `call` that of what was
    there before: a graph reads and writes both, and keeps only the first alive.
    """

    run: Call
    how: str
    graph: Any = None
    call: Call | None = None
    calls: int = 1


def prepare(call: Call, device: torch.device) -> Timed:
    """Run `call` once, and on a GPU capture it.

    What cannot be captured is timed by its launches, with a head start for the host: `how` says so.
    Synchronises.
    """
    if device.type != "cuda":
        call()
        return Timed(call, "wall clock")
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = _capture(call)
    torch.cuda.synchronize(device)
    if graph is None:
        return Timed(call, "launches")
    return Timed(graph.replay, "graph", graph, call)


def prepare_line(calls: Sequence[Call], device: torch.device) -> Timed:
    """Run each of `calls` once, then capture all of them, one after the other, as one graph.

    Synchronises.
    """

    def one_after_the_other() -> None:
        for call in calls:
            call()

    return replace(prepare(one_after_the_other, device), calls=len(calls))


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> Any:
    """One stream for all captures: the allocator keeps what it frees apart for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]


def _capture(call: Call) -> torch.cuda.CUDAGraph | None:
    """The graph of one call on the current stream; None if it may not be captured.

    Without `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        call()
    except (RuntimeError, KernelRefusedError):
        _abandon(graph)
        return None
    try:
        graph.capture_end()  # type: ignore[no-untyped-call, unused-ignore]
    except RuntimeError:
        return None
    return graph


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture whose call failed; ending it may fail in turn, and ends it all the same."""
    try:
        graph.capture_end()  # type: ignore[no-untyped-call, unused-ignore]
    except RuntimeError:
        torch.cuda.synchronize()


def interleaved(
    calls: Mapping[str, Timed], rounds: int, device: torch.device, *, warm_rounds: int = WARM_ROUNDS
) -> dict[str, list[float]]:
    """Seconds of each call in each of `rounds` rounds; every round runs all calls once. Of calls in
    line it is the mean of the line.
    """
    if device.type == "cuda":
        return _events(calls, rounds, device, warm_rounds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timed in calls.items():
            start = time.perf_counter()
            timed.run()
            times[name].append((time.perf_counter() - start) / timed.calls)
    return times


def _events(
    calls: Mapping[str, Timed], rounds: int, device: torch.device, warm_rounds: int
) -> dict[str, list[float]]:
    others = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    largest = others.new_empty(1)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(rounds + warm_rounds):
        for name, timed in calls.items():
            begin, end = _event(), _event()
            torch.amax(others, dim=0, keepdim=True, out=largest)
            if timed.graph is None:
                torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call, unused-ignore]
            begin.record()
            timed.run()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize(device)
    return {
        name: [a.elapsed_time(b) / 1e3 / calls[name].calls for a, b in pairs[warm_rounds:]]
        for name, pairs in events.items()
    }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


def measure(call: Call, repeats: int) -> tuple[float, float, float]:
    """p20, p50 and p80 of one replay on the current GPU, in microseconds. Synchronises.

    Raises `RuntimeError` for a call that cannot be captured.
    """
    device = torch.device("cuda")
    timed = prepare(call, device)
    if timed.graph is None:
        raise RuntimeError("the call cannot be captured in a CUDA graph")
    found = quantiles(interleaved({"call": timed}, repeats, device)["call"])
    return 1e6 * found["p20"], 1e6 * found["p50"], 1e6 * found["p80"]
