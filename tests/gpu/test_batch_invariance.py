"""On a GPU, too, deterministic steps give a row its bits whatever shares its batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cases import SelectCase
from topkapi import ops, reference
from topkapi.attention.index_queries import quantize_index_query
from topkapi.errors import KernelRefusedError
from topkapi.models.row_invariant import RowInvariant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROWS = 300


@pytest.fixture(scope="module", params=[(16, "bf16"), (128, "bf16"), (16, "fp8"), (128, "fp8")])
def arguments(request: pytest.FixtureRequest) -> dict[str, Any]:
    heads, cache_format = request.param
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    cache = normal(5056, 1, 576)
    if cache_format == "fp8":
        records = torch.zeros(5056, 1, 656, dtype=torch.uint8, device="cuda")
        slots = torch.arange(5056, device="cuda")
        reference.write_latent(records, slots, cache[:, 0, :512], cache[:, 0, 512:])
        cache = records
    slots = torch.randint(0, 5056, (ROWS, 2048), generator=generator, device="cuda").int()
    return {"q": normal(ROWS, heads, 576), "kv_cache": cache, "slots": slots, "scale": 0.05}


@pytest.mark.parametrize("rows", [(0, 1), (7, 15), (1, 200), (299, 300)])
def test_a_row_alone_and_among_many(arguments: dict[str, Any], rows: tuple[int, int]) -> None:
    part = slice(*rows)
    whole = ops.sparse_mla(**arguments, batch_invariant=True)
    some = {**arguments, "q": arguments["q"][part], "slots": arguments["slots"][part]}
    for phase in ("prefill", "decode"):
        alone = ops.sparse_mla(**some, batch_invariant=True, phase=phase)  # type: ignore[arg-type]
        for one, many in zip(alone, whole, strict=True):
            assert torch.equal(one, many[part]), phase


def test_a_kernel_that_cannot_promise_it_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(KernelRefusedError, match="bits depend on its batch"):
        ops.sparse_mla(**arguments, batch_invariant=True, kernel="torch")


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("heads", [64, 32])
def test_scores_of_a_prompt_and_of_decoding_are_the_same_bits(
    cache: torch.dtype, quantized: bool, heads: int
) -> None:
    """A row among the 200 of its prompt, among other requests, and alone."""
    if quantized and cache != torch.uint8:
        pytest.skip("float keys take float queries")
    case = SelectCase("", (200,), (3000,), k=512, heads=heads, cache=cache, dtype=torch.bfloat16)
    inputs = case.make("cuda")
    if quantized:
        inputs["q"], inputs["weights"] = quantize_index_query(inputs["q"], inputs["weights"])
    prompt = inputs["context"]
    k = inputs.pop("k")
    whole = ops.indexer_logits(**inputs)
    chosen = ops.select(**inputs, k=k, batch_invariant=True)
    for rows in ([199], [0, 57, 58, 150], list(range(3, 67))):
        index = torch.tensor(rows, device="cuda")
        one_each = torch.arange(len(rows) + 1, dtype=torch.int32, device="cuda")
        context = replace(
            prompt,
            lengths=prompt.lengths[index],
            request_of_row=one_each[:-1],
            cu_seqlens_q=one_each,
            max_seq_len_q=1,
            table_rows=prompt.table_rows.expand(len(rows)).contiguous(),
        )
        some = {**inputs, "q": inputs["q"][index], "weights": inputs["weights"][index]}
        some["context"] = context
        assert torch.equal(ops.indexer_logits(**some), whole[index]), rows
        assert torch.equal(ops.select(**some, k=k, batch_invariant=True), chosen[index]), rows


@pytest.mark.parametrize("width", [64, 1536, 7168, 16384])
def test_a_norm_does_not_depend_on_the_number_of_rows(width: int) -> None:
    x = torch.randn(300, width, device="cuda")
    with RowInvariant():
        whole = x.pow(2).mean(-1, keepdim=True)
        for first, last in ((0, 1), (1, 3), (3, 10), (10, 40), (40, 300)):
            assert torch.equal(x[first:last].pow(2).mean(-1, keepdim=True), whole[first:last])
    torch.testing.assert_close(whole, x.pow(2).mean(-1, keepdim=True))
