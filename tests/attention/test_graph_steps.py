"""Does a captured layer, replayed over growing and shrinking batches, compute each batch?

On a GPU the layer is a CUDA graph; on a CPU the same calls run without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from attention.world import CONFIG, Stream, World, concat, make_stream, parts_of, run_layer
from tolerances import OUTPUT, assert_close
from topkapi.attention import ForwardBatch, ForwardMode, SpecInfo, layer_forward

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ],
)
SIZE, LENGTH = 4, 90
# Contexts of each step's requests: they grow, shrink, and pass k on the way.
STEPS = ((9, 40, 5, 80), (10,), (7, 41), (8, 42, 6), (90, 4, 4, 4))


@contextmanager
def no_host_sync(device: str) -> Iterator[None]:
    """On a GPU, an error for whatever waits for it."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(device: str, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A graph of `run`, as a function that replays it."""
    if device == "cpu":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


@dataclass
class Engine:
    """What an engine owns around a graph: static inputs of `SIZE * drafts` rows."""

    world: World
    mode: ForwardMode
    drafts: int

    def __post_init__(self) -> None:
        rows = SIZE * self.drafts
        device = self.world.device
        self.part = make_stream(CONFIG, rows, 0).to(device)
        self.loc = torch.zeros(rows, dtype=torch.int64, device=device)
        self.spec = SpecInfo(draft_token_num=self.drafts)
        self.batch = self.world.batch(self.mode, (), ())
        self.batch.out_cache_loc = self.loc
        backend = self.world.backend
        backend.init_cuda_graph_state(SIZE, rows)
        ones = torch.ones(SIZE, dtype=torch.int64, device=device)
        backend.init_forward_metadata_capture_cuda_graph(
            SIZE, rows, ones, ones, None, self.mode, self.spec
        )
        layer = self.world.layer(0)
        self.replay = captured(device, lambda: run_layer(backend, layer, self.batch, self.part))

    def step(self, batch: ForwardBatch, part: Stream) -> torch.Tensor:
        rows = part.q.shape[0]
        for name in Stream.__dataclass_fields__:
            getattr(self.part, name)[:rows] = getattr(part, name)
        self.loc.zero_()
        self.loc[:rows] = batch.out_cache_loc
        with no_host_sync(self.world.device):
            self.world.backend.init_forward_metadata_replay_cuda_graph(
                SIZE,
                batch.req_pool_indices,
                batch.seq_lens,
                0,
                None,
                self.mode,
                self.spec,
                batch.seq_lens_cpu,
                self.loc,
            )
        return self.replay()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "fp8"])
@pytest.mark.parametrize(
    ("mode", "drafts"),
    [
        (ForwardMode.DECODE, 1),
        (ForwardMode.TARGET_VERIFY, 3),
        (ForwardMode.DRAFT_EXTEND_V2, 3),
    ],
)
def test_replays_compute_each_batch(
    device: str, kv_cache_dtype: str, mode: ForwardMode, drafts: int
) -> None:
    static, plain = (World(kv_cache_dtype=kv_cache_dtype, device=device) for _ in range(2))
    streams = [make_stream(CONFIG, LENGTH, seed=b) for b in range(SIZE)]
    for world in (static, plain):
        world.step(streams, (LENGTH,) * SIZE, (LENGTH,) * SIZE, ForwardMode.EXTEND)
    engine = Engine(static, mode, drafts)
    for kv_lens in STEPS:
        q_lens = (drafts,) * len(kv_lens)
        batch = static.batch(mode, q_lens, kv_lens)
        part = parts_of(streams, q_lens, kv_lens).to(device)
        out = engine.step(batch, part)
        want = plain.step(streams, q_lens, kv_lens, mode)
        assert_close(f"{kv_lens}", out[: len(want)], want, OUTPUT[torch.float32])
        assert not out[len(want) :].any()


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_table_no_wider_than_k(device: str) -> None:
    """Nothing is scored, and what everything is must be found by the graph, not by its warm-up."""
    config = replace(CONFIG, index_topk=192)
    static, plain = (World(config=config, device=device) for _ in range(2))
    streams = [make_stream(CONFIG, LENGTH, seed=b) for b in range(SIZE)]
    for world in (static, plain):
        world.step(streams, (LENGTH,) * SIZE, (LENGTH,) * SIZE, ForwardMode.EXTEND)
    engine = Engine(static, ForwardMode.DECODE, 1)
    for kv_lens in STEPS:
        q_lens = (1,) * len(kv_lens)
        part = parts_of(streams, q_lens, kv_lens).to(device)
        out = engine.step(static.batch(ForwardMode.DECODE, q_lens, kv_lens), part)
        want = plain.step(streams, q_lens, kv_lens, ForwardMode.DECODE)
        assert_close(f"{kv_lens}", out[: len(want)], want, OUTPUT[torch.float32])


def test_a_capture_makes_anew_what_a_warm_up_made(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    backend = world.backend
    ones = torch.ones(SIZE, dtype=torch.int64)
    backend.init_cuda_graph_state(SIZE, SIZE)
    backend.init_forward_metadata_capture_cuda_graph(
        SIZE, SIZE, ones, ones, None, ForwardMode.DECODE, None
    )
    warm = backend.metadata
    warm.selection.slots = torch.zeros(SIZE, 8, dtype=torch.int32)
    warm.page_table_1.fill_(7)
    assert backend.metadata is warm
    monkeypatch.setattr(layer_forward, "_is_capturing", lambda device: True)
    captured = backend.metadata
    assert backend.metadata is captured
    assert captured.buffers is warm.buffers
    assert captured.selection.slots is None
    assert not (captured.page_table_1 == 7).any()


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("mode", list(ForwardMode))
def test_an_eager_step_starts_without_waiting(device: str, mode: ForwardMode) -> None:
    world = World(device=device)
    world.batch(mode, (), ())
    q_lens, kv_lens = ((1, 1), (20, 4)) if mode.is_decode() else ((2, 2), (20, 4))
    if mode.is_idle():
        q_lens, kv_lens = (), ()
    with no_host_sync(device):
        batch = world.batch(mode, q_lens, kv_lens)
        world.backend.init_forward_metadata(batch)
    part = concat([make_stream(CONFIG, sum(q_lens), 0)]).to(device)
    run_layer(world.backend, world.layer(0), batch, part)
    with no_host_sync(device):
        run_layer(world.backend, world.layer(0), batch, part)
