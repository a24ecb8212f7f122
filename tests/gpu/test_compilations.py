"""What a GPU compiles: after a few shapes of every kind, no length and no batch size adds to it."""

from __future__ import annotations

import importlib
import pkgutil
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.world import Stream, World, run_layer
from gpu.test_graph_layer import REAL
from topkapi.attention import ForwardMode
from topkapi.config import BackendOptions
from topkapi.kernels import hopper as hopper_kernels
from topkapi.kernels import triton as triton_kernels

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MOST_CONTEXT = 16384
QUERIES = {ForwardMode.DECODE: 1, ForwardMode.TARGET_VERIFY: 4}
# Every width of a selection, which grows by 64 up to k, and contexts longer than k.
CONTEXTS = (*range(64, 2049, 64), 2049, 4100, 8200, MOST_CONTEXT)


def kernels() -> dict[str, Any]:
    """Every kernel of both packages by its module and name, those that others call included."""
    found = {}
    for package in (hopper_kernels, triton_kernels):
        for item in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{item.name}")
            for name, value in vars(module).items():
                if isinstance(value, triton.runtime.jit.JITFunction):
                    found[f"{value.__module__.split('.kernels.')[1]}.{name}"] = value
    return found


def compiled() -> dict[str, int]:
    """How often each kernel has been compiled in this process."""
    return {name: len(kernel.device_caches[0][0]) for name, kernel in kernels().items()}


def random_rows(rows: int, heads: int) -> Stream:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, device="cuda", dtype=torch.bfloat16)

    weights = torch.randn(rows, 64, device="cuda") / 90
    return Stream(normal(heads, 576), normal(576), normal(64, 128), normal(128), weights)


@pytest.mark.parametrize(
    ("heads", "kv_cache_dtype", "attention"),
    [(128, "fp8", "hopper"), (16, "bf16", "hopper"), (16, "fp8", "triton")],
)
def test_fifty_lengths_compile_nothing(heads: int, kv_cache_dtype: str, attention: str) -> None:
    """Whole layers: step metadata, writes, scoring, selection and attention of every mode."""
    if attention == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm90")
    options = BackendOptions(
        prefill_kernel=attention, decode_kernel=attention, indexer_kernel="triton"
    )
    world = World(
        config=replace(REAL, num_attention_heads=heads),
        requests=8,
        max_context=MOST_CONTEXT,
        kv_cache_dtype=kv_cache_dtype,
        device="cuda",
        options=options,
    )

    def step(mode: ForwardMode, q_lens: list[int], kv_lens: list[int]) -> None:
        batch = world.batch(mode, q_lens, kv_lens)
        world.backend.init_forward_metadata(batch)
        run_layer(world.backend, world.layer(0), batch, random_rows(sum(q_lens), heads))

    def run(mode: ForwardMode, draw: random.Random, requests: int, longest: int) -> None:
        q_lens = [QUERIES.get(mode) or draw.randint(33, 500) for _ in range(requests)]
        kv_lens = [draw.randint(1, longest) for _ in range(requests)]
        kv_lens[0] = longest
        pairs = zip(q_lens, kv_lens, strict=True)
        step(mode, q_lens, [min(max(q, n), MOST_CONTEXT) for q, n in pairs])

    draw = random.Random(0)
    modes = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
    for mode in modes:
        for requests in range(1, 9):
            for longest in CONTEXTS:
                run(mode, draw, requests, longest)
    before = compiled()
    for mode in modes:
        for _ in range(50):
            run(mode, draw, draw.randint(1, 8), draw.randint(1, MOST_CONTEXT))
    print(heads, kv_cache_dtype, {name: count for name, count in before.items() if count})
    assert compiled() == before
    used = {name.rsplit(".", 1)[0] for name, count in before.items() if count}
    modules = ("step_metadata", "records", "indexer_logits", "indexer_decode", "topk")
    assert {f"triton.{name}" for name in modules} <= used
    home = {"hopper": "hopper.attend", "triton": "triton.sparse_mla"}[attention]
    assert any(name.startswith(home) for name in used)
    # The few that there are: a power of two that grows with the shape, and whether rows are split.
    assert max(before.values()) <= 40
