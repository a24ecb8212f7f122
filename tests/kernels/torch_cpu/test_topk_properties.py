"""`topk` on whatever hypothesis finds: bit-equal to the definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topkapi import ops, reference
from topkapi.kernels.torch_cpu import topk as torch_topk

FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")])
ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    rows, width = draw(st.integers(0, 4)), draw(st.integers(0, 90))
    kind = draw(st.sampled_from([FEW, ANY]))
    values = draw(st.lists(kind, min_size=rows * width, max_size=rows * width))
    starts = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    lengths = [draw(st.integers(0, width - start)) for start in starts]
    return (
        torch.tensor(values, dtype=torch.float32).view(rows, width),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        draw(st.integers(1, 40)),
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(batches())
def test_topk_is_the_definition(
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int],
) -> None:
    logits, lengths, starts, k = batch
    got = ops.topk(logits, lengths, k, starts=starts, kernel="torch")
    assert torch.equal(got, reference.topk(logits, lengths, k, starts=starts))
    whole = torch.full_like(lengths, logits.shape[1])
    got = ops.topk(logits, whole, k, kernel="torch")
    assert torch.equal(got, reference.topk(logits, whole, k))


def test_the_grouped_search_is_used_and_exact() -> None:
    """Wide rows rank the members of the best groups alone; the rest of the row must not matter."""
    generator = torch.Generator().manual_seed(0)
    for width, k in ((4099, 7), (5000, 100), (1000, 1), (8192, 127)):
        values = torch.randn(3, width, generator=generator)
        values[1] = values[1].sort(descending=True).values
        values[2] = (values[2] * 4).round()
        lengths = torch.tensor([width, width, width - 1], dtype=torch.int32)
        values[2, -1] = float("-inf")
        got = torch_topk.highest(values, lengths, k)
        assert torch.equal(got, reference.topk(values, lengths, k))
