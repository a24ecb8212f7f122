"""A captured layer at DeepSeek-V3.2's sizes gives the eager layer's bits, in every graph mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention.world import CONFIG, Stream, World, run_layer
from topkapi.attention import ForwardBatch, ForwardMode, SpecInfo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

REAL = replace(
    CONFIG,
    num_hidden_layers=1,
    num_attention_heads=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    scaling=192**-0.5,
    indexer_types=("full",),
)
MAX_CONTEXT = 8192
DRAFTS = 4
# Contexts of successive replays, cycled over the requests: longer, shorter, around k.
REPLAYS = ((8192, 3000, 2048, 2049, 63), (17, 2050, 4096), (8000, 7999, 1, 5))


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def world(request: pytest.FixtureRequest) -> World:
    made = World(
        config=REAL,
        requests=128,
        max_context=MAX_CONTEXT,
        kv_cache_dtype=request.param,
        device="cuda",
    )
    slots = torch.arange(made.pool.size, device="cuda")
    for part in slots.split(2**16):
        latent = torch.randn(len(part), 1, 576, device="cuda", dtype=torch.bfloat16)
        keys = torch.randn(len(part), 128, device="cuda", dtype=torch.bfloat16)
        layer = made.layer(0)
        made.pool.set_mla_kv_buffer(layer, part, latent[:, 0, :512], latent[:, 0, 512:])
        made.pool.set_index_k_buffer(0, part, keys)
    return made


def random_rows(rows: int) -> Stream:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, device="cuda", dtype=torch.bfloat16)

    weights = torch.randn(rows, 64, device="cuda") / 90
    return Stream(normal(128, 576), normal(576), normal(64, 128), normal(128), weights)


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def lengths_for(mode: ForwardMode, size: int, replay: int) -> tuple[list[int], list[int]]:
    """Query and kv lengths; DRAFT_EXTEND accepts 1 to DRAFTS tokens, as a request goes."""
    wanted = REPLAYS[replay % len(REPLAYS)]
    q_lens = [1 if mode.is_decode() else DRAFTS] * size
    if mode is ForwardMode.DRAFT_EXTEND:
        q_lens = [1 + (b + replay) % DRAFTS for b in range(size)]
    kv_lens = [max(wanted[b % len(wanted)], q) for b, q in enumerate(q_lens)]
    return q_lens, kv_lens


@pytest.mark.parametrize(
    ("mode", "size"),
    [(ForwardMode.DECODE, size) for size in (1, 2, 7, 8, 32, 64, 128)]
    + [(ForwardMode.TARGET_VERIFY, size) for size in (1, 16, 32)]
    + [(ForwardMode.DRAFT_EXTEND, size) for size in (1, 16)]
    + [(ForwardMode.DRAFT_EXTEND_V2, size) for size in (1, 16)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_replay_equals_eager_bit_for_bit(world: World, mode: ForwardMode, size: int) -> None:
    rows = size * (1 if mode.is_decode() else DRAFTS)
    static = random_rows(rows)
    loc = torch.zeros(rows, dtype=torch.int64, device="cuda")
    accepted = torch.ones(size, dtype=torch.int32, device="cuda")
    spec = SpecInfo(0 if mode is ForwardMode.DRAFT_EXTEND else DRAFTS, accepted)
    if mode is not ForwardMode.DRAFT_EXTEND:
        spec = SpecInfo(1 if mode.is_decode() else DRAFTS)
    graphed, eager = world.new_backend(), world.new_backend()
    graphed.init_cuda_graph_state(size, rows)
    ones = torch.ones(size, dtype=torch.int64, device="cuda")
    graphed.init_forward_metadata_capture_cuda_graph(size, rows, ones, ones, None, mode, spec)
    shell: ForwardBatch = replace(world.batch(mode, (), ()), out_cache_loc=loc)
    layer = world.layer(0)
    graph, out = captured(lambda: run_layer(graphed, layer, shell, static))
    for replay in range(len(REPLAYS)):
        q_lens, kv_lens = lengths_for(mode, size, replay)
        batch = world.batch(mode, q_lens, kv_lens)
        fresh = random_rows(rows)
        for name in Stream.__dataclass_fields__:
            getattr(static, name).copy_(getattr(fresh, name))
        used = sum(q_lens)
        loc.zero_()
        loc[:used] = batch.out_cache_loc
        accepted.copy_(torch.tensor(q_lens, dtype=torch.int32))
        graphed.init_forward_metadata_replay_cuda_graph(
            size, batch.req_pool_indices, batch.seq_lens, 0, None, mode, spec,
            batch.seq_lens_cpu, loc,
        )  # fmt: skip
        graph.replay()
        eager.init_forward_metadata(replace(batch, out_cache_loc=loc))
        want = run_layer(eager, layer, replace(batch, out_cache_loc=loc), fresh)
        assert want[:used].isfinite().all()
        assert torch.equal(out, want), (mode, size, replay)
        assert not out[used:].any()
