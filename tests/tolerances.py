"""How far an implementation may be from the float64 reference: one table for all of them.

`relative` bounds `norm(got - want) / norm(want)`, `peak` bounds `max|got - want| / max|want|`.
bf16 and fp16 outputs carry the rounding of their last store, and kernels may round probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Bounds for one dtype of the query."""

    relative: float
    peak: float
    lse: float


OUTPUT = {
    torch.float32: Tolerance(relative=1e-5, peak=5e-5, lse=1e-5),
    torch.float16: Tolerance(relative=1e-3, peak=2e-3, lse=1e-4),
    torch.bfloat16: Tolerance(relative=5e-3, peak=1.5e-2, lse=1e-4),
}

# Logits are fp32 sums of exact products, whatever the inputs: relative to the largest of a row.
LOGITS = 4e-6


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> None:
    """Compare with the float64 reference: patterns of NaN and inf first, then values.

    Where the reference is NaN or +inf, the input was spoiled, and either is right.
    """
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, want {list(want.shape)}"
    got, want = got.cpu().double(), want.cpu().double()
    empty = want == float("-inf")
    assert torch.equal(got == float("-inf"), empty), f"{name}: -inf in other places"
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name}: NaN or inf in other places"
    if not finite.any():
        return
    difference, size = (got - want)[finite], want[finite]
    if not size.any():
        assert not difference.any(), f"{name}: expected zeros"
        return
    relative = float(difference.norm() / size.norm())
    peak = float(difference.abs().max() / size.abs().max())
    assert relative <= tolerance.relative, f"{name}: relative error {relative:.2e}"
    assert peak <= tolerance.peak, f"{name}: peak error {peak:.2e}"
