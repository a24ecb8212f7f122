"""Peers' kernels on a GPU: the reference suite through every package that is installed.

Each way of loading a kernel is tested by itself; one that is missing or does not load is skipped
with its reason.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.world import CONFIG, Stream, World, run_layer
from cases import SELECT_CASES, SPARSE_MLA_CASES, TOPK_CASES, SelectCase, SparseMlaCase, TopkCase
from tolerances import OUTPUT, Tolerance, assert_close
from topkapi import ops, reference
from topkapi.attention import ForwardMode, SpecInfo
from topkapi.attention.index_queries import quantize_index_query
from topkapi.config import BackendOptions
from topkapi.device import device_info
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.external import (
    deep_gemm,
    fa3,
    flashmla_kv,
    flashmla_sparse,
    topk_sgl_kernel,
    topk_vllm,
)
from topkapi.kernels.external.packages import Provider, probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"
BF16, FP8 = torch.bfloat16, torch.uint8
# Hopper's fp8 products keep about 13 bits of a sum, relative to its largest term.
FP8_PRODUCTS = 1e-3


def named(value: Any) -> str:
    return str(getattr(value, "name", None) or getattr(value, "package", value))


def peer_of(provider: Provider) -> Any:
    found = probe((provider,))
    if isinstance(found, str):
        pytest.skip(found)
    return found.call


def refused(kernel: Kernel, case: SparseMlaCase, phase: str = "prefill") -> str | None:
    """The static reasons of a record; its package is `peer_of`'s question."""
    features = {"sinks"} if case.sinks else set()
    if case.logit_cap:
        features.add("logit_cap")
    cache = "fp8" if case.cache == FP8 else str(case.cache).removeprefix("torch.")
    problem = Problem(
        "sparse_mla",
        device_info(torch.device(DEVICE)),
        case.dtype,
        phase=phase,
        cache_format={"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(cache, cache),
        num_heads=case.heads,
        latent_dim=case.latent,
        rope_dim=case.rope,
        topk=case.k,
        features=frozenset(features),
    )
    reason = kernel.refuse(problem)
    return None if reason is None or "package" in reason or "load" in reason else reason


ATTENDED = (
    *(case for case in SPARSE_MLA_CASES if case.dtype == BF16 and case.latent + case.rope == 576),
    SparseMlaCase("wide", 20, heads=128, k=2048, num_slots=5056, cache=BF16, dtype=BF16),
    SparseMlaCase("wide holes", 300, heads=64, k=333, num_slots=5056, cache=BF16, dtype=BF16,
                  pattern="holes"),
    SparseMlaCase("63 heads, sinks", 9, heads=63, k=65, cache=BF16, dtype=BF16, sinks=True),
    SparseMlaCase("narrow", 20, heads=16, k=2048, num_slots=5056, cache=BF16, dtype=BF16),
    SparseMlaCase("one head", 5, heads=1, k=1, cache=BF16, dtype=BF16, pattern="full"),
    SparseMlaCase("all empty", 3, heads=16, cache=BF16, dtype=BF16, pattern="all empty"),
    SparseMlaCase("leading", 3, heads=16, k=130, cache=BF16, dtype=BF16, pattern="leading"),
    SparseMlaCase("no rows", 0, heads=16, cache=BF16, dtype=BF16),
    SparseMlaCase("cap", 4, heads=16, cache=BF16, dtype=BF16, logit_cap=5.0, magnitude=3.0),
    SparseMlaCase("inf query", 5, heads=16, cache=BF16, dtype=BF16, poison="query inf"),
    SparseMlaCase("NaN slot", 5, heads=16, k=3, cache=BF16, dtype=BF16, pattern="full",
                  poison="selected", seed=3),
    SparseMlaCase("fp8 wide", 20, heads=128, k=2048, num_slots=5056, cache=FP8, dtype=BF16),
    SparseMlaCase("fp8 many rows", 200, heads=64, k=96, cache=FP8, dtype=BF16, pattern="holes"),
    SparseMlaCase("fp8 unpaged", 5, heads=3, k=7, cache=FP8, dtype=BF16, num_slots=101),
    SparseMlaCase("fp8 sinks", 5, heads=65, k=70, cache=FP8, dtype=BF16, sinks=True),
    SparseMlaCase("fp8 no slots", 3, heads=16, k=0, cache=FP8, dtype=BF16, pattern="full"),
    SparseMlaCase("fp8 NaN row", 4, heads=16, cache=FP8, dtype=BF16, poison="query"),
    SparseMlaCase("fp8 NaN slot", 5, heads=16, k=3, cache=FP8, dtype=BF16, pattern="full",
                  poison="selected", seed=3),
)  # fmt: skip

ATTEND = [
    pytest.param(module, kernel, provider, id=f"{kernel.name}-{provider.package}")
    for module, kernel in (
        (flashmla_sparse, flashmla_sparse.FLASHMLA_SPARSE),
        (flashmla_kv, flashmla_kv.FLASHMLA_KV),
        (fa3, fa3.FA3),
    )
    for provider in module.PROVIDERS
]


@pytest.mark.parametrize(("module", "kernel", "provider"), ATTEND)
@pytest.mark.parametrize("case", ATTENDED, ids=named)
def test_sparse_mla(module: Any, kernel: Kernel, provider: Provider, case: SparseMlaCase) -> None:
    if reason := refused(kernel, case):
        pytest.skip(reason)
    inputs, peer = case.make(DEVICE), peer_of(provider)
    if module is flashmla_kv and case.sinks and provider.package in flashmla_kv.WITHOUT_SINKS:
        with pytest.raises(RuntimeError):  # so the record refuses
            module.sparse_mla(**inputs, peer=peer)
        return
    out, lse = module.sparse_mla(**inputs, peer=peer)
    want_out, want_lse = case.expected(inputs)
    bound = 3e-3 if case.cache == FP8 else OUTPUT[BF16].lse
    assert out.dtype == BF16
    assert_close("lse", lse, want_lse, Tolerance(bound, bound, 0.0))
    assert_close("out", out, want_out, OUTPUT[BF16])


SCORED = (
    *(replace(case, heads=32) for case in SELECT_CASES if case.cache == FP8
      and case.index_dim == 128),
    SelectCase("decode", (1,) * 7, (5000, 2049, 63, 1, 700, 4096, 2048), k=512, heads=64,
               cache=FP8),
    SelectCase("decode, starts", (1,) * 3, (9, 130, 700), heads=32, cache=FP8,
               addressing="starts"),
    SelectCase("prefill", (300, 1, 40), (3000, 900, 40), k=512, heads=64, cache=FP8,
               padded_rows=3),
    SelectCase("requests without rows", (3, 0, 0, 65, 0, 1), (70, 0, 5, 129, 0, 9), heads=64,
               cache=FP8, padded_rows=4),
    SelectCase("all padding", (0,), (0,), heads=32, cache=FP8, padded_rows=2),
    SelectCase("NaN key", (5, 1), (100, 300), heads=64, cache=FP8, values="nan key"),
    SelectCase("NaN key, decode", (1, 1), (100, 300), heads=64, cache=FP8, values="nan key"),
    SelectCase("NaN row, decode", (1, 1), (100, 300), heads=32, cache=FP8, values="nan row"),
)  # fmt: skip


@pytest.mark.parametrize("case", SCORED, ids=named)
def test_deep_gemm(case: SelectCase) -> None:
    peer_of(deep_gemm.PROVIDERS[0])
    inputs = case.make(DEVICE)
    inputs["q"], inputs["weights"] = quantize_index_query(inputs["q"], inputs["weights"])
    k = inputs.pop("k")
    got = ops.indexer_logits(**inputs, kernel="deep_gemm").cpu()
    want = case.expected_logits(inputs)
    assert torch.equal(got == float("-inf"), want == float("-inf"))
    assert torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite()
    if finite.any():
        largest = torch.where(finite, want.abs(), 0.0).amax(1, keepdim=True).clamp_min(1e-9)
        error = torch.where(finite, (got - want).abs(), 0.0) / largest
        assert float(error.max()) < FP8_PRODUCTS
    lengths = inputs["context"].lengths.cpu()
    for budget in (2**28, 2**16):
        positions = ops.select(
            **inputs, k=k, output="positions", budget_bytes=budget, kernel="deep_gemm"
        )
        assert torch.equal(positions.cpu(), reference.topk(got, lengths, k)), budget
    slots = ops.select(**inputs, k=k, kernel="deep_gemm")
    assert torch.equal(slots, inputs["context"].slots(positions))


RANK = [
    pytest.param(topk_sgl_kernel, id="sgl_kernel"),
    pytest.param(topk_vllm, id="vllm"),
]


def same_values(got: torch.Tensor, inputs: dict[str, Any]) -> None:
    """The order and the padding of the contract, and the reference's values: ties may differ."""
    cpu = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in inputs.items()}
    want, got = reference.topk(**cpu), got.cpu()
    assert torch.equal(got < 0, want < 0)
    if cpu["logits"].shape[1] == 0:
        return
    both = (got[:, 1:] >= 0) & (got[:, :-1] >= 0)
    assert bool(((got[:, 1:] > got[:, :-1]) | ~both).all()), "not ascending, or twice the same"
    starts = cpu["starts"][:, None] if cpu["starts"] is not None else 0
    for chosen in (got, want):
        assert bool((chosen < cpu["lengths"][:, None]).all())
    values = [
        cpu["logits"].gather(1, (chosen + starts).clamp_min(0).long()).masked_fill(want < 0, 0.0)
        for chosen in (got, want)
    ]
    assert torch.equal(values[0].sort(1).values + 0.0, values[1].sort(1).values + 0.0)


