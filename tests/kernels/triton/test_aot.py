"""The very launches that each GPU would get, compiled ahead of time for it, on this machine.

Launchers run on meta tensors with a recorder in place of the kernel, and with the device they
believe to be on swapped; what they would have launched is compiled for that device, and must fit
its shared memory and stay out of local memory as far as the compiler reports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.triton.aot import SHARED_MEMORY, compile_for, machine_code
from topkapi.context import Context
from topkapi.device import DeviceInfo
from topkapi.kernels.triton import (
    index_queries,
    indexer_logits,
    records,
    rope,
    select,
    sparse_mla,
    sparse_mla_merge,
    step_metadata,
    topk,
)
from topkapi.layout.latent import latent_layout

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.uint32: "*u32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
FP8 = torch.uint8
BF16 = torch.bfloat16
F32 = torch.float32
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Launch:
    """One recorded launch: run-time types and compile-time constants by name, and options."""

    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


class Recorder:
    """Stands in for a kernel: notes how it is launched, and does nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, num_stages: int = 3, **kwargs: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False))
            constants = {param.name for param in self.kernel.params if param.is_constexpr}
            for name in kwargs.keys() - constants - {"maxnreg", "launch_pdl"}:
                given[name] = kwargs.pop(name)
            types = {name: _type(value) for name, value in given.items()}
            options = {"num_warps": num_warps, "num_stages": num_stages}
            kwargs.pop("launch_pdl", None)
            if "maxnreg" in kwargs:
                options["maxnreg"] = kwargs.pop("maxnreg")
            self.launches.append(Launch(types, kwargs, options))

        return launch


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        element = TYPES[value.base.dtype].removeprefix("*")
        return f"tensordesc<{element}{value.block_shape}, {value.layout!r}>"
    return "i32" if isinstance(value, int) else "fp32"


def device_of(arch: int | str) -> DeviceInfo:
    backend = "hip" if isinstance(arch, str) else "cuda"
    return DeviceInfo(backend, arch, str(arch), 132, SHARED_MEMORY[arch], has_triton=True)


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_context(rows: int, requests: int, width: int, dtype: torch.dtype = torch.int32) -> Context:
    return Context(
        lengths=meta(rows, dtype=dtype),
        request_of_row=meta(rows, dtype=dtype),
        cu_seqlens_q=meta(requests + 1, dtype=dtype),
        max_length=width,
        max_seq_len_q=rows // requests,
        table=meta(requests, width, dtype=dtype),
        table_rows=meta(requests, dtype=torch.int64),
    )


def attention(
    rows: int, heads: int, latent: int, rope: int, cache: torch.dtype, dtype: torch.dtype = BF16
) -> Callable[[], Any]:
    def call() -> Any:
        width = latent_layout(cache).width(latent, rope)
        return sparse_mla.sparse_mla(
            meta(rows, heads, latent + rope, dtype=dtype),
            meta(640, 1, width, dtype=cache),
            meta(rows, 2048),
            scale=0.1,
            v_dim=latent,
            sinks=meta(heads, dtype=torch.float32),
        )

    return call


def selection(
    rows: int, requests: int, heads: int, dim: int, cache: torch.dtype, dtype: torch.dtype = BF16,
    ints: torch.dtype = torch.int32,
) -> Callable[[], Any]:  # fmt: skip
    def call() -> Any:
        shape = (9, 64 * (dim + 4)) if cache == FP8 else (640, dim)
        return select.select(
            meta(rows, heads, dim, dtype=dtype),
            meta(rows, heads, dtype=torch.float32),
            meta(*shape, dtype=cache),
            meta_context(rows, requests, 65536, ints),
            2048,
        )

    return call


def write_and_gather() -> None:
    for cache in (FP8, BF16):
        kv_cache = meta(640, 1, latent_layout(cache).width(512, 64), dtype=cache)
        slots = meta(9, dtype=torch.int64)
        records.write_latent(kv_cache, slots, meta(9, 512, dtype=BF16), meta(9, 64, dtype=BF16))
        records.gather_latent(kv_cache, slots, dtype=BF16)
    records.write_index_key(meta(9, 64 * 132, dtype=FP8), slots, meta(9, 128, dtype=BF16))
    index_queries.quantize_index_query(meta(9, 64, 128, dtype=BF16), meta(9, 64, dtype=F32))
    angles = meta(9, 32, dtype=BF16)
    rope.apply_rope(meta(9, 128, 192, dtype=BF16)[..., 128:], angles, angles, "interleaved")
    rope.apply_rope(meta(9, 128, dtype=BF16), angles, angles, "half")


