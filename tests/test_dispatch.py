"""How a kernel is chosen: the first that does not refuse, or the named one, and why not."""

from __future__ import annotations

import pytest
import torch

from topkapi.device import DeviceInfo, device_info, resolve_device
from topkapi.dispatch import Kernel, Op, Problem, Verdict
from topkapi.errors import ConfigError, KernelRefusedError

PROBLEM = Problem("add", DeviceInfo("cuda", arch=80), torch.float32, topk=7)


def needs_sm90(problem: Problem) -> str | None:
    return None if problem.device.arch == 90 else f"needs sm90, this is {problem.device.label}"


def at_most_8(problem: Problem) -> str | None:
    return None if problem.topk <= 8 else f"takes k up to 8, got {problem.topk}"


OP = Op(
    "add",
    (Kernel("hopper", "add", needs_sm90, int), Kernel("small", "add", at_most_8, float)),
)


def test_the_first_that_does_not_refuse() -> None:
    assert OP.choose(PROBLEM).name == "small"
    hopper = Problem("add", DeviceInfo("cuda", arch=90), torch.float32)
    assert OP.choose(hopper).name == "hopper"
    assert OP.choose(hopper, "small").name == "small"


def test_a_named_kernel_that_refuses_is_an_error_and_no_fallback() -> None:
    with pytest.raises(KernelRefusedError, match="hopper: needs sm90, this is sm80"):
        OP.choose(PROBLEM, "hopper")
    with pytest.raises(KernelRefusedError, match="no kernel named 'x'; known: auto, hopper, small"):
        OP.choose(PROBLEM, "x")


def test_every_reason_is_given_when_all_refuse() -> None:
    problem = Problem("add", DeviceInfo("cpu"), torch.float32, topk=9)
    with pytest.raises(KernelRefusedError) as caught:
        OP.choose(problem)
    assert "hopper: needs sm90, this is cpu" in str(caught.value)
    assert "small: takes k up to 8, got 9" in str(caught.value)
    assert OP.explain(problem) == [
        Verdict("hopper", "needs sm90, this is cpu"),
        Verdict("small", "takes k up to 8, got 9"),
    ]


def test_devices() -> None:
    assert device_info(torch.device("cpu")).label == "cpu"
    assert DeviceInfo("hip", arch="gfx942").label == "gfx942"
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="expected auto, cpu or cuda"):
        resolve_device("toaster")