@pytest.mark.parametrize("module", RANK)
@pytest.mark.parametrize("case", TOPK_CASES, ids=named)
def test_topk(module: Any, case: TopkCase) -> None:
    """On values that are not close together and hold no NaN, which these kernels rank otherwise."""
    peer_of(module.PROVIDERS[0])
    if case.values in ("special", "outliers"):
        pytest.skip("inexact by its record: infinities, NaN and subnormal values")
    inputs = case.make(DEVICE)
    problem = Problem("topk", device_info(torch.device(DEVICE)), torch.float32, topk=case.k)
    if reason := module.TOPK.refuse(problem):
        pytest.skip(reason)
    name = module.TOPK.name
    same_values(ops.topk(**inputs, kernel=name), inputs)


def test_auto_takes_no_inexact_kernel() -> None:
    logits = torch.randn(64, 65536, device=DEVICE)
    problem = Problem(
        "topk", device_info(logits.device), torch.float32, topk=2048, rows=64, context=65536
    )
    from topkapi.ops.registry import OPS

    assert all(kernel.exact for kernel in OPS["topk"].preferred(problem))


REAL = replace(
    CONFIG,
    num_hidden_layers=1,
    num_attention_heads=64,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    scaling=192**-0.5,
    indexer_types=("full",),
)