def one_step() -> None:
    step_metadata.step_metadata(
        table_rows=meta(4, dtype=torch.int64),
        kv_lens_out=meta(4),
        cu_seqlens_q=meta(5),
        request_of_row=meta(9),
        lengths=meta(9),
        selected_lens=meta(9),
        q_lens=meta(4),
        kv_lens=meta(4),
        request_rows=meta(4, dtype=torch.int64),
        topk=2048,
        out_cache_loc=meta(9, dtype=torch.int64),
    )


CALLS = {
    "mla prefill 128 heads": attention(4096, 128, 512, 64, BF16),
    "mla prefill 16 heads": attention(4096, 16, 512, 64, BF16),
    "mla general dims": attention(4096, 12, 384, 96, BF16),
    "mla decode 128 heads fp8": attention(8, 128, 512, 64, FP8),
    "mla decode 8 heads fp8": attention(8, 8, 512, 64, FP8),
    "mla axk2": attention(64, 32, 128, 32, BF16),
    "mla fp32": attention(64, 16, 512, 64, torch.float32, torch.float32),
    "select prefill fp8": selection(4096, 1, 64, 128, FP8),
    "select prefill bf16": selection(4096, 1, 16, 128, BF16),
    "select decode fp8": selection(64, 64, 32, 128, FP8),
    "select prefill fp8 queries": selection(4096, 1, 64, 128, FP8, E4M3),
    "select decode fp8 queries": selection(64, 64, 32, 128, FP8, E4M3),
    "select one row": selection(1, 1, 64, 128, FP8, E4M3),
    "select eight rows": selection(8, 8, 64, 128, FP8),
    "select fp32 dim 32": selection(256, 2, 5, 32, torch.float32, torch.float32),
    "records": write_and_gather,
    "step metadata": one_step,
}
KERNELS = (
    (sparse_mla, "_attend"),
    (sparse_mla, "attend_codes"),
    (sparse_mla_merge, "_combine"),
    (indexer_logits, "_score"),
    (indexer_logits, "_score_stream"),
    (indexer_logits, "_score_sm90"),
    (indexer_logits, "_score_long"),
    (topk, "_select_rows"),
    (topk, "_collect_rows"),
    (topk, "_choose_rows"),
    (topk, "_collect_few"),
    (topk, "_choose_few"),
    (records, "_write_latent"),
    (records, "_write_index_key"),
    (records, "_gather_latent"),
    (index_queries, "_quantize"),
    (rope, "_turn"),
    (step_metadata, "_fill"),
)
# Bytes of stack a thread that a kernel may use: what is kept there is touched outside its loops.
STACK = 1024


# What hardly depends on the GPU is compiled for one of each kind.
EVERYWHERE = (
    "mla prefill 128 heads",
    "mla decode 8 heads fp8",
    "select prefill fp8",
    "select decode fp8",
)
FEW = (80, 90, 120, "gfx942")
PAIRS = [
    (name, arch) for name in CALLS for arch in SHARED_MEMORY if name in EVERYWHERE or arch in FEW
]


def launched(
    call: Callable[[], Any], arch: int | str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, Launch]]:
    """Kernels and launches of a call on a device, each once."""
    recorders = []
    for module, attribute in KERNELS:
        recorder = Recorder(getattr(module, attribute))
        recorders.append(recorder)
        monkeypatch.setattr(module, attribute, recorder)
    for module in (sparse_mla, indexer_logits, topk, records):
        monkeypatch.setattr(module, "target_of", lambda tensor: device_of(arch))
    call()
    launches = {
        (recorder.kernel.__name__, str(launch)): (recorder.kernel, launch)
        for recorder in recorders
        for launch in recorder.launches
    }
    assert launches
    return list(launches.values())


