"""A step of the engine waits for the GPU once: for the tokens it has sampled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from topkapi import LLM, SamplingParams
from topkapi.config import BackendOptions
from topkapi.engine import runner
from topkapi.engine.logprobs import chosen_to_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Of every kind, so that rows with each meet in one batch.
PARAMS = (
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(top_p=0.9, seed=4, max_tokens=5, min_tokens=3, repetition_penalty=1.2),
    SamplingParams(top_k=20, min_p=0.05, seed=5, max_tokens=8, logit_bias={5: 1.0, 9: -3.0},
                   frequency_penalty=0.5, presence_penalty=0.2),
)  # fmt: skip


def prompts(seed: int) -> list[list[int]]:
    """Shorter and longer than k (128), two that begin alike, and one that is computed in chunks."""
    draw = random.Random(seed)
    made = [[draw.randrange(10, 1500) for _ in range(n)] for n in (9, 130, 700, 1500)]
    return [*made, [*made[2], 11, 12, 13]]


def answer(llm: LLM, seed: int) -> list[list[int]]:
    asked = prompts(seed)
    params = [PARAMS[i % len(PARAMS)] for i in range(len(asked))]
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])
def test_whole_steps_wait_for_sampled_tokens_alone(
    kv_cache_dtype: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in chunks, decoding beside it, penalties, filters, masks and a shared prefix."""
    llm = LLM(
        "demo",
        device="cuda",
        dtype="bf16",
        kv_cache_dtype=kv_cache_dtype,
        max_batch_tokens=512,
        cuda_graphs=graphs,
        backend_options=BackendOptions(),
    )
    answer(llm, 1)  # compiles, and captures
    waits = []

    def wait(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            waits.append(len(args[1]))
            return chosen_to_host(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(runner, "chosen_to_host", wait)
    steps = llm.stats().steps
    torch.cuda.set_sync_debug_mode("error")
    try:
        answer(llm, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) >= 9
    assert len(waits) <= llm.stats().steps - steps