def world_of(cache: str, decode: str) -> World:
    made = World(
        config=REAL,
        requests=32,
        max_context=2048,
        kv_cache_dtype=cache,
        device=DEVICE,
        options=BackendOptions(decode_kernel=decode),
    )
    slots = torch.arange(made.pool.size, device=DEVICE)
    latent = torch.randn(len(slots), 1, 576, device=DEVICE, dtype=BF16)
    keys = torch.randn(len(slots), 128, device=DEVICE, dtype=BF16)
    layer = made.layer(0)
    made.pool.set_mla_kv_buffer(layer, slots, latent[:, 0, :512], latent[:, 0, 512:])
    made.pool.set_index_k_buffer(0, slots, keys)
    return made


def random_rows(rows: int) -> Stream:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, device=DEVICE, dtype=BF16)

    weights = torch.randn(rows, 64, device=DEVICE) / 90
    return Stream(normal(64, 576), normal(576), normal(64, 128), normal(128), weights)


@pytest.mark.parametrize(
    ("decode", "cache"), [("flashmla_kv", "fp8"), ("flashmla_sparse", "bf16"), ("fa3", "bf16")]
)
@pytest.mark.parametrize("warm", [True, False], ids=["warmed", "cold"])
def test_two_captured_graphs_of_one_backend(decode: str, cache: str, warm: bool) -> None:
    """Replayed in turn on new values, each gives the eager step's bits: neither reads the other's
    tile schedule, nor one that is gone.
    """
    module = {"flashmla_kv": flashmla_kv, "flashmla_sparse": flashmla_sparse, "fa3": fa3}[decode]
    found = probe(module.PROVIDERS)
    if isinstance(found, str):
        pytest.skip(found)
    world = world_of(cache, decode)
    graphed, eager = world.new_backend(), world.new_backend()
    layer = world.layer(0)
    warm_up = world.batch(ForwardMode.DECODE, [1] * 3, [700] * 3)
    eager.init_forward_metadata(warm_up)
    run_layer(eager, layer, warm_up, random_rows(3))
    graphed.init_cuda_graph_state(32, 32)
    graphs: dict[int, tuple[Any, torch.Tensor, Stream, torch.Tensor]] = {}
    for size in (32, 7):
        static, ones = random_rows(size), torch.ones(size, dtype=torch.int64, device=DEVICE)
        loc = torch.zeros(size, dtype=torch.int64, device=DEVICE)
        graphed.init_forward_metadata_capture_cuda_graph(
            size, size, ones, ones, None, ForwardMode.DECODE, SpecInfo(1)
        )
        shell = replace(world.batch(ForwardMode.DECODE, (), ()), out_cache_loc=loc)
        if warm:
            run_layer(graphed, layer, shell, static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run_layer(graphed, layer, shell, static)
        graphs[size] = graph, out, static, loc
    for replay, size in enumerate((32, 7, 32, 7)):
        graph, out, static, loc = graphs[size]
        kv_lens = [1 + (137 * b + 500 * replay) % 2000 for b in range(size)]
        batch = world.batch(ForwardMode.DECODE, [1] * size, kv_lens)
        fresh = random_rows(size)
        for name in Stream.__dataclass_fields__:
            getattr(static, name).copy_(getattr(fresh, name))
        loc.copy_(batch.out_cache_loc)
        graphed.init_forward_metadata_replay_cuda_graph(
            size, batch.req_pool_indices, batch.seq_lens, 0, None, ForwardMode.DECODE, SpecInfo(1),
            batch.seq_lens_cpu, loc,
        )  # fmt: skip
        gc.collect()
        torch.cuda.empty_cache()
        graph.replay()
        eager.init_forward_metadata(batch)
        want = run_layer(eager, layer, batch, fresh)
        assert want.isfinite().all()
        assert torch.equal(out, want), (size, replay)


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()
