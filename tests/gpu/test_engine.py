"""The engine's own device work on a GPU: pages to page-locked memory and back, timing by events."""

from __future__ import annotations

import json
import random
from pathlib import Path
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

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)


def make(**options: Any) -> LLM:
    model = BY_NAME["deepseek_v32_yarn"].build().cuda()
    deterministic = BackendOptions(deterministic=True)
    return LLM(model, **{"page_size": 8, "backend_options": deterministic, **options})


def talk(llm: LLM) -> list[Any]:
    """Three turns of five conversations, whose contexts are larger than a cache of 160 tokens."""
    rng = random.Random(0)
    said: list[list[int]] = [[] for _ in range(5)]
    answers = []
    for _ in range(3):
        said = [[*item, *(rng.randrange(3, 90) for _ in range(30))] for item in said]
        outputs = llm.generate(said, GREEDY, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * 5
        said = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        answers += [output.logprobs for output in outputs]
    return answers


def test_pages_come_back_from_page_locked_memory_bit_for_bit() -> None:
    small = make(max_tokens_in_cache=160, host_cache_tokens=4000)
    assert talk(small) == talk(make(enable_prefix_cache=False))
    assert small.stats().cache.restored_pages > 20


def test_a_trace_is_timed_by_events(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    llm = make(trace=file, selection_stats_every=2)
    talk(llm)
    spans = [event for event in json.loads(file.read_text()) if event["ph"] == "X"]
    assert all(span["dur"] >= 0 for span in spans)
    assert llm.stats().seconds["attention"] > 0
    assert {layer.layer_id for layer in llm.stats().selection} == {0, 1, 2}


def test_bits_at_real_sizes() -> None:
    """Two layers of DeepSeek-V3.2's: prompts alone and module by module, and together, in chunks,
    behind a shared prefix and from graphs. Norms over 7168 show what small models do not.
    """
    rng = random.Random(1)
    shared = [rng.randrange(3, 1000) for _ in range(2240)]
    prompts = [[*shared, *(rng.randrange(3, 1000) for _ in range(n))] for n in (5, 300, 900, 1)]
    prompts.append(shared[:40])
    model = random_model("cuda", num_hidden_layers=2, vocab_size=1000)
    answers = []
    for options in (
        {"max_running_requests": 1, "enable_prefix_cache": False, "cuda_graphs": False},
        {"max_running_requests": 8, "max_batch_tokens": 700},
    ):
        deterministic = BackendOptions(deterministic=True)
        llm = LLM(model, max_tokens_in_cache=20000, backend_options=deterministic, **options)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * 5
        answers.append([output.logprobs for output in outputs])
    assert llm.stats().cache.found_tokens >= 3 * 2240
    assert llm.stats().graphs.num_replays > 0
    assert answers[0] == answers[1]
