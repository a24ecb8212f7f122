"""The programs as TileLang lowers them, without a GPU: one lowering for each kind of record."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest

from topkapi.device import DeviceInfo
from topkapi.kernels.tilelang.sparse_mla import PASSES, choose_tile, shared_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang"),
]
HOPPER = DeviceInfo("cuda", 90, "NVIDIA H200", 132, 232448, True)
ADA = DeviceInfo("cuda", 89, "L40S", 142, 101376, True)


def source_of(program: Any, arch: str) -> str:
    import tilelang

    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": arch})
    context = tilelang.tvm.transform.PassContext(opt_level=3, config=PASSES)
    with target, context:
        return str(tilelang.lower(program, target=target).kernel_source)


def shared_end(source: str) -> int:
    """The highest offset into shared memory that a buffer starts at."""
    return max(int(offset) for offset in re.findall(r"buf_dyn_shmem \+ (\d+)", source))


def test_wide() -> None:
    from topkapi.kernels.tilelang.sparse_mla_wide import attend_wide

    source = source_of(attend_wide(128, 512, 64, "bfloat16", False, False, False), "sm_90a")
    assert source.count("wgmma_ss<") == 2 * 3
    assert source.count("wgmma_rs<") == 2 * 2
    assert source.count("cp_async_gs_conditional<16>") == 6
    # A barrier of the whole block behind the parting of the warpgroups would never be passed.
    parted = source.index("warpgroup_reg_alloc")
    assert "__syncthreads" in source[:parted]
    assert "__syncthreads" not in source[parted:]
    # Weights of one tile stand last; barriers take 1 KB beside it all.
    assert shared_end(source) + 64 * 64 * 2 + 1024 <= HOPPER.shared_memory


@pytest.mark.parametrize("device", [HOPPER, ADA], ids=lambda device: device.label)
@pytest.mark.parametrize(
    ("heads", "latent", "rope", "record_bytes"),
    [(8, 512, 64, 0), (32, 512, 64, 656), (5, 96, 0, 0), (20, 128, 32, 196), (32, 512, 128, 0)],
)
def test_narrow(device: DeviceInfo, heads: int, latent: int, rope: int, record_bytes: int) -> None:
    from topkapi.kernels.tilelang.sparse_mla_narrow import attend_narrow

    tile = choose_tile(device, heads, latent, rope, record_bytes > 0)
    program = attend_narrow(
        heads, latent, rope, "bfloat16", True, True, True,
        tile.heads, tile.tokens, tile.stages, tile.threads, record_bytes,
    )  # fmt: skip
    source = source_of(program, "sm_90a" if device is HOPPER else "sm_89")
    assert "cp_async_gs_conditional<" in source
    assert shared_end(source) < shared_bytes(tile, latent, rope, record_bytes > 0)


def test_combine() -> None:
    from topkapi.kernels.tilelang.sparse_mla_narrow import combine

    assert "exp2" in source_of(combine(24, 160, "float16", True), "sm_80")
