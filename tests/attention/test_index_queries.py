"""Quantised index queries: what they are, when they are used, and that any kernel takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.world import World, make_stream
from cases import SELECT_CASES, RecordCase, SelectCase
from topkapi import ops, reference
from topkapi.attention import index_queries
from topkapi.attention.forward_batch import ForwardMode
from topkapi.attention.index_queries import quantize_index_query, quantizes_queries
from topkapi.config import BackendOptions
from topkapi.device import DeviceInfo
from topkapi.errors import ConfigError

HEADS = 5


@pytest.mark.parametrize("values", ["normal", "zeros", "huge", "tiny", "special", "powers"])
@pytest.mark.parametrize("index_dim", [32, 128])
def test_each_head_has_its_own_scale_and_hands_it_to_its_weight(
    values: str, index_dim: int
) -> None:
    case = RecordCase("q", 7 * HEADS, torch.uint8, index_dim=index_dim, values=values)  # type: ignore[arg-type]
    q = case.make()["keys"].view(7, HEADS, index_dim)
    weights = torch.randn(7, HEADS, generator=torch.Generator().manual_seed(1))
    codes, scaled = quantize_index_query(q, weights)
    assert (codes.dtype, scaled.dtype) == (torch.float8_e4m3fn, torch.float32)
    for row in range(7):
        want, scales = reference.quantize_index_key(q[row])
        assert torch.equal(codes[row].view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scaled[row], weights[row] * scales)
    clean = q.float().isfinite().all(-1)
    back = codes.float() * (scaled / weights)[..., None]
    error = (back - q.float())[clean].abs().amax(-1)
    assert (error <= q.float()[clean].abs().amax(-1).clamp_min(1e-4) / 13).all()


@pytest.mark.parametrize("case", [c for c in SELECT_CASES if c.cache == torch.uint8], ids=str)
def test_the_torch_kernel_takes_codes_for_the_values_they_stand_for(case: SelectCase) -> None:
    inputs = case.make()
    inputs["q"], inputs["weights"] = quantize_index_query(inputs["q"], inputs["weights"])
    case.compare(ops.select(**inputs, kernel="torch"), inputs)
    del inputs["k"]
    got = ops.indexer_logits(**inputs, kernel="torch")
    case.compare_logits(got, inputs)
    plain = ops.indexer_logits(**{**inputs, "q": inputs["q"].float()}, kernel="torch")
    assert torch.equal(got.nan_to_num(5.0), plain.nan_to_num(5.0))


def selections(world: World, length: int) -> torch.Tensor:
    """What the last 9 tokens of a request select, its keys having been written before."""
    stream = make_stream(world.config, length, seed=3)
    noisy = torch.randn(stream.index_q.shape, generator=torch.Generator().manual_seed(4))
    stream = replace(stream, index_q=noisy)
    start = length - 9
    for first, last in ((0, start), (start, length)):
        part = stream.part(first, last)
        batch = world.batch(ForwardMode.EXTEND, [last - first], [last])
        world.backend.init_forward_metadata(batch)
        chosen = world.backend.forward_indexer(part.index_q, part.index_k, part.weights, 0, batch)
    assert chosen is not None
    return chosen


def world_of(index_cache: str, choice: str) -> World:
    return World(index_cache_dtype=index_cache, options=BackendOptions(index_queries=choice))


def test_the_option_says_whether_queries_are_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    full, fp8 = (selections(world_of("fp8", choice), 150) for choice in ("full", "fp8"))
    assert not torch.equal(full, fp8)
    assert torch.equal(selections(world_of("fp8", "auto"), 150), full), "a CPU gains nothing by it"
    new = DeviceInfo("cuda", 90, "new", 132, 232448, has_triton=False)
    monkeypatch.setattr(index_queries, "device_info", lambda device: new)
    assert torch.equal(selections(world_of("fp8", "auto"), 150), fp8)
    floats = [selections(world_of("fp32", choice), 150) for choice in ("full", "fp8", "auto")]
    assert torch.equal(floats[0], floats[1])
    assert torch.equal(floats[0], floats[2])


@pytest.mark.parametrize(
    ("backend", "arch", "wanted"),
    [("cuda", 80, False), ("cuda", 86, False), ("cuda", 89, True), ("cuda", 90, True),
     ("cuda", 120, True), ("hip", "gfx942", False), ("hip", "gfx950", True), ("cpu", 0, False)],
)  # fmt: skip
def test_auto_is_for_devices_with_fp8_products(
    backend: str, arch: int | str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_queries, "device_info", lambda device: DeviceInfo(backend, arch))
    cache = torch.zeros(2, 64 * 132, dtype=torch.uint8)
    assert quantizes_queries(BackendOptions(), cache) is wanted
    assert quantizes_queries(BackendOptions(index_queries="fp8"), cache)
    assert not quantizes_queries(BackendOptions(index_queries="full"), cache)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="index_queries: expected auto, fp8 or full, got 'int8'"):
        BackendOptions(index_queries="int8")
