"""What every peer's record refuses, in words, and how a package is looked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from topkapi.device import DeviceInfo
from topkapi.dispatch import Kernel, Problem
from topkapi.kernels import external
from topkapi.kernels.external import packages
from topkapi.kernels.external.packages import Loaded, Provider, probe, provided_by

H200 = DeviceInfo("cuda", 90, "NVIDIA H200", num_sms=132, shared_memory=232448, has_triton=True)
MI300 = DeviceInfo("hip", "gfx942", "MI300X", num_sms=304, shared_memory=65536, has_triton=True)
CPU = DeviceInfo("cpu")

ATTEND = Problem(
    "sparse_mla", H200, torch.bfloat16, num_heads=128, latent_dim=512, rope_dim=64, topk=2048
)
SCORE = Problem(
    "indexer_logits", H200, torch.float8_e4m3fn, cache_format="fp8", num_heads=64, index_dim=128
)
RANK = Problem("topk", H200, torch.float32, topk=2048)
TAKEN = {
    "flashmla_sparse": ATTEND,
    "flashmla_kv": replace(ATTEND, cache_format="fp8", phase="decode"),
    "fa3": ATTEND,
    "aiter": replace(ATTEND, device=MI300, phase="decode"),
    "deep_gemm": SCORE,
    "sgl_kernel": RANK,
    "vllm": RANK,
    "flashinfer": RANK,
}
KERNELS = external.KERNELS


def problem_of(kernel: Kernel) -> Problem:
    """A problem that nothing but its package stands between and the kernel."""
    return replace(TAKEN[kernel.name], op=kernel.op)


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine where no peer is installed."""
    monkeypatch.setattr(packages, "folder_of", lambda package: None)
    probe.cache_clear()
    yield
    probe.cache_clear()


def named(kernel: Kernel) -> str:
    return f"{kernel.op}-{kernel.name}"


@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_without_its_package(kernel: Kernel, no_packages: None) -> None:
    reason = kernel.reason(problem_of(kernel))
    assert reason is not None
    assert "needs the package" in reason
    assert reason.endswith("; not installed")
    assert kernel.peer


@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_a_cpu_is_refused_before_any_package_is_looked_for(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(package: str) -> None:
        raise AssertionError(package)

    monkeypatch.setattr(packages, "folder_of", looked)
    reason = kernel.reason(replace(problem_of(kernel), device=CPU))
    assert reason is not None
    assert reason.endswith("this is cpu")


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("flashmla_sparse", {"device": replace(H200, arch=80)}, "needs sm90, this is sm80"),
    ("flashmla_sparse", {"dtype": torch.float32}, "takes bf16 queries, got float32"),
    ("flashmla_sparse", {"latent_dim": 128, "rope_dim": 32}, r"512 \+ 64 dims, got 128 \+ 32"),
    ("flashmla_sparse", {"num_heads": 129}, "at most 128 heads, got 129"),
    ("flashmla_sparse", {"features": frozenset({"logit_cap"})}, "has no logit cap"),
    ("flashmla_sparse", {"cache_format": "fp32"}, "reads bf16 or fp8 records, got fp32"),
    ("flashmla_kv", {"cache_format": "bf16"}, "reads fp8 records of 656 bytes, got bf16"),
    ("flashmla_kv", {"device": replace(H200, arch=100)}, "needs sm90, this is sm100"),
    ("flashmla_kv", {"num_heads": 256}, "at most 128 heads, got 256"),
    ("flashmla_kv", {"rows": 11623}, "schedules at most 11622 rows, got 11623"),
    ("fa3", {"device": replace(H200, arch=120)}, "needs sm90, this is sm120"),
    ("fa3", {"cache_format": "fp8"}, "takes bf16 queries and bf16 records, got bfloat16 and fp8"),
    ("fa3", {"dtype": torch.float16}, "got float16 and bf16"),
    ("fa3", {"rope_dim": 0}, r"takes 512 \+ 64 dims, got 512 \+ 0"),
    ("fa3", {"features": frozenset({"sinks"})}, "no attention sinks"),
    ("fa3", {"topk": 0}, "at least one entry"),
    ("aiter", {"device": replace(MI300, arch="gfx90a")}, "gfx942 or gfx950, this is gfx90a"),
    ("aiter", {"num_heads": 64}, "takes 16 or 128 heads, got 64"),
    ("aiter", {"phase": "prefill"}, "is a decode kernel"),
    ("aiter", {"features": frozenset({"logit_cap"})}, "neither attention sinks nor a logit cap"),
    ("aiter", {"dtype": torch.float32}, "got float32 and bf16"),
    ("deep_gemm", {"dtype": torch.bfloat16}, "takes e4m3 queries .*, got bfloat16"),
    ("deep_gemm", {"cache_format": "bf16"}, "reads fp8 keys, got bf16"),
    ("deep_gemm", {"num_heads": 16}, "takes 32 or 64 heads of 128, got 16 of 128"),
    ("deep_gemm", {"index_dim": 64}, "got 64 of 64"),
    ("deep_gemm", {"device": replace(H200, arch=89)}, "needs sm90 or sm100, this is sm89"),
    ("sgl_kernel", {"topk": 64}, "selects 2048, got 64"),
    ("vllm", {"device": MI300}, "needs an NVIDIA GPU, this is gfx942"),
    ("flashinfer", {"features": frozenset({"starts"})}, "from their first column alone"),
    ("flashinfer", {"capture": True}, "is not captured in a graph"),
]


