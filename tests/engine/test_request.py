"""A request keeps count of its tokens."""

from __future__ import annotations

from topkapi.engine.request import Request, SamplingParams, SamplingRow


def test_request_counts_prompt_and_output() -> None:
    request = Request(0, [5, 6, 7], SamplingParams(), seed=1, max_length=10)
    request.token_ids.append(8)
    assert (request.num_prompt, request.num_tokens, request.num_output) == (3, 4, 1)
    assert request.output_token_ids == [8]


def test_a_row_of_logits_counts_its_drafts() -> None:
    request = Request(0, [5, 6, 7], SamplingParams(min_tokens=3), seed=1, max_length=10)
    request.token_ids.append(8)
    row = SamplingRow(request, (9,))
    assert (row.index, row.must_go_on) == (2, False)
    request.end_token_ids = (1,)
    assert row.must_go_on
    assert not SamplingRow(request, (9, 9)).must_go_on
