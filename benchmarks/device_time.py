"""How long does a call take on the device? Seconds of each of several runs.

On a GPU the call is captured in a CUDA graph (unless told otherwise) and replayed between events,
the second-level cache flushed before each run. On a CPU it is the host's clock, which serves to try
a benchmark out, not to measure with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20


def device_times(
    call: Callable[[], Any], device: torch.device, *, repeats: int = 20, graph: bool = True
) -> list[float]:
    """Seconds of `repeats` runs, in the order they ran. Waits for the device at the end."""
    if device.type != "cuda":
        return [_host_seconds(call) for _ in range(repeats)]
    run = _captured(call) if graph else call
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    events = []
    for _ in range(repeats + 2):
        flush.fill_(7)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events[2:]]


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of the call, which has run once before (kernels compile at their first launch)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _host_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
