"""What scoring and selecting hold at a time stays within the budget, however small it is."""

from __future__ import annotations

import pytest

from topkapi.device import DeviceInfo

pytest.importorskip("triton")

from topkapi.kernels.triton.select import choose_block_rows
from topkapi.kernels.triton.topk import choose_plan, workspace_bytes

H200 = DeviceInfo("cuda", 90, "NVIDIA H200", num_sms=132, shared_memory=232448, has_triton=True)
MIB = 2**20


@pytest.mark.parametrize("budget", [2**16, 8 * MIB, 32 * MIB, 100 * MIB, 256 * MIB])
@pytest.mark.parametrize("width", [4096, 8256, 32768, 65536, 2**20])
@pytest.mark.parametrize("k", [64, 2048, 16384])
def test_logits_and_candidates_fit(budget: int, width: int, k: int) -> None:
    for rows in (1, 65, 300, 4096):
        block = choose_block_rows(H200, rows, width, k, budget)
        assert 1 <= block <= rows
        for size in {block, rows % block or block}:
            lists = workspace_bytes(choose_plan(H200, size, width, k), width)
            assert block == 1 or 4 * width * block + lists <= budget, (rows, block, size)


def test_a_large_budget_is_used() -> None:
    assert choose_block_rows(H200, 4096, 65536, 2048, 256 * MIB) == 768
    assert choose_block_rows(H200, 64, 65536, 2048, 256 * MIB) == 64