@pytest.mark.parametrize(("name", "changes", "match"), REFUSALS)
def test_what_cannot_be_taken(name: str, changes: dict[str, Any], match: str) -> None:
    for kernel in KERNELS:
        if kernel.name == name:
            problem = replace(problem_of(kernel), **changes)
            with pytest.raises(AssertionError, match=match):
                raise AssertionError(kernel.reason(problem))


@pytest.mark.parametrize(("package", "taken"), [("flash_mla", True), ("sgl_kernel", False)])
def test_sinks_depend_on_the_build(
    package: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "probe", lambda providers: Loaded(None, package, "1.0"))
    (kernel,) = (one for one in KERNELS if one.name == "flashmla_kv")
    problem = problem_of(kernel)
    assert kernel.reason(problem) is None
    reason = kernel.reason(replace(problem, features=frozenset({"sinks"})))
    assert (reason is None) == taken
    assert taken or "no attention sinks in the build of sgl_kernel" in str(reason)


@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_deterministic_steps_take_no_peer(kernel: Kernel) -> None:
    problem = replace(problem_of(kernel), features=frozenset({"batch_invariant"}))
    assert "deterministic=True forbids" in str(kernel.reason(problem))


def test_a_package_that_does_not_load_is_a_reason_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_peer").mkdir()
    (tmp_path / "broken_peer" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_peer" / "lib_C.so").write_bytes(b"not a library")
    asked: list[str] = []

    def load() -> Any:
        asked.append("load")
        packages.load_library("broken_peer", "lib*.so")

    def missing() -> Any:
        packages.load_library("broken_peer", "absent*.so")

    providers = (Provider("broken_peer", ("broken-peer",), load), Provider("no_peer", (), load))
    first = probe(providers)
    assert isinstance(first, str)
    assert first.startswith("broken_peer unknown version does not load: ")
    assert probe(providers) is first
    assert asked == ["load"], "a package is tried once"
    absent = probe((Provider("broken_peer", ("broken-peer",), missing),))
    assert absent == "broken_peer unknown version does not load: no absent*.so in it"
    assert provided_by(providers)() is None
    working = (*providers[:1], Provider("broken_peer", ("no-such", "pytest"), lambda: 5))
    assert probe(working) == Loaded(5, "broken_peer", pytest.__version__)
    assert provided_by(working)() == f"broken_peer {pytest.__version__}"


def test_importing_and_explaining_imports_no_peer() -> None:
    code = """
import sys
from topkapi.device import DeviceInfo
from topkapi.dispatch import Problem
from topkapi.ops.registry import OPS
import torch
for name, op in OPS.items():
    op.explain(Problem(name, DeviceInfo("cpu"), torch.float32))
peers = {"flash_mla", "sgl_kernel", "vllm", "deep_gemm", "flashinfer", "aiter"}
sys.exit(", ".join(peers & set(sys.modules)) or None)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
