"""Are peers' own calls given what they want, and is what they leave behind judged rightly?

Fakes with the packages' signatures compute the reference; the packages need a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from topkapi import reference
from topkapi.bench import bare
from topkapi.bench.cases import BenchCase
from topkapi.bench.inputs import make_inputs
from topkapi.kernels.external.deep_gemm import Scoring
from topkapi.layout.index_key import fp8_page_views

CPU = torch.device("cpu")
SCORING: dict[str, Any] = {"index_heads": 4, "index_dim": 128, "cache": "fp8", "query": "e4m3"}
RAGGED = BenchCase("indexer_logits", rows=5, context=256, **SCORING)
PAGED = BenchCase("indexer_logits", rows=3, context=192, requests=3, phase="decode", **SCORING)


def score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> Any:
    return reference.indexer.score(q.float(), weights, keys.float(), scales)


def ragged(
    q: Any,
    keys: Any,
    weights: Any,
    begins: Any,
    ends: Any,
    *,
    clean_logits: bool,
    max_seqlen_k: int,
) -> torch.Tensor:
    assert not clean_logits
    assert begins.dtype == ends.dtype == torch.int32
    assert int(begins.max()) == 0
    logits = score(q, weights, *keys)
    assert logits.shape[1] == max_seqlen_k
    return logits  # columns outside a row's range are garbage


def schedule(lengths: torch.Tensor, page: int, num_sms: int) -> tuple[int, ...]:
    assert (lengths.shape[1], page) == (1, 64)
    return (page, num_sms)


def paged(
    q: Any, cache: Any, weights: Any, lengths: Any, table: Any, plan: Any, width: int,
    *, clean_logits: bool,
) -> torch.Tensor:  # fmt: skip
    assert table.dtype == lengths.dtype == torch.int32
    assert plan[0] == 64
    keys, scales = fp8_page_views(cache.view(cache.shape[0], -1), q.shape[-1], 64)
    rows = []
    for row, pages in enumerate(table.long()):
        part = keys[pages].reshape(-1, q.shape[-1]), scales[pages].reshape(-1)
        rows.append(score(q[row], weights[row][None], *part)[0, :width])
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("case", "lay_out"), [(RAGGED, bare.ragged_scores), (PAGED, bare.paged_scores)]
)
def test_scores_are_those_of_the_reference(case: BenchCase, lay_out: Any) -> None:
    arguments = make_inputs(case, CPU)
    call = lay_out(Scoring(ragged, paged, schedule), **arguments)
    got = bare.cleaned(call(), arguments["context"])
    want = reference.indexer_logits(**{**arguments, "q": arguments["q"].float()})
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_selections_come_in_any_order() -> None:
    case = BenchCase("topk", rows=3, context=100, k=16)
    arguments = make_inputs(case, CPU)
    want = reference.topk(**arguments)

    def sgl(logits: Any, out: Any, lengths: Any, starts: Any) -> None:
        assert starts is None
        out.copy_(want.flip(1))

    def vllm(
        logits: Any, begins: Any, ends: Any, out: Any, rows: int, a: int, b: int, k: int
    ) -> None:
        assert (rows, a, b, k) == (3, 100, 1, 16)
        assert begins.tolist() == [0, 0, 0]
        out.copy_(want.flip(1))

    for make, peer in ((bare.sgl_topk, sgl), (bare.vllm_topk, vllm)):
        got = make(peer, **arguments)()
        assert torch.equal(got.sort(1).values, want)


def test_a_peer_that_refuses_has_no_bare_call() -> None:
    case = BenchCase("topk", rows=3, context=4000, k=2048)
    arguments = make_inputs(case, CPU)
    for name in ("sgl_kernel", "vllm", "flashinfer", "triton"):
        assert bare.bare_call(name, case, arguments) is None
    assert bare.bare_call("deep_gemm", PAGED, make_inputs(PAGED, CPU)) is None
    assert bare.bare_call("deep_gemm", case, arguments) is None
