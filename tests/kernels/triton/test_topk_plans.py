"""Which launch does a top-k get on an H200, and is it one that the kernels can hold?"""

from __future__ import annotations

import pytest

from topkapi.device import DeviceInfo

pytest.importorskip("triton")

from topkapi.kernels.triton.topk import WORKSPACE_BYTES, choose_plan, workspace_bytes

H200 = DeviceInfo("cuda", 90, "NVIDIA H200", num_sms=132, shared_memory=232448, has_triton=True)


@pytest.mark.parametrize(
    ("rows", "width", "k", "splits"),
    [
        (1, 32769, 2048, 32),
        (4, 262144, 4096, 32),
        (5, 65536, 2048, 16),
        (8, 262144, 64, 16),
        (1, 32768, 2048, 0),
        (1, 262145, 2048, 0),
        (1, 65536, 4097, 0),
        (9, 65536, 2048, 0),
    ],
)
def test_few_long_rows_have_kernels_of_their_own(
    rows: int, width: int, k: int, splits: int
) -> None:
    plan = choose_plan(H200, rows, width, k)
    assert plan.few == bool(splits)
    assert (plan.splits, plan.programs) == (splits, rows * splits) or not splits


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 64, 4096])
@pytest.mark.parametrize("width", [1, 8192, 8193, 32768, 32769, 262144, 2**20])
@pytest.mark.parametrize("k", [1, 2048, 4096, 4097, 65536])
def test_what_a_program_holds(rows: int, width: int, k: int) -> None:
    plan = choose_plan(H200, rows, width, k)
    assert workspace_bytes(plan, width) <= max(WORKSPACE_BYTES, 2 * 2**20)
    if plan.few:
        # Two counts ride in one sum, and a stretch has a share of four places at the least.
        assert max(plan.held, plan.sample) < 2**15
        assert plan.held // plan.splits >= 4
