"""Which kernels are listed, what they refuse, and what `explain` says of them."""

from __future__ import annotations

import pytest
import torch

from topkapi import ops
from topkapi.device import DeviceInfo
from topkapi.dispatch import Problem
from topkapi.errors import KernelRefusedError
from topkapi.ops.registry import NAMES, OPS, problem_for

CPU = DeviceInfo(backend="cpu")


def test_every_public_operation_has_a_torch_kernel_last() -> None:
    assert set(OPS) == set(NAMES) == set(ops.__all__)
    for name, op in OPS.items():
        assert op.kernels[-1].name == "torch"
        assert all(kernel.op == name for kernel in op.kernels)
        assert len({kernel.name for kernel in op.kernels}) == len(op.kernels)


def test_the_registry_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        OPS["topk"] = OPS["select"]  # type: ignore[index]


@pytest.mark.parametrize("name", ["indexer_logits", "topk", "select"])
def test_kernels_that_synchronise_refuse_capture(name: str) -> None:
    problem = Problem(name, CPU, torch.float32, topk=64, capture=True)
    with pytest.raises(KernelRefusedError, match="torch: synchronises with the host"):
        OPS[name].choose(problem, "torch")


@pytest.mark.parametrize("name", ["sparse_mla", "write_latent", "write_index_key", "gather_latent"])
def test_the_others_may_be_captured(name: str) -> None:
    problem = Problem(name, CPU, torch.float32, capture=True)
    assert OPS[name].choose(problem, "torch").name == "torch"


def test_explain_gives_a_reason_for_every_kernel() -> None:
    for name, op in OPS.items():
        lines = op.explain(Problem(name, CPU, torch.float32, topk=64))
        assert {line.kernel for line in lines} == {kernel.name for kernel in OPS[name].kernels}
        usable = [line.kernel for line in lines if line.reason is None]
        assert usable == ["torch"]


def test_a_problem_describes_the_call() -> None:
    problem = problem_for("topk", torch.zeros(2, 3), topk=5, features=frozenset({"starts"}))
    assert problem == Problem(
        "topk", problem.device, torch.float32, topk=5, features=frozenset({"starts"})
    )
    assert problem.device.backend == "cpu"
    assert not problem.capture
