"""Does the clock of the benchmarks capture what can be captured, and say what cannot?"""

from __future__ import annotations

import weakref

import pytest
import torch

from topkapi.bench import ops
from topkapi.bench.cases import BenchCase
from topkapi.bench.ceilings import measure_ceilings
from topkapi.bench.clock import interleaved, measure, prepare, prepare_line

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")


def test_a_call_that_waits_for_the_device_is_timed_by_its_launches() -> None:
    x = torch.ones(2**20, device=CUDA)
    timed = {
        "graph": prepare(lambda: x.neg(), CUDA),
        "launches": prepare(lambda: x.sum().item(), CUDA),
    }
    assert {name: one.how for name, one in timed.items()} == {name: name for name in timed}
    times = interleaved(timed, 5, CUDA)
    assert all(0 < seconds < 0.1 for values in times.values() for seconds in values)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        measure(lambda: x.sum().item(), 3)
    # A failed capture leaves the device usable.
    assert measure(lambda: x.neg(), 3)[1] > 0


def test_what_a_graph_writes_to_lives_as_long_as_it() -> None:
    out = torch.zeros(2**16, device=CUDA)
    alive = weakref.ref(out)

    def call(out: torch.Tensor = out) -> None:
        out.add_(1)

    timed = prepare(call, CUDA)
    del out, call
    assert alive() is not None
    timed.run()
    del timed
    assert alive() is None


def test_ceilings_are_those_of_a_gpu() -> None:
    found = measure_ceilings(CUDA)
    assert found.bytes_per_second > 1e11
    assert found.bf16 > found.fp32


@pytest.mark.parametrize("op", ["topk", "select", "sparse_mla", "write_latent"])
def test_a_case_is_checked_and_timed(op: str) -> None:
    case = BenchCase(
        op, rows=64, context=4096, cache="bf16", dtype=torch.bfloat16, index_heads=64, k=512
    )
    rows = list(ops.run([case], CUDA, ops.Plan(frozenset({"none"}), seconds=0.01)))
    (row,) = (row for row in rows if row["kernel"] == "triton")
    assert row["timing"] == "graph", row
    assert 0 < row["fraction"] < 1
    assert row["steady_seconds"] is None


@pytest.mark.parametrize("op", ["topk", "select", "sparse_mla", "write_latent", "gather_latent"])
def test_a_call_of_a_decoding_step_is_timed_in_line(op: str) -> None:
    """It takes longer than nothing does, and no longer than alone."""
    case = BenchCase(
        op, rows=8, context=4096, requests=8, phase="decode", cache="bf16", dtype=torch.bfloat16,
        index_heads=64, k=512,
    )  # fmt: skip
    rows = list(ops.run([case], CUDA, ops.Plan(frozenset({"none"}), seconds=0.01)))
    (row,) = (row for row in rows if row["kernel"] == "triton")
    assert row["steady_calls"] >= 8
    least = row["ceilings"]["least_steady_seconds"]
    assert 0 < least < row["ceilings"]["least_seconds"]
    assert 0.5 * least < row["steady_seconds"]["p50"] < row["seconds"]["p50"], row


def test_calls_in_line_are_each_made_once() -> None:
    counts = torch.zeros(5, device=CUDA)
    line = prepare_line([lambda at=at: counts[at].add_(1) for at in range(5)], CUDA)
    assert (line.how, line.calls) == ("graph", 5)
    line.run()
    assert counts.tolist() == [2.0] * 5  # once to warm up
    synchronising = prepare_line([lambda: counts.sum().item()] * 2, CUDA)
    assert synchronising.how == "launches"
