"""When long contexts are scored in tiles of 384 keys on sm90, and what its machine code must be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton.aot import SHARED_MEMORY, compile_for, machine_code
from kernels.triton.test_aot import BF16, E4M3, F32, FP8, Recorder, device_of, meta, meta_context
from topkapi.kernels.triton import indexer_logits
from topkapi.kernels.triton.indexer_logits import LONG, fits_long, launch_scores
from topkapi.kernels.triton.indexer_logits_long import rows_of

# Bytes of stack a thread that the kernel may use: a few places, of some seven hundred instructions.
STACK = 192


def launches(
    monkeypatch: pytest.MonkeyPatch,
    *,
    arch: int = 90,
    heads: int = 64,
    dtype: torch.dtype = E4M3,
    cache: torch.dtype = FP8,
    width: int = 65536,
    longest_q: int = 4096,
    fill: bool = True,
) -> dict[str, Any]:
    """What is launched to score 4096 rows, by the kernel's name."""
    recorders = []
    for name in ("_score", "_score_stream", "_score_sm90", "_score_long"):
        recorders.append(Recorder(getattr(indexer_logits, name)))
        monkeypatch.setattr(indexer_logits, name, recorders[-1])
    monkeypatch.setattr(indexer_logits, "target_of", lambda tensor: device_of(arch))
    launch_scores(
        meta(4096, heads, 128, dtype=dtype),
        meta(4096, heads, dtype=F32),
        meta(9, 64 * 132, dtype=cache) if cache == FP8 else meta(640, 128, dtype=cache),
        replace(meta_context(4096, 1, width), max_seq_len_q=longest_q),
        meta(4096, width, dtype=F32),
        first_row=0,
        fill=fill,
    )
    return {r.kernel.__name__: (r.kernel, launch) for r in recorders for launch in r.launches}


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("dtype", [E4M3, BF16, torch.float16], ids=str)
def test_long_contexts_take_it(
    heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(launches(monkeypatch, heads=heads, dtype=dtype)) == ["_score_long"]


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        ({"width": LONG - 64}, "_score"),
        ({"width": LONG - 64, "dtype": BF16}, "_score_sm90"),
        ({"heads": 16}, "_score"),
        ({"heads": 128, "dtype": BF16}, "_score_sm90"),
        ({"arch": 100}, "_score"),
        ({"dtype": BF16, "cache": BF16}, "_score"),
        ({"longest_q": 4}, "_score_stream"),
    ],
    ids=str,
)
def test_what_it_does_not_do_goes_elsewhere(
    case: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(launches(monkeypatch, **case)) == [kernel]


def test_what_the_copy_engine_cannot_read_goes_elsewhere() -> None:
    rows = torch.zeros(4 * 64 * 128 + 8, dtype=BF16)
    weights = torch.zeros(4, 64)
    assert fits_long(rows[8:].view(4, 64, 128), weights, 65536)
    assert not fits_long(rows[1:-7].view(4, 64, 128), weights, 65536)
    assert not fits_long(rows[8:].view(4, 64, 128), weights.double(), 65536)
    assert not fits_long(rows[8:].view(4, 64, 128), torch.zeros(257)[1:].view(4, 64), 65536)


@pytest.mark.parametrize("rows", [1, 3, 95, 97, 191, 192, 512, 513, 4096, 70001])
@pytest.mark.parametrize("tiles", [11, 171, 342])
def test_rows_of_a_program(rows: int, tiles: int) -> None:
    """Whole steps of up to four rows, and enough of them to be worth gathering the keys for."""
    each = rows_of(132, tiles, rows)
    assert each % 4 == 0
    assert min(rows, 96) <= each <= 512


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(
    ("heads", "dtype"), [(64, E4M3), (32, E4M3), (64, BF16), (32, torch.float16)], ids=str
)
def test_compiles_fits_and_overlaps(
    heads: int, dtype: torch.dtype, fill: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    found = launches(monkeypatch, heads=heads, dtype=dtype, fill=fill)
    kernel, launch = found["_score_long"]
    compiled = compile_for(90, kernel, launch.types, launch.constants, **launch.options)
    assert compiled.shared <= SHARED_MEMORY[90]
    assert compiled.spilled is not None
    assert compiled.spilled <= STACK
    code = machine_code(compiled.asm["cubin"], tmp_path / "kernel.cubin")
    # Two products of each of three groups, each waited for at once: the other groups sum meanwhile.
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", code)
    assert waits == ["0x0"] * 6, waits
    products = [at.start() for at in re.finditer(r"[QH]GMMA\.64x128", code)]
    steps = 4 if dtype == E4M3 else 8
    assert len(products) == 6 * steps, products
    # No step of them touches local memory.
    for group in range(3):
        first, *_, last = products[2 * steps * group : 2 * steps * (group + 1)]
        assert not re.search(r"\b(LDL|STL)\b", code[first:last])
