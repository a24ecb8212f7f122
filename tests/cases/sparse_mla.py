"""Cases of `sparse_mla`: odd sizes, holes, empty rows, duplicates, NaN where it must not matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tolerances import OUTPUT, Tolerance, assert_close
from topkapi import reference
from topkapi.layout.latent import latent_layout

Pattern = Literal["full", "tail", "holes", "empty rows", "all empty", "duplicates", "leading"]
Poison = Literal["none", "unselected", "query", "query inf", "selected"]


@dataclass(frozen=True)
class SparseMlaCase:
    """One call. `pattern` says where -1 stands in the slots, `poison` what holds NaN."""

    name: str
    rows: int
    heads: int = 8
    latent: int = 512
    rope: int = 64
    k: int = 64
    cache: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    pattern: Pattern = "tail"
    poison: Poison = "unselected"
    sinks: bool = False
    logit_cap: float = 0.0
    magnitude: float = 1.0
    num_slots: int = 320
    seed: int = 0

    def make(
        self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of `sparse_mla`; `dtype` overrides the query's."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = dtype or self.dtype
        width = self.latent + self.rope
        slots = _slots(self, generator)
        q = torch.randn(self.rows, self.heads, width, generator=generator) * self.magnitude
        if self.rows > 1 and self.poison == "query":
            q[1, :, width // 2] = float("nan")
        if self.rows > 1 and self.poison == "query inf":
            q[1, 0, 3] = float("inf")
        sinks = torch.randn(self.heads, generator=generator) * 3 if self.sinks else None
        return {
            "q": q.to(dtype).to(device),
            "kv_cache": _cache(self, slots, generator).to(device),
            "slots": slots.to(device),
            "scale": width**-0.5,
            "v_dim": self.latent,
            "sinks": None if sinks is None else sinks.to(device),
            "logit_cap": self.logit_cap,
        }

    def expected(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition in float64 on the CPU, on the very values of the inputs."""
        cpu = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in inputs.items()}
        return reference.sparse_mla(**{**cpu, "q": cpu["q"].double()})

    def compare(
        self, got: tuple[torch.Tensor, torch.Tensor], inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hold `(out, lse)` to the float64 definition; returns that for further checks."""
        out, lse = got
        want_out, want_lse = self.expected(inputs)
        assert out.dtype == inputs["q"].dtype
        assert lse.dtype == torch.float32
        tolerance = OUTPUT[inputs["q"].dtype]
        assert_close(
            f"{self.name}: lse", lse, want_lse, Tolerance(tolerance.lse, tolerance.lse, 0.0)
        )
        assert_close(f"{self.name}: out", out, want_out, tolerance)
        return want_out, want_lse


def _slots(case: SparseMlaCase, generator: torch.Generator) -> torch.Tensor:
    shape = (case.rows, case.k)
    # Slot 0 is the dummy: never selected, and NaN in the cache under "unselected".
    slots = (
        torch.stack(
            [
                torch.randperm(case.num_slots - 1, generator=generator)[: case.k] + 1
                for _ in range(case.rows)
            ]
        )
        if case.rows
        else torch.zeros(shape, dtype=torch.int64)
    )
    if case.pattern == "duplicates":
        slots = slots % 7 + 1
    column = torch.arange(case.k)
    if case.pattern in ("tail", "duplicates"):
        lengths = torch.randint(1, case.k + 1, (case.rows, 1), generator=generator)
        slots = torch.where(column < lengths, slots, -1)
    elif case.pattern == "leading":
        slots = torch.where(column < case.k - 1, -1, slots)
    elif case.pattern == "holes":
        slots = torch.where(torch.rand(shape, generator=generator) < 0.6, -1, slots)
    elif case.pattern == "empty rows":
        slots[::2] = -1
    elif case.pattern == "all empty":
        slots = torch.full(shape, -1)
    return slots.to(torch.int32)


def _cache(case: SparseMlaCase, slots: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    latent = torch.randn(case.num_slots, case.latent, generator=generator) * case.magnitude
    rope = torch.randn(case.num_slots, case.rope, generator=generator)
    width = latent_layout(case.cache).width(case.latent, case.rope)
    cache = torch.zeros(case.num_slots, 1, width, dtype=case.cache)
    if case.poison == "selected" and case.rows > 1:
        # One slot that row 1 alone selects spoils row 1 alone.
        latent[int(slots[1].max())] = float("nan")
    reference.write_latent(cache, torch.arange(case.num_slots), latent, rope)
    if case.poison != "none":
        selected = torch.zeros(case.num_slots, dtype=torch.bool)
        selected[slots[slots >= 0].long()] = True
        cache.view(torch.uint8)[~selected] = 0xFF
    return cache


_BF16 = torch.bfloat16
_FP16 = torch.float16
_FP8 = torch.uint8

SPARSE_MLA_CASES = (
    SparseMlaCase("plain", 5),
    SparseMlaCase("full rows", 3, k=65, pattern="full"),
    SparseMlaCase("no rows", 0),
    SparseMlaCase("no slots", 3, k=0, pattern="full"),
    SparseMlaCase("one of everything", 1, heads=1, k=1, pattern="full"),
    SparseMlaCase("128 heads", 3, heads=128, k=130),
    SparseMlaCase("63 rows, 5 heads", 63, heads=5, k=63),
    SparseMlaCase("65 rows, 3 heads", 65, heads=3, k=66, latent=64, rope=32),
    SparseMlaCase("16 heads", 4, heads=16, k=129, latent=256, rope=64),
    SparseMlaCase("axk2", 4, heads=32, k=65, latent=128, rope=32),
    SparseMlaCase("no rope", 5, rope=0, latent=96, k=17),
    SparseMlaCase("wide rope", 5, rope=96, latent=160, k=33),
    SparseMlaCase("holes", 9, k=97, pattern="holes"),
    SparseMlaCase("empty rows", 7, k=40, pattern="empty rows"),
    SparseMlaCase("all empty", 3, k=40, pattern="all empty"),
    SparseMlaCase("leading holes", 3, k=200, pattern="leading"),
    SparseMlaCase("duplicates", 5, k=70, pattern="duplicates"),
    SparseMlaCase("sinks", 5, sinks=True),
    SparseMlaCase("sinks, empty rows", 5, sinks=True, pattern="empty rows"),
    SparseMlaCase("cap", 5, logit_cap=5.0, magnitude=3.0),
    SparseMlaCase("cap and sinks", 5, logit_cap=30.0, sinks=True, pattern="holes"),
    SparseMlaCase("sharp", 5, magnitude=12.0, pattern="full"),
    SparseMlaCase("NaN query row", 5, poison="query"),
    SparseMlaCase("inf query row", 5, poison="query inf"),
    SparseMlaCase("NaN selected slot", 5, k=3, pattern="full", poison="selected", seed=3),
    SparseMlaCase("bf16", 5, cache=_BF16, dtype=_BF16),
    SparseMlaCase("bf16 holes", 33, k=129, cache=_BF16, dtype=_BF16, pattern="holes", heads=16),
    SparseMlaCase("bf16 128 heads", 2, heads=128, k=256, cache=_BF16, dtype=_BF16),
    SparseMlaCase("bf16 empty rows", 4, cache=_BF16, dtype=_BF16, pattern="empty rows", sinks=True),
    SparseMlaCase("bf16 axk2", 4, heads=32, latent=128, rope=32, cache=_BF16, dtype=_BF16),
    SparseMlaCase("bf16 NaN row", 4, cache=_BF16, dtype=_BF16, poison="query"),
    SparseMlaCase("fp32 query, bf16 cache", 4, cache=_BF16),
    SparseMlaCase("fp16", 4, cache=_FP16, dtype=_FP16),
    SparseMlaCase("fp8", 5, cache=_FP8, dtype=_BF16),
    SparseMlaCase("fp8 holes", 9, k=130, cache=_FP8, dtype=_BF16, pattern="holes", heads=64),
    SparseMlaCase("fp8 fp32 query", 5, cache=_FP8),
    SparseMlaCase("fp8 axk2", 5, heads=32, latent=128, rope=32, cache=_FP8, dtype=_BF16),
    SparseMlaCase("fp8 short group", 5, latent=192, rope=0, cache=_FP8, dtype=_BF16),
    SparseMlaCase("fp8 empty rows", 5, cache=_FP8, dtype=_BF16, pattern="empty rows"),
    SparseMlaCase("fp8 duplicates", 5, cache=_FP8, dtype=_BF16, pattern="duplicates", sinks=True),
    SparseMlaCase("fp8 three groups", 5, heads=3, latent=384, rope=32, cache=_FP8, dtype=_BF16),
    SparseMlaCase("fp8 cap and sinks", 5, k=70, cache=_FP8, dtype=_BF16, logit_cap=9.0, sinks=True),
)

# Of kernels that take codes as they are; others round each value, and a sharp softmax shows it.
EXACT_FP8_CASES = (
    SparseMlaCase("fp8 NaN query row", 4, cache=_FP8, dtype=_BF16, poison="query"),
    SparseMlaCase("fp8 inf query row", 4, cache=_FP8, dtype=_BF16, poison="query inf"),
    SparseMlaCase("fp8 NaN selected slot", 5, k=3, cache=_FP8, dtype=_BF16, pattern="full",
                  poison="selected", seed=3),
    SparseMlaCase("fp8 tiny", 5, cache=_FP8, dtype=_BF16, magnitude=1e-4),
    SparseMlaCase("fp8 sharp", 5, cache=_FP8, dtype=_BF16, magnitude=12.0, pattern="full"),
)  # fmt: skip

# At real sizes and in half precision: for a GPU.
WIDE_SPARSE_MLA_CASES = (
    SparseMlaCase("wide", 70, heads=128, k=2048, num_slots=5000, cache=_BF16,
                  dtype=_BF16),
    SparseMlaCase("wide holes", 300, heads=64, k=333, num_slots=5000, cache=_BF16,
                  dtype=_BF16, pattern="holes", sinks=True, logit_cap=20.0),
    SparseMlaCase("wide, odd heads", 200, heads=72, k=70, cache=_BF16,
                  dtype=_BF16, poison="query"),
    SparseMlaCase("wide fp16", 3, heads=128, k=2048, num_slots=5000, cache=_FP16,
                  dtype=_FP16, pattern="holes"),
    SparseMlaCase("narrow", 70, heads=16, k=2048, num_slots=5000, cache=_BF16,
                  dtype=_BF16),
    SparseMlaCase("narrow holes", 300, heads=32, k=333, num_slots=5000, cache=_BF16,
                  dtype=_BF16, pattern="holes", sinks=True, logit_cap=20.0),
    SparseMlaCase("narrow fp8", 200, heads=20, k=333, num_slots=5000, cache=_FP8,
                  dtype=_BF16, pattern="holes", sinks=True),
    SparseMlaCase("narrow fp8, 3 heads", 4, heads=3, k=2048, num_slots=5000, cache=_FP8,
                  dtype=_BF16),
    SparseMlaCase("wide fp8 holes", 200, heads=72, k=333, num_slots=5000, cache=_FP8,
                  dtype=_BF16, pattern="holes", sinks=True),
    SparseMlaCase("fp8 128 heads", 70, heads=128, k=300, cache=_FP8, dtype=_BF16),
)  # fmt: skip