@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (4096, 1)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, BF16], ids=str)
def test_contexts_may_be_int64(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = selection(*shape, 64, 128, FP8, dtype, torch.int64)
    for kernel, launch in launched(call, 90, monkeypatch):
        assert launch.types["lengths"] == "*i64"
        compile_for(90, kernel, launch.types, launch.constants, **launch.options)


@pytest.mark.parametrize(("name", "arch"), PAIRS, ids=str)
def test_compiles_and_fits(name: str, arch: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, launch in launched(CALLS[name], arch, monkeypatch):
        compiled = compile_for(arch, kernel, launch.types, launch.constants, **launch.options)
        label = f"{kernel.__name__} for {arch}: {launch.options}"
        print(label, compiled.shared, compiled.registers, compiled.spilled)
        assert compiled.shared <= SHARED_MEMORY[arch], f"{label}: {compiled.shared} bytes shared"
        if compiled.spilled is not None:
            assert compiled.spilled <= STACK, f"{label}: {compiled.spilled} bytes of stack a thread"


def sparse_mla_sm90(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    latent: int = 512,
    rope: int = 64,
    cache: torch.dtype = BF16,
    heads: int = 128,
    **options: Any,
) -> str:
    """The machine code of prefill."""
    kernel = "attend_codes" if cache == FP8 and heads < 64 else "_attend"
    recorder = Recorder(getattr(sparse_mla, kernel))
    monkeypatch.setattr(sparse_mla, kernel, recorder)
    monkeypatch.setattr(sparse_mla, "target_of", lambda tensor: device_of(90))
    monkeypatch.setattr(sparse_mla, "combine", lambda *args, **options: None)
    q = meta(4096, heads, latent + rope, dtype=BF16)
    kv_cache = meta(640, 1, latent_layout(cache).width(latent, rope), dtype=cache)
    slots = meta(4096, 2048)
    sparse_mla.sparse_mla(q, kv_cache, slots, scale=0.1, v_dim=latent, **options)
    (launch,) = recorder.launches
    compiled = compile_for(90, recorder.kernel, launch.types, launch.constants, **launch.options)
    return machine_code(compiled.asm["cubin"], path / "kernel.cubin")


@pytest.mark.parametrize(
    "options", [{}, {"splits": 3, "logit_cap": 20.0}], ids=["prefill", "split"]
)
def test_two_groups_of_warps_share_the_scores_of_64_heads(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each computes half of them, and they are waited for behind the loads of the next tile."""
    code = sparse_mla_sm90(monkeypatch, tmp_path, **options)
    products = {wide: len(re.findall(f"HGMMA.64x{wide}x16", code)) for wide in (32, 64, 256)}
    # 576 dims of the query, 64 tokens of the weights, 16 at once.
    assert products == {32: 36, 64: 0, 256: 4}
    # Both sums of scores, the output, and what may be left after the loop.
    assert code.count(WAIT) <= 4
    assert code.rindex("HGMMA.64x32x16") < code.rindex("LDGSTS") < code.index(WAIT)


@pytest.mark.parametrize("options", [{}, {"splits": 3}], ids=["prefill", "split"])
def test_few_heads_decode_fp8_codes_in_the_registers_of_the_products(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = sparse_mla_sm90(monkeypatch, tmp_path, cache=FP8, heads=16, **options)
    tiles = code[code.index("HMMA.16816") :]
    assert "LDG.E.128" not in tiles
    assert tiles.index("HMMA.16816") < tiles.index("LDGSTS.E.BYPASS.128") < tiles.index("MUFU.EX2")
    # 64 tokens of 512 values for two products, two of a thread at once, 128 threads.
    assert code.count("F2FP.F16.E4M3.UNPACK_B") == 2 * 64 * 512 // 128 // 2
    # Nothing decoded goes to shared memory: what is stored there are weights and maxima.
    assert not re.search(r"STS\.(64|128)", tiles[: tiles.rindex("HMMA.16816")])


WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (384, 96), (512, 0), (512, 6), (128, 32)])
def test_scores_are_waited_for(
    latent: int, rope: int, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton waits for them in the branch that uses them, or at once."""
    code = sparse_mla_sm90(monkeypatch, tmp_path, latent, rope, cache)
    found = [(int(one[1]), one.start()) for one in re.finditer(r"HGMMA\.64x(\d+)x16", code)]
    widest = max(width for width, _ in found)
    scores = max(start for width, start in found if width < widest)
    output = min(start for width, start in found if width == widest)
    assert WAIT in code[scores:output]
