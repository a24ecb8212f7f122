"""Steps replayed as CUDA graphs: the tokens of eager steps, and no graph where none can be."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from peers.tiny_models import BY_NAME
from topkapi.bench.random_model import random_model
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
LENGTHS = (1, 7, 20, 33, 64, 90, 120, 5, 9, 70)


def prompts(vocab: int = 90) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in LENGTHS]


def tiny(name: str, dtype: torch.dtype, **options: Any) -> LLM:
    model = BY_NAME[name].build(dtype).cuda()
    return LLM(model, **{"page_size": 8, "max_running_requests": 8, **options})


def answers(llm: LLM, params: SamplingParams = PARAMS) -> list[tuple[list[int], list[float]]]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(LENGTHS)
    return [(o.token_ids, [item.logprob for item in o.logprobs or []]) for o in outputs]


@pytest.fixture(autouse=True)
def healthy() -> Iterator[None]:
    """After each test the device works, captures, and no memory of graphs is left."""
    yield
    gc.collect()
    torch.cuda.synchronize()
    x = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 3
    graph.replay()
    assert y.sum().item() == 192
    del graph, y
    gc.collect()
    torch.cuda.empty_cache()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    assert pools <= {(0, 0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["deepseek_v32_yarn", "glm_shared", "axk2"])
def test_deterministic_bits_are_those_of_eager_steps(name: str, dtype: torch.dtype) -> None:
    options = {"backend_options": BackendOptions(deterministic=True)}
    llm = tiny(name, dtype, **options)
    got, stats = answers(llm), llm.stats().graphs
    assert not stats.off
    assert stats.num_graphs >= 2
    assert stats.num_replays > 15
    assert stats.pool_bytes > 0
    assert stats.static_bytes > 0
    assert got == answers(tiny(name, dtype, cuda_graphs=False, **options))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_demo_tokens_are_those_of_eager_steps(steps: int) -> None:
    def make(**options: Any) -> LLM:
        return LLM(
            "demo",
            device="cuda",
            dtype="fp32",
            max_tokens_in_cache=32768,
            max_running_requests=8,
            speculative_num_steps=steps,
            **options,
        )

    graphed = make()
    got, stats = answers(graphed), graphed.stats().graphs
    assert not stats.off
    assert stats.num_graphs >= (2 if not steps else 4)
    eager = make(cuda_graphs=False)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in answers(eager)]
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)
    got, want = answers(graphed, drawn), answers(eager, drawn)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]


def test_fp8_bits_are_those_of_eager_steps() -> None:
    got = []
    for graphs in (True, False):
        llm = LLM(
            "demo",
            device="cuda",
            dtype="bf16",
            kv_cache_dtype="fp8",
            max_tokens_in_cache=4096,
            max_running_requests=8,
            host_cache_tokens=4096,
            speculative_num_steps=2,
            backend_options=BackendOptions(deterministic=True),
            cuda_graphs=graphs,
        )
        got += [answers(llm)]
        assert bool(llm.stats().graphs.off) != graphs
    assert got[0] == got[1]


def test_contexts_that_never_choose() -> None:
    """Nothing is longer than the demo model's k, so that captured steps do not score at all."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    got = []
    for graphs in (True, False):
        llm = LLM("demo", device="cuda", dtype="fp32", max_context_len=128, cuda_graphs=graphs)
        outputs = llm.generate(prompts()[:6], params, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * 6
        got.append([output.token_ids for output in outputs])
    assert got[0] == got[1]


def test_a_model_of_real_sizes_gives_the_bits_of_eager_steps_of_the_same_size() -> None:
    """Four requests are a size that is captured, so that nothing but replaying differs."""
    rng = random.Random(9)
    long = [[rng.randrange(10, 8000) for _ in range(2300 + 7 * i)] for i in range(4)]
    got = []
    for graphs in (True, False):
        model = random_model("cuda", num_hidden_layers=2)
        llm = LLM(
            model,
            max_tokens_in_cache=16384,
            max_context_len=4096,
            max_running_requests=4,
            enable_prefix_cache=False,
            max_batch_tokens=16384,
            cuda_graphs=graphs,
        )
        outputs = llm.generate(long, PARAMS, use_tqdm=False)
        got.append([(o.token_ids, [item.logprob for item in o.logprobs or []]) for o in outputs])
        assert llm.stats().graphs.num_replays == (15 if graphs else 0), llm.stats().graphs
    assert got[0] == got[1]


def test_what_cannot_be_captured_runs_eagerly_and_is_said_once() -> None:
    llm = tiny("deepseek_v32", torch.float32)
    mlp = llm.model.model.layers[1].mlp
    mlp.register_forward_hook(lambda _module, _args, out: out + (out.sum().item() > 1e30))
    with pytest.warns(RuntimeWarning, match="cannot be captured") as said:
        got = answers(llm)
    assert len([item for item in said if "captured" in str(item.message)]) == 1
    assert "synchroniz" in llm.stats().graphs.off
    assert "test_engine_graphs.py" in llm.stats().graphs.off
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in got]
    plain = answers(tiny("deepseek_v32", torch.float32, cuda_graphs=False))
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in got]


def test_a_capture_that_fails_halfway_leaves_nothing_behind() -> None:
    """What only a capture refuses is not found by the warm-up."""
    llm = tiny("deepseek_v32", torch.float32)
    mlp = llm.model.model.layers[1].mlp

    def breaks(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.set_sync_debug_mode("default")
            out.cpu()
        return out

    mlp.register_forward_hook(breaks)
    before = torch.cuda.memory_allocated()
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        answers(llm)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    gc.collect()
    torch.cuda.empty_cache()
    stats = llm.stats().graphs
    assert (stats.num_graphs, stats.pool_bytes) == (0, 0)
    assert "test_engine_graphs.py" in stats.off  # where the wait was, not where the capture ended
    # A workspace for matrix products stays for either stream, 32 MiB each on sm90.
    assert torch.cuda.memory_allocated() - before < 2**20 + 2 * 2**25


def test_a_step_waits_for_the_sampled_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny("deepseek_v32", torch.bfloat16)
    answers(llm)
    runner = llm.engine._runner
    replays = runner.graph_stats().num_replays
    sample = runner._sampler.sample

    def until_sampled(*args: Any) -> Any:
        found = sample(*args)
        torch.cuda.set_sync_debug_mode("default")
        return found

    compute = runner._compute

    def from_the_start(*args: Any) -> Any:
        if replays:
            torch.cuda.set_sync_debug_mode("error")
        return compute(*args)

    monkeypatch.setattr(runner, "_compute", from_the_start)
    monkeypatch.setattr(runner._sampler, "sample", until_sampled)
    try:
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outputs[0].error is None
    assert runner.graph_stats().num_replays > replays
