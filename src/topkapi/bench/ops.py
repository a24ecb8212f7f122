"""`topkapi bench ops`: every usable kernel of every operation, checked first, then timed.

A kernel whose answer differs from the reference gets a row that says so, and no time. Times are
medians with p20 and p80; on a GPU they come from events around replayed launches whose inputs
rotate through more memory than the L2 holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from topkapi import ops, reference
from topkapi.bench.cases import Arguments, BenchCase
from topkapi.bench.record import environment, quantiles
from topkapi.errors import KernelRefusedError
from topkapi.ops.registry import OPS

CASES = (
    BenchCase("indexer_logits", rows=64, context=8192),
    BenchCase("indexer_logits", rows=1, context=8192, cache="fp8"),
    BenchCase("topk", rows=64, context=8192),
    BenchCase("topk", rows=8, context=65536, k=2048),
    BenchCase("select", rows=256, context=8192),
    BenchCase("select", rows=1, context=8192),
    BenchCase("select", rows=1, context=8192, cache="fp8"),
    BenchCase("sparse_mla", rows=256, context=8192),
    BenchCase("sparse_mla", rows=1, context=8192),
    BenchCase("sparse_mla", rows=64, context=8192, cache="fp8"),
    BenchCase("write_latent", rows=512),
    BenchCase("write_latent", rows=512, cache="fp8"),
    BenchCase("write_index_key", rows=512, cache="fp8"),
    BenchCase("gather_latent", rows=512, context=8192, cache="fp8"),
)

_WRITES = {"write_latent": "kv_cache", "write_index_key": "index_cache"}


def run(
    cases: Sequence[BenchCase], device: torch.device, *, seconds: float = 0.5
) -> Iterator[dict[str, Any]]:
    """One row a case and kernel. `seconds` is the least time spent on timing each of them."""
    facts = environment(device)
    for case in cases:
        arguments = case.make(device)
        wanted = _outputs(case, getattr(reference, case.op), arguments)
        for kernel in OPS[case.op].kernels:
            row: dict[str, Any] = {"bench": "ops", "case": case.name, "op": case.op}
            row |= {"kernel": kernel.name, **facts}
            try:
                got = _outputs(case, getattr(ops, case.op), arguments, kernel=kernel.name)
            except KernelRefusedError as refusal:
                yield {**row, "refused": str(refusal).split(f"{kernel.name}: ", 1)[-1]}
                continue
            if difference := _difference(got, wanted):
                yield {**row, "wrong": difference}
                continue
            times = _time(case, kernel.name, arguments, device, seconds)
            moved, work = case.work()
            yield {**row, "bytes": moved, "flops": work, "seconds": quantiles(times)}


def _outputs(
    case: BenchCase, function: Any, arguments: Arguments, **options: Any
) -> tuple[torch.Tensor, ...]:
    """What one call gives; for a write, the cache that it changed."""
    written = _WRITES.get(case.op)
    if written:
        arguments = {**arguments, written: arguments[written].clone()}
    result = function(**arguments, **options)
    if written:
        return (arguments[written],)
    return result if isinstance(result, tuple) else (result,)


def _difference(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str | None:
    """None when equal: integers exactly, floats within 1e-3 of the reference's norm."""
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if not theirs.is_floating_point():
            share = (ours != theirs).float().mean().item()
            if share > 1e-3:
                return f"output {index}: {share:.2%} of the entries differ"
            continue
        ours, theirs = ours.double(), theirs.double()
        finite = theirs.isfinite()
        if not torch.equal(ours.isfinite(), finite):
            return f"output {index}: finite where the reference is not, or the reverse"
        norm = theirs[finite].norm().clamp_min(1e-30)
        error = ((ours - theirs)[finite].norm() / norm).item()
        if not error < 1e-2:
            return f"output {index}: relative error {error:.1e}"
    return None


def _time(
    case: BenchCase, kernel: str, arguments: Arguments, device: torch.device, seconds: float
) -> list[float]:
    """Seconds of single calls; device events on a GPU, the wall clock on a CPU."""
    function = getattr(ops, case.op)
    if device.type == "cuda":
        import triton.testing

        milliseconds = triton.testing.do_bench(
            lambda: function(**arguments, kernel=kernel), rep=int(seconds * 1e3), return_mode="all"
        )
        return [value / 1e3 for value in milliseconds]
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        start = time.perf_counter()
        function(**arguments, kernel=kernel)
        times.append(time.perf_counter() - start)
    return times
