"""The small kernels around peers' calls give what plain torch gives, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPACTION = """
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
EDGES = """
import torch
from cases import SelectCase
from topkapi.kernels.external import deep_gemm
from topkapi.kernels.external.deep_gemm_edges import finish, page_table, spoiled_weights
from topkapi.layout.index_key import fp8_page_views

for values in ("normal", "nan key", "nan row"):
    case = SelectCase("", (1, 0, 1, 1), (70, 0, 1300, 64), heads=3, cache=torch.uint8,
                      values=values, padded_rows=1)
    inputs = case.make(dtype=torch.float8_e4m3fn)
    context = inputs["context"]
    pages = page_table(context, slice(0, 4), 64)
    assert torch.equal(pages, deep_gemm._page_table(context, slice(0, 4)))
    assert torch.equal(pages[1:3], page_table(context, slice(1, 3), 64))
    q, weights = inputs["q"], inputs["weights"]
    got, want = spoiled_weights(q, weights), deep_gemm._spoiled(q, weights)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert values != "nan row" or got[1].isnan().any()
    scales = fp8_page_views(inputs["index_cache"], 128, 64)[1]
    logits = torch.full((4, 1400), 5.0)
    for fill in (True, False):
        for paged in (True, False):
            one, other = logits.clone()[:, :1300], logits.clone()[:, :1300]
            given = {"pages": pages, "scales": scales} if paged else {}
            finish(one, context.lengths, deep_gemm.SPOILED, fill=fill, **given)
            deep_gemm._finish(other, context.lengths, *(given.values() or (None, None)), fill)
            inside = torch.arange(1300) < context.lengths[:, None]
            if fill:
                assert torch.equal(one == -float("inf"), other == -float("inf"))
            assert torch.equal(one[inside].isnan(), other[inside].isnan())
            assert paged and values == "nan key" or not one[inside].isnan().any()
"""


@pytest.mark.parametrize("code", [COMPACTION, EDGES], ids=["compaction", "deep_gemm_edges"])
def test_in_the_interpreter(code: str) -> None:
    pytest.importorskip("triton")
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
