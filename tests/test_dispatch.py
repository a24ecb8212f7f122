"""How a kernel is chosen: the first that does not refuse, or the named one, and why not."""

from __future__ import annotations

import pytest
import torch

from topkapi.device import DeviceInfo, device_info, resolve_device
from topkapi.dispatch import Kernel, Op, Problem, Verdict
from topkapi.errors import ConfigError, KernelRefusedError
from topkapi.ops.registry import OPS

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


def test_heads_that_only_fill_a_tile_are_counted() -> None:
    def in_blocks(problem: Problem) -> int:
        return -(-problem.num_heads // 64) * 64

    kernel = Kernel("wide", "add", lambda problem: None, print, heads_computed=in_blocks)
    wide = Op("add", (kernel,))
    for heads, padded in ((8, 56), (64, 0), (65, 63), (128, 0)):
        problem = Problem("add", DeviceInfo("cpu"), torch.float32, num_heads=heads)
        assert wide.explain(problem) == [Verdict("wide", None, padded)]


@pytest.mark.parametrize(("heads", "padded"), [(1, 15), (8, 8), (16, 0), (24, 8), (128, 0)])
def test_sparse_mla_computes_sixteen_heads_or_more(heads: int, padded: int) -> None:
    hopper = DeviceInfo("cuda", 90, "H200", num_sms=132, shared_memory=232448, has_triton=True)
    problem = Problem(
        "sparse_mla", hopper, torch.bfloat16, num_heads=heads, latent_dim=512, rope_dim=64
    )
    verdicts = {item.kernel: item for item in OPS["sparse_mla"].explain(problem)}
    assert verdicts["triton"] == Verdict("triton", None, padded)
    assert verdicts["hopper"] == Verdict("hopper", None, padded)
    assert verdicts["torch"] == Verdict("torch", None, 0)


def test_devices() -> None:
    assert device_info(torch.device("cpu")).label == "cpu"
    assert DeviceInfo("hip", arch="gfx942").label == "gfx942"
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="expected auto, cpu or cuda"):
        resolve_device("toaster")
