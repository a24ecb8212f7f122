"""What the TileLang record refuses, how it cuts the work, and that nothing imports TileLang."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from topkapi import ops
from topkapi.device import DeviceInfo
from topkapi.dispatch import Problem
from topkapi.errors import KernelRefusedError
from topkapi.kernels.tilelang import sparse_mla as module
from topkapi.kernels.tilelang.sparse_mla import SPARSE_MLA, choose_splits, choose_tile, shared_bytes

HOPPER = DeviceInfo("cuda", 90, "NVIDIA H200", 132, 232448, True)
AMPERE = DeviceInfo("cuda", 80, "A100", 108, 166912, True)
ADA = DeviceInfo("cuda", 89, "L40S", 142, 101376, True)
PROBLEM = Problem("sparse_mla", HOPPER, torch.bfloat16, num_heads=128, latent_dim=512, rope_dim=64)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "version", lambda name: "0.1.15")
    module._refuse_package.cache_clear()
    yield
    module._refuse_package.cache_clear()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": DeviceInfo("cpu")}, "needs an NVIDIA GPU, this is cpu"),
        ({"device": DeviceInfo("hip", "gfx942")}, "needs an NVIDIA GPU, this is gfx942"),
        ({"device": replace(HOPPER, arch=75)}, "needs sm80 or newer, this is sm75"),
        ({"cache_format": "fp32"}, "reads bf16, fp16 and fp8 records, not fp32"),
        ({"dtype": torch.float32}, "wants bfloat16 queries over bf16 records"),
        ({"cache_format": "fp16"}, "wants float16 queries over fp16 records"),
        ({"cache_format": "fp8", "dtype": torch.float16}, "wants bfloat16 queries over fp8"),
        ({"latent_dim": 500}, "multiples of 32, got 500 + 64"),
        ({"rope_dim": 48}, "multiples of 32, got 512 + 48"),
        ({"latent_dim": 544}, "at most 512 + 128 dims, got 544 + 64"),
    ],
)
def test_refusals(changes: dict[str, object], words: str) -> None:
    assert SPARSE_MLA.refuse(PROBLEM) is None
    assert words in str(SPARSE_MLA.refuse(replace(PROBLEM, **changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "words"),
    [(None, "pip install"), ("0.1.14", "0.1.15"), ("0.2.0", "0.2.0"), ("0.1.16+cuda", "")],
)
def test_the_package_and_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    def find(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(module, "version", find)
    module._refuse_package.cache_clear()
    reason = SPARSE_MLA.refuse(PROBLEM)
    module._refuse_package.cache_clear()
    assert (reason is None) == (not words)
    assert words in (reason or "")


def test_a_named_kernel_that_refuses_is_an_error() -> None:
    with pytest.raises(KernelRefusedError, match="tilelang: needs an NVIDIA GPU, this is cpu"):
        ops.sparse_mla(
            torch.zeros(1, 8, 576), torch.zeros(4, 1, 576), torch.zeros(1, 4, dtype=torch.int32),
            scale=1.0, kernel="tilelang",
        )  # fmt: skip


def test_nothing_imports_tilelang() -> None:
    """Neither importing topkapi nor asking every kernel: its import takes seconds."""
    code = (
        "import sys, topkapi, torch\n"
        "from topkapi.kernels import tilelang\n"
        "from topkapi.device import DeviceInfo\n"
        "from topkapi.dispatch import Problem\n"
        "device = DeviceInfo('cuda', 90, 'NVIDIA H200', 132, 232448, True)\n"
        "tilelang.KERNELS[0].refuse(Problem('sparse_mla', device, torch.bfloat16))\n"
        "assert 'tilelang' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("heads", "computed"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (72, 128), (128, 128)]
)
def test_heads_that_fill_up_tiles_are_counted(heads: int, computed: int) -> None:
    problem = replace(PROBLEM, num_heads=heads)
    assert SPARSE_MLA.padded_heads(problem) == computed - heads
    ampere = replace(problem, device=AMPERE)
    assert SPARSE_MLA.padded_heads(ampere) < (16 if heads <= 16 else 32)


@pytest.mark.parametrize("device", [HOPPER, AMPERE, ADA], ids=lambda device: device.label)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [1, 16, 32, 128])
@pytest.mark.parametrize(("latent", "rope"), [(64, 32), (512, 64), (512, 128), (128, 0)])
def test_tiles_fit_in_shared_memory(
    device: DeviceInfo, heads: int, latent: int, rope: int, fp8: bool
) -> None:
    tile = choose_tile(device, heads, latent, rope, fp8)
    used = shared_bytes(tile, latent, rope, fp8)
    if tile.wide:
        # Queries but for their rope, two tiles, two tiles of weights, maxima and marks; barriers.
        used = 2 * 64 * latent + tile.tokens * 2 * (latent + rope) + 2 * 64 * 64 * 2
        used += 4 * 64 * 4 + 1024
    assert tile.wide or tile.tokens // 8 >= tile.threads // 32
    # A program takes 1 KB more than it asks for, and an SM has that much more than one may ask for.
    assert (used + 1024) * tile.per_sm <= device.shared_memory + 1024


def test_registers_of_the_warpgroups_are_there_to_take() -> None:
    """Three warpgroups start with 168 registers a thread each; to take more is to wait for ever."""
    source = (Path(module.__file__).parent / "sparse_mla_wide.py").read_text()
    found = dict(re.findall(r"^(\w+_REGISTERS) = (\d+)$", source, re.MULTILINE))
    compute, gather = int(found["COMPUTE_REGISTERS"]), int(found["GATHER_REGISTERS"])
    assert compute % 8 == gather % 8 == 0
    assert 2 * compute + gather <= 3 * 168


def test_splits_fill_the_device_within_the_budget() -> None:
    wide = choose_tile(HOPPER, 128, 512, 64)
    row_bytes = 4 * 128 * 513
    assert choose_splits(HOPPER, wide, 1, 128, 2048, row_bytes, 2**28) == 16
    assert choose_splits(HOPPER, wide, 8, 128, 2048, row_bytes, 2**28) == 8
    assert choose_splits(HOPPER, wide, 4096, 128, 2048, row_bytes, 2**28) == 1
    assert choose_splits(HOPPER, wide, 8, 128, 2048, row_bytes, 3 * 8 * row_bytes) == 3
    assert choose_splits(HOPPER, wide, 1, 128, 1, row_bytes, 2**28) == 1


def test_slots_become_whole_tiles() -> None:
    slots = torch.tensor([[5, -1, 7]])
    whole = module._whole_tiles(slots, 4)
    assert whole.dtype == torch.int32
    assert whole.tolist() == [[5, -1, 7, -1]]
    assert module._whole_tiles(slots[:, :0], 4).tolist() == [[-1] * 4]
    ready = torch.zeros(2, 8, dtype=torch.int32)
    assert module._whole_tiles(ready, 4).data_ptr() == ready.data_ptr()
