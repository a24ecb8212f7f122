"""Two ranks over NCCL answer as one GPU does, and a killed one is no hang."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from engine.test_parallel import GREEDY, answers, gone, pids_of, prompts_of, save
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams
from topkapi.errors import ParallelError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def make_llm(path: Path, size: int) -> LLM:
    return LLM(
        path,
        device="cuda",
        dtype="fp32",
        page_size=8,
        max_running_requests=8,
        max_batch_tokens=48,
        backend_options=BackendOptions(),
        tensor_parallel_size=size,
        verify_selection=1,
        parallel_timeout=60.0,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("glm_shared", tmp_path_factory.mktemp("glm"), fp8=True)


def test_two_gpus_answer_as_one_and_a_killed_rank_ends_the_run(checkpoint: Path) -> None:
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    one = make_llm(checkpoint, 1)
    # One GPU goes first: it compiles what the ranks, who wait for each other, then find compiled.
    expected = [answers(one, params) for params in (GREEDY, seeded)]
    with make_llm(checkpoint, 2) as two:
        assert [answers(two, params) for params in (GREEDY, seeded)] == expected
        pids = pids_of(two)
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
        endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        with pytest.raises(ParallelError, match="rank 1 was killed by SIGKILL"):
            two.generate(prompts_of((9,) * 8), endless, use_tqdm=False)
        assert gone(pids)
