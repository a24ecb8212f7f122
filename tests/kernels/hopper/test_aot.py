"""The launches of the sm90 kernels, compiled ahead of time here, and their machine code read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton.aot import SHARED_MEMORY, compile_for, machine_code
from kernels.triton.test_aot import BF16, FP8, Recorder, device_of, meta
from topkapi.kernels.hopper import sparse_mla
from topkapi.kernels.triton import sparse_mla_merge
from topkapi.layout.latent import latent_layout

KERNELS = ("attend_wide", "attend_wide_fp8", "attend_narrow", "attend_narrow_fp8")

# Bytes of stack a thread that a kernel may use: beside 128 sums a thread few registers are left.
STACK = 96

LAUNCHES = {
    "prefill, 128 heads": (4096, 128, BF16, {}),
    "prefill, 16 heads": (4096, 16, BF16, {}),
    "prefill, 32 heads, fp8": (4096, 32, FP8, {}),
    "decode, 72 heads, fp8, sinks and cap": (8, 72, FP8, {"logit_cap": 30.0}),
    "decode, 8 heads, fp8": (8, 8, FP8, {}),
    "prefill, 8 heads, fp8": (4096, 8, FP8, {}),
    "decode, 8 heads": (8, 8, BF16, {}),
    "prefill, 32 heads": (4096, 32, BF16, {}),
    "decode, 20 heads, fp8, sinks and cap": (8, 20, FP8, {"logit_cap": 30.0}),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles_fits_and_overlaps(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows, heads, cache, options = LAUNCHES[name]
    recorders = []
    for attribute in KERNELS:
        recorder = Recorder(getattr(sparse_mla, attribute))
        recorders.append(recorder)
        monkeypatch.setattr(sparse_mla, attribute, recorder)
    monkeypatch.setattr(sparse_mla, "target_of", lambda tensor: device_of(90))
    monkeypatch.setattr(sparse_mla, "combine", lambda *args, **kwargs: None)
    sinks: dict[str, Any] = {"sinks": meta(heads, dtype=torch.float32)} if options else {}
    sparse_mla.sparse_mla(
        meta(rows, heads, 576, dtype=BF16),
        meta(640, 1, latent_layout(cache).width(512, 64), dtype=cache),
        meta(rows, 2048),
        scale=0.1,
        phase=name.partition(",")[0],
        **options,
        **sinks,
    )
    (kernel, launch), *others = [(r.kernel, one) for r in recorders for one in r.launches]
    assert not others
    compiled = compile_for(90, kernel, launch.types, launch.constants, **launch.options)
    assert compiled.shared <= SHARED_MEMORY[90]
    assert compiled.spilled is not None
    assert compiled.spilled <= STACK
    code = machine_code(compiled.asm["cubin"], tmp_path / "kernel.cubin")
    # A compiler that cannot follow the accumulators waits after each product instead.
    products, waits = (len(re.findall(word, code)) for word in ("HGMMA", r"WARPGROUP\.DEPBAR"))
    assert products > 8 * waits, f"{products} products, {waits} waits"
    assert "UNPACK_B" in code or cache == BF16


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple[Any, ...]]]:
    """Grids and arguments of what is launched from here on; nothing runs."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **_: seen.append((grid, args))

    for attribute in KERNELS:
        monkeypatch.setattr(sparse_mla, attribute, Kernel())
    monkeypatch.setattr(sparse_mla, "target_of", lambda tensor: device_of(90))
    monkeypatch.setattr(sparse_mla, "combine", lambda *args, **kwargs: None)
    return seen


@pytest.mark.parametrize("heads", [1, 16, 32, 33, 64, 65, 128])
def test_a_row_is_split_unless_its_bits_must_not_change(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = noted(monkeypatch)
    kv_cache, blocks = meta(9, 1, 656, dtype=FP8), -(-heads // 64)
    for rows, splits in ((1, 32 if heads <= 32 else 16), (40, 3 if blocks == 1 else 1), (400, 1)):
        q, slots = meta(rows, heads, 576, dtype=BF16), meta(rows, 2048)
        for invariant in (False, True):
            sparse_mla.sparse_mla(q, kv_cache, slots, scale=0.1, batch_invariant=invariant)
            grid, _ = seen.pop()
            assert grid == (rows * blocks, 1 if invariant else splits)


@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [16, 33])
def test_kernels_read_int32_slots_and_an_aligned_query(
    heads: int, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others they get copies: for those they do not compile."""
    seen = noted(monkeypatch)
    kv_cache = torch.zeros(9, 1, latent_layout(cache).width(512, 64), dtype=cache)
    values = torch.randn(2 * heads * 576 + 8).bfloat16()
    slots = torch.tensor([[8, -1, 0], [2**31 - 1, 3, 4]])
    for first in (0, 1, 8):
        given = values[first:][: 2 * heads * 576].view(2, heads, 576)
        for dtype in (torch.int32, torch.int64):
            sparse_mla.sparse_mla(given, kv_cache, slots.to(dtype), scale=0.1)
            _, (q, _, read, *_) = seen.pop()
            assert read.dtype == torch.int32
            assert torch.equal(read, slots.int())
            assert q.data_ptr() % 16 == 0
            assert torch.equal(q, given)
            assert (q.data_ptr() == given.data_ptr()) == (first != 1)


def test_partial_results_are_on_their_way_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The merge of split rows waits for memory once: none of its loads waits for another's."""
    recorder = Recorder(sparse_mla_merge._combine)
    monkeypatch.setattr(sparse_mla_merge, "_combine", recorder)
    for splits in (4, 16):
        shape = (splits, 32, 16)
        sparse_mla_merge.combine(
            meta(*shape, 512, dtype=torch.float32), meta(*shape, dtype=torch.float32), None,
            meta(32, 16, 512, dtype=BF16), meta(32, 16, dtype=torch.float32), early=True,
        )  # fmt: skip
    assert len(recorder.launches) == 2
    for launch in recorder.launches:
        compiled = compile_for(
            90, recorder.kernel, launch.types, launch.constants, **launch.options
        )
        code = machine_code(compiled.asm["cubin"], tmp_path / "kernel.cubin")
        assert 0 < code.index("ACQBULK") < code.index("LDG.E") < code.rindex("LDG.E")
        assert code.rindex("LDG.E") < code.index("MUFU.EX2")
