"""How is a step captured as a CUDA graph, and what is left when that fails?

A step is run twice before: once to compile kernels and to make library workspaces, and once more
with waiting for the device forbidden, which finds nearly everything that cannot be captured before
a capture begins. One side stream and one pool of memory serve all graphs. Knows no model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from topkapi.engine.graphs import FAULTS, Outputs


class CudaRecording:
    """A captured graph and the tensors it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self.outputs = outputs
        self._graph = graph

    def replay(self) -> None:
        """One launch on the current stream."""
        self._graph.replay()


class CudaRecorder:
    """Captures steps of one device."""

    def __init__(self, device: torch.device) -> None:
        """Allocates nothing yet."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Outputs]) -> CudaRecording:
        """See `Recorder.record`. Waits for the device."""
        with torch.cuda.device(self._device):
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            return CudaRecording(graph, self._capture(graph, run))

    def pool_bytes(self) -> int:
        """What the allocator has reserved for the pool."""
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
        )

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Outputs]) -> Outputs:
        """Raises what `run` raises: ending a capture that went wrong raises something else."""
        first: Exception | None = None
        try:
            # A capture that ends badly leaves its stream the current one: hence the outer context.
            # Other threads may go on: what they do is not of this capture.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                try:
                    return run()
                except FAULTS as error:
                    first = error
                    raise
        except FAULTS as error:
            raise (first or error) from None
        finally:
            first = None  # its traceback holds this frame

    def _warm_up(self, run: Callable[[], Outputs]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
            with _waiting_forbidden():
                run()
        current.wait_stream(self._stream)


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """`RuntimeError` for whatever waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
