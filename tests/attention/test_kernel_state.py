"""Who owns what a kernel keeps for a step's layers? The step's buffers: no two graphs share it."""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.world import World
from topkapi.attention import ForwardMode, SpecInfo
from topkapi.attention.step_metadata import allocate_steps
from topkapi.device import DeviceInfo
from topkapi.dispatch import Kernel, Problem
from topkapi.ops.sparse_mla import _options


def test_each_graph_has_its_own_and_keeps_it_over_replays() -> None:
    world = World()
    backend = world.backend
    backend.init_cuda_graph_state(4, 4)
    captured = {}
    for size in (2, 3):
        ones = torch.ones(size, dtype=torch.int64)
        backend.init_forward_metadata_capture_cuda_graph(
            size, size, ones, ones, None, ForwardMode.DECODE, SpecInfo(1)
        )
        captured[size] = backend.metadata.flashmla_metadata
        captured[size]["schedule"] = size
    assert captured[2] is not captured[3]
    for size in (3, 2, 3):
        ones = torch.ones(size, dtype=torch.int64)
        backend.init_forward_metadata_replay_cuda_graph(
            size, ones, ones, 0, None, ForwardMode.DECODE, SpecInfo(1), ones
        )
        assert backend.metadata.flashmla_metadata is captured[size]
        assert backend.metadata.flashmla_metadata == {"schedule": size}


def test_an_eager_step_begins_with_nothing() -> None:
    world = World()
    batch = world.batch(ForwardMode.DECODE, (1, 1), (9, 5))
    world.backend.init_forward_metadata(batch)
    first = world.backend.metadata.flashmla_metadata
    first["schedule"] = 1
    world.backend.init_forward_metadata(batch)
    assert world.backend.metadata.flashmla_metadata == {}


def test_draft_steps_share_none() -> None:
    states = [step.kernel_state for step in allocate_steps(3, 2, 4, torch.device("cpu"))]
    states[0]["schedule"] = 1
    assert states[1:] == [{}, {}]
    states[1]["schedule"] = 2
    assert states[2] == {}


def test_state_is_prepared_once_for_each_shape() -> None:
    made: list[Problem] = []

    def prepare(problem: Problem) -> object:
        made.append(problem)
        return object()

    kernel = Kernel("keeps", "sparse_mla", lambda problem: None, print, prepare=prepare)
    problem = Problem("sparse_mla", DeviceInfo("cpu"), torch.bfloat16, rows=4, topk=64)
    state: dict[object, object] = {}
    first = _options(kernel, problem, False, state)
    assert _options(kernel, problem, False, state)["prepared"] is first["prepared"]
    other = _options(kernel, replace(problem, rows=5), True, state)
    assert other["prepared"] is not first["prepared"]
    assert other["batch_invariant"] is True
    assert len(made) == 2
    assert _options(kernel, problem, False, None) == {}
    plain = Kernel("plain", "sparse_mla", lambda problem: None, print)
    assert _options(plain, problem, False, state) == {}
