"""What does a capture that fails leave behind? On a stand-in for torch.cuda; see tests/gpu, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from topkapi.engine.cuda_recorder import CudaRecorder


class Device:
    """Streams are names. As torch does, a capture that ends badly raises before it has gone back
    from its stream.
    """

    def __init__(self) -> None:
        self.current: Any = SimpleNamespace(name="default", wait_stream=lambda _: None)
        self.waiting = 0
        self.captures = False

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, *, stream: Any, **_: object) -> Iterator[None]:
        before, self.current, self.captures = self.current, stream, True
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("the capture is invalid") from error
        finally:
            self.captures = False
        self.current = before

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.waiting = mode

    def as_torch(self) -> SimpleNamespace:
        cuda = SimpleNamespace(
            CUDAGraph=object,
            Stream=lambda _: SimpleNamespace(name="side", wait_stream=lambda _: None),
            current_stream=lambda: self.current,
            device=lambda _: nullcontext(),
            get_sync_debug_mode=lambda: self.waiting,
            graph=self.graph,
            graph_pool_handle=lambda: (0, 1),
            set_sync_debug_mode=self.set_sync_debug_mode,
            stream=self.stream,
        )
        return SimpleNamespace(cuda=cuda, device=torch.device, Tensor=torch.Tensor)


@pytest.mark.parametrize("fails", ["at once", "where waiting is forbidden", "in the capture", ""])
def test_stream_and_debug_mode_are_those_of_before(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr("topkapi.engine.cuda_recorder.torch", device.as_torch())
    recorder = CudaRecorder(torch.device("cuda", 0))
    seen = []

    def run() -> tuple[torch.Tensor, ...]:
        forbidden = device.waiting == "error"
        seen.append((device.current.name, forbidden, device.captures))
        when = {"at once": True, "where waiting is forbidden": forbidden}
        if when.get(fails, device.captures and bool(fails)):
            raise RuntimeError("no")
        return (torch.zeros(1),)

    # What went wrong is told, not that the capture is invalid then.
    with pytest.raises(RuntimeError, match=r"^no$") if fails else nullcontext():
        recorder.record(run)
    steps = [("side", False, False), ("side", True, False), ("side", False, True)]
    assert seen == steps[: len(seen)]
    assert len(seen) == {"at once": 1, "where waiting is forbidden": 2}.get(fails, 3)
    assert (device.current.name, device.waiting) == ("default", 0)
