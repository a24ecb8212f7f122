"""Measure the Triton kernels, and variants of their launch, on the GPU at hand.

    python benchmarks/kernels_h200.py --groups mla_prefill,topk --out results.jsonl
    python benchmarks/kernels_h200.py --warm 3/12        # only compile: every 12th variant from 3

Every call is captured in a CUDA graph (which also shows that it may be), the second-level cache is
flushed before each replay, and p20 / p50 / p80 of event times are kept. Data is random; slots are
distinct and ascending, as a selection gives them. Compiling is most of the time on a fresh machine:
run several `--warm` processes first.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import triton
from triton.errors import TritonError

from topkapi.bench.clock import measure
from topkapi.context import Context
from topkapi.kernels.hopper import sparse_mla as hopper
from topkapi.kernels.triton import indexer_logits as scoring
from topkapi.kernels.triton import select as selecting
from topkapi.kernels.triton import sparse_mla as attending
from topkapi.kernels.triton import topk as choosing
from topkapi.reference import records

# What one variant may die of without ending the run: a launch, a tile too large, a refusal.
VARIANT_FAILURES = (RuntimeError, ValueError, TritonError)
COPY_BYTES_PER_S = 4.3e12
BF16_FLOP_PER_S = 790e12
FP8_FLOP_PER_S = 1580e12


@dataclass(frozen=True)
class Variant:
    """One thing to time. `make(small)` returns the call, on small data when only compiling."""

    group: str
    name: str
    make: Callable[[bool], Callable[[], Any]]
    flops: float = 0.0
    bytes: float = 0.0
    peak: float = BF16_FLOP_PER_S
    facts: dict[str, Any] = field(default_factory=dict)


def stratified_slots(rows: int, k: int, context: int) -> torch.Tensor:
    """`[rows, k]` distinct ascending slots, one in each of k equal stretches of the context."""
    place = torch.arange(k, device="cuda") + torch.rand(rows, k, device="cuda")
    return (place * (context / k)).int().clamp_max(context - 1) + 1


def latent_cache(slots: int, latent: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.uint8:
        x = torch.randn(slots, latent + rope, device="cuda")
        return records.quantize_latent(x[:, :latent], x[:, latent:])[:, None]
    return torch.randn(slots, 1, latent + rope, device="cuda").to(dtype)


def mla(
    group: str,
    rows: int,
    heads: int,
    context: int,
    cache: torch.dtype,
    tile: attending.Tile | hopper.Tile | None = None,
    splits: int | None = None,
    per_request: bool = False,
    latent: int = 512,
    rope: int = 64,
    k: int = 2048,
) -> Variant:
    """`per_request`: each row has a context of its own, as in decoding."""

    def make(small: bool) -> Callable[[], Any]:
        r, s = (2, 4096) if small else (rows, context)
        requests = 1 if small or not per_request else r
        q = torch.randn(r, heads, latent + rope, device="cuda").bfloat16()
        kv = latent_cache(requests * s + 64, latent, rope, cache)
        slots = stratified_slots(r, k, s)
        if requests > 1:
            slots += torch.arange(r, device="cuda", dtype=torch.int32)[:, None] * s
        used = 2 if small and splits is None and per_request else splits
        launch: Any = attending if isinstance(tile, attending.Tile) else hopper
        return lambda: launch.sparse_mla(
            q, kv, slots, scale=0.05, v_dim=latent, tile=tile, splits=used
        )

    record = 656 if cache == torch.uint8 else 2 * (latent + rope)
    moved = rows * k * record if per_request else min(rows * k, context) * record
    moved += rows * heads * 2 * (2 * latent + rope)
    shape = f"{rows}x{heads}h {context // 1024}k {'fp8' if cache == torch.uint8 else 'bf16'}"
    name = f"{shape} {_short(tile)} splits={splits}"
    flops = 2.0 * rows * heads * k * (2 * latent + rope)
    return Variant(group, name, make, flops, moved)


def _short(tile: Any) -> str:
    if tile is None:
        return "chosen"
    flag = "stream" if getattr(tile, "stream", False) else ""
    sizes = [v for k, v in asdict(tile).items() if k not in ("stream", "per_sm")]
    return type(tile).__module__.split(".")[-2] + " " + "/".join(map(str, sizes)) + flag


def context_of(rows: int, requests: int, length: int) -> Context:
    per = rows // requests
    lengths = length - per + 1 + torch.arange(per, dtype=torch.int32, device="cuda")
    slots = torch.arange(requests * length, dtype=torch.int32, device="cuda") + 64
    return Context(
        lengths=lengths.repeat(requests),
        request_of_row=torch.arange(requests, dtype=torch.int32, device="cuda").repeat_interleave(
            per
        ),
        cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32, device="cuda") * per,
        max_length=length,
        max_seq_len_q=per,
        table=slots.view(requests, length),
        table_rows=torch.arange(requests, device="cuda"),
    )


def scores(
    group: str,
    rows: int,
    requests: int,
    heads: int,
    length: int,
    dtype: torch.dtype,
    tile: scoring.Tile | None = None,
    op: str = "logits",
    budget: int = 256 * 2**20,
) -> Variant:
    """Logits or a whole selection over fp8 keys, with queries of `dtype`."""

    def make(small: bool) -> Callable[[], Any]:
        b, r, n = (1, rows // requests, 4096) if small else (requests, rows, length)
        if small:
            r = min(r, 64) if rows > requests else 1
        context = context_of(r, b, n)
        q = torch.randn(r, heads, 128, device="cuda").to(dtype)
        weights = torch.randn(r, heads, device="cuda")
        pages = (b * n + 64) // 64
        cache = torch.empty(pages, 64 * 132, dtype=torch.uint8, device="cuda")
        keys = torch.randn(1024, 128, device="cuda").repeat(pages * 64 // 1024 + 1, 1)
        records.write_index_key(cache, torch.arange(pages * 64, device="cuda"), keys[: pages * 64])
        if op == "select":
            return lambda: selecting.select(q, weights, cache, context, 2048, budget_bytes=budget)
        if op == "torch":
            return lambda: torch.topk(_logits(q, weights, cache, context, tile), 2048, dim=1)
        return lambda: _logits(q, weights, cache, context, tile)

    flops = 2.0 * rows * heads * 128 * length
    moved = 132.0 * requests * length + (4.0 * rows * length if op == "logits" else 0)
    kind = "fp8" if dtype == torch.float8_e4m3fn else "bf16"
    name = f"{op} {rows}r/{requests} {heads}h {length // 1024}k q={kind} {_short(tile)}"
    if op == "select":
        name += f" budget={budget >> 20}M"
    peak = FP8_FLOP_PER_S if kind == "fp8" else BF16_FLOP_PER_S
    return Variant(group, name, make, flops, moved, peak)


def _logits(
    q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, context: Context, tile: Any
) -> torch.Tensor:
    out = torch.empty(q.shape[0], context.max_length, device="cuda")
    scoring.launch_scores(q, weights, cache, context, out, first_row=0, fill=True, tile=tile)
    return out


def topk(
    rows: int,
    width: int,
    kind: str = "normal",
    by_torch: bool = False,
    plan: choosing.Plan | None = None,
) -> Variant:
    def make(small: bool) -> Callable[[], Any]:
        r, s = (2, width) if small else (rows, width)
        logits = torch.randn(r, s, device="cuda")
        if kind == "relu":
            logits = logits.clamp_min_(1.0)
        lengths = torch.full((r,), s, dtype=torch.int32, device="cuda")
        out = torch.empty(r, 2048, dtype=torch.int32, device="cuda")
        if by_torch:
            return lambda: torch.topk(logits, 2048, dim=1)
        return lambda: choosing.launch_topk(logits, lengths, 2048, out, plan=plan)

    who = "torch" if by_torch else "ours"
    name = f"{who} {rows} x {width // 1024}k {kind} {_short(plan)}"
    return Variant("topk", name, make, 0.0, 4.0 * rows * width)


def variants() -> Iterator[Variant]:
    tile, bf16, fp8 = attending.Tile, torch.bfloat16, torch.uint8
    e4m3 = torch.float8_e4m3fn
    for context in (8192, 65536):
        yield mla("mla_prefill", 4096, 128, context, bf16)
        yield mla("mla_prefill", 4096, 64, context, bf16)
        yield mla("mla_prefill", 4096, 32, context, bf16)
        yield mla("mla_prefill", 4096, 16, context, bf16)
        yield mla("mla_prefill", 4096, 8, context, bf16)
    for stages in (2, 3):
        whole = tile(64, 64, 8, stages, whole=True)
        yield mla("mla_prefill_tiles", 4096, 128, 65536, bf16, whole)
    for t in (tile(16, 64, 4, 3), tile(16, 32, 4, 3), tile(32, 64, 4, 3)):
        yield mla("mla_prefill_tiles", 4096, t.heads, 65536, bf16, t)
    for cache in (fp8, bf16):
        for heads in (128, 16):
            for rows in (1, 8, 32, 64, 128):
                yield mla("mla_decode", rows, heads, 65536, cache, per_request=True)
    for cache in (fp8, bf16):
        narrow = hopper.choose_tile(16, fp8=cache is fp8)
        for rows, most in ((1, 32), (8, 32), (32, 16), (64, 8), (128, 4)):
            for splits in (most, most // 2, most // 4):
                yield mla("mla_decode_splits", rows, 16, 65536, cache, narrow, splits, True)
    for length in (8192, 65536):
        yield scores("logits", 4096, 1, 64, length, e4m3)
        yield scores("logits", 4096, 1, 64, length, bf16)
    for rows in (1, 8, 64):
        yield scores("logits", rows, rows, 64, 65536, e4m3)
        yield scores("logits", rows, rows, 64, 65536, bf16)
    cut = scoring.Tile
    for t in (cut(128, 128, 2, 4, 2), cut(128, 128, 4, 8, 3), cut(256, 128, 2, 8, 2)):
        yield scores("logits_tiles", 4096, 1, 64, 65536, e4m3, t)
    for t in (
        cut(128, 128, 1, 4, 3),
        cut(128, 128, 1, 4, 2),
        cut(128, 64, 1, 4, 4),
        cut(256, 128, 1, 8, 3),
        cut(256, 256, 2, 8, 3),
    ):
        yield scores("logits_tiles", 4096, 1, 64, 65536, bf16, t)
    for t in (
        cut(64, 1, 1, 4, 4, stream=True),
        cut(64, 1, 1, 4, 3, stream=True),
        cut(64, 1, 1, 4, 1, stream=True),
        cut(128, 1, 1, 4, 3, stream=True),
        cut(128, 1, 1, 4, 1, stream=True),
        cut(128, 1, 1, 8, 3, stream=True),
        cut(128, 1, 1, 4, 2),
    ):
        for dtype in (e4m3, bf16):
            yield scores("logits_tiles", 64, 64, 64, 65536, dtype, t)
    for width in (8192, 65536, 131072):
        for rows in (1, 64, 4096):
            yield topk(rows, width)
            yield topk(rows, width, by_torch=True)
    yield topk(4096, 65536, "relu")
    yield topk(1, 2**20)
    for budget in (64, 256, 1024):
        yield scores("select", 4096, 1, 64, 65536, e4m3, op="select", budget=budget << 20)
    yield scores("select", 4096, 1, 64, 8192, e4m3, op="select")
    yield scores("select", 4096, 1, 64, 65536, bf16, op="select")
    yield scores("select", 4096, 1, 64, 65536, bf16, op="torch")
    yield scores("select", 4096, 1, 64, 65536, e4m3, op="torch")
    for rows in (1, 64):
        yield scores("select", rows, rows, 64, 65536, bf16, op="select")
        yield scores("select", rows, rows, 64, 65536, bf16, op="torch")


def _compile_apart(variant: Variant) -> None:
    """Compile and run one variant in a process of its own: an illegal access ends that alone."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        variant.make(True)()
        torch.cuda.synchronize()
    except VARIANT_FAILURES as error:
        print(f"WARM FAILED {variant.group}|{variant.name}|{error!r:.160}", flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", default="")
    parser.add_argument("--warm", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--skip", default="", help="a file of WARM FAILED lines")
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    groups = set(filter(None, arguments.groups.split(",")))
    chosen = [v for v in variants() if not groups or v.group in groups]
    if arguments.skip:
        with open(arguments.skip) as file:
            failed = {line.split("|")[1] for line in file if line.startswith("WARM FAILED")}
        chosen = [v for v in chosen if v.name not in failed]
    if arguments.warm:
        part, of = map(int, arguments.warm.split("/"))
        for variant in chosen[part::of]:
            _compile_apart(variant)
        return
    lines = []
    for variant in chosen:
        torch.manual_seed(0)
        try:
            p20, p50, p80 = measure(variant.make(False), arguments.repeats)
        except VARIANT_FAILURES as error:
            print(f"{variant.group:18} {variant.name:60} FAILED {repr(error)[:200]}", flush=True)
            continue
        floor = 1e6 * max(variant.bytes / COPY_BYTES_PER_S, variant.flops / variant.peak)
        row = {
            "group": variant.group, "name": variant.name, "p20_us": p20, "p50_us": p50,
            "p80_us": p80, "flops": variant.flops, "bytes": variant.bytes, "floor_us": floor,
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "triton": triton.__version__,
        }  # fmt: skip
        lines.append(json.dumps(row))
        print(
            f"{variant.group:18} {variant.name:60} {p50:9.1f} us  floor {floor:8.1f} "
            f"({100 * floor / p50:3.0f} %)  {variant.flops / p50 / 1e6:6.0f} TFLOP/s",
            flush=True,
        )
        torch.cuda.empty_cache()
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
