"""What can this machine do at best? The measured ceilings that floors are computed from.

Copying gives the memory's bandwidth, a large matrix product of random data the arithmetic's. Knows
nothing about operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from topkapi.bench.clock import MOST_IN_LINE, interleaved, prepare, prepare_line
from topkapi.bench.record import quantiles


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a copy (read and written both counted), FLOP a second of matrix products.

    `fp8_from` says where the fp8 figure comes from: `torch._scaled_mm`, or `twice bf16`.
    `least_seconds` is what the clock shows for a kernel that does nothing, `least_steady_seconds`
    for one in line with others (0 on a CPU); no floor contains them.
    """

    bytes_per_second: float
    fp32: float
    bf16: float
    fp8: float
    fp8_from: str
    least_seconds: float = 0.0
    least_steady_seconds: float = 0.0

    def floor(self, moved: float, flops: float, arithmetic: str) -> float:
        """Seconds that `moved` bytes and `flops` of `arithmetic` (fp32, bf16, fp16, fp8) take at
        least: the larger of the two.
        """
        peaks = {"fp32": self.fp32, "bf16": self.bf16, "fp16": self.bf16, "fp8": self.fp8}
        return max(moved / self.bytes_per_second, flops / peaks[arithmetic])

    def facts(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def measure_ceilings(device: torch.device) -> Ceilings:
    """A tenth of a second on a GPU, about one on a CPU. Synchronises."""
    gpu = device.type == "cuda"
    size, count, rounds = (8192, 2**30, 10) if gpu else (1024, 2**26, 5)
    source = torch.ones(count // 4, device=device)
    target = torch.empty_like(source)
    # A kernel, not a copy: a captured copy goes to the GPU's copy engine, which is slower.
    copied = 2 * count / _seconds(lambda: torch.neg(source, out=target), device, rounds)
    product = 2.0 * size**3
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(a)
        found[name] = product / _seconds(_matmul(a, out), device, rounds if gpu else 2)
    fp8 = _fp8_seconds(size, device, rounds) if gpu else None
    return Ceilings(
        bytes_per_second=copied,
        fp32=found["fp32"],
        bf16=found["bf16"],
        fp8=2 * found["bf16"] if fp8 is None else product / fp8,
        fp8_from="twice bf16" if fp8 is None else "torch._scaled_mm",
        least_seconds=_seconds(_nothing(device), device, rounds),
        least_steady_seconds=_steady_seconds(device, rounds) if gpu else 0.0,
    )


def _nothing(device: torch.device) -> Callable[[], Any]:
    one = torch.ones(1, device=device)
    return lambda: torch.neg(one, out=one)


def _steady_seconds(device: torch.device, rounds: int) -> float:
    line = prepare_line([_nothing(device) for _ in range(MOST_IN_LINE)], device)
    return quantiles(interleaved({"line": line}, rounds, device)["line"])["p50"]


def _matmul(a: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.mm(a, a, out=out)


def _fp8_seconds(size: int, device: torch.device, rounds: int) -> float | None:
    """Seconds of a product of `[size, size]` e4m3 matrices; None where torch has none."""
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    columns = a.t()

    def call() -> torch.Tensor:
        return torch._scaled_mm(
            a, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    try:
        return _seconds(call, device, rounds)
    except RuntimeError:
        return None


def _seconds(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    times = interleaved({"call": prepare(call, device)}, rounds, device)["call"]
    return quantiles(times)["p50"]
