"""The kernel that compacts a selection: it compiles, and gives what plain torch gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = """
import torch
from topkapi.kernels.external.compaction import compact
from topkapi.kernels.external.selected import compacted

generator = torch.Generator().manual_seed(0)
for rows, width in ((1, 1), (4, 5), (3, 1024), (2, 1025), (3, 2048)):
    slots = torch.randint(0, 999, (rows, width), generator=generator)
    slots = torch.where(torch.rand(rows, width, generator=generator) < 0.5, -1, slots)
    slots[0] = -1
    for wanted in (slots.int(), slots, slots.int().t().contiguous().t()):
        for got, want in zip(compact(wanted), compacted(wanted), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want), (rows, width)
"""


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(
        [sys.executable, "-c", CODE], check=False, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
