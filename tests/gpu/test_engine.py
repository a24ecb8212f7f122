"""The engine's own device work on a GPU: pages to page-locked memory and back, timing by events."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.tiny_models import BY_NAME
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
