"""Sampling choices are validated where they are made."""

from __future__ import annotations

import dataclasses

import pytest

from topkapi.engine.request import Request, SamplingParams
from topkapi.errors import RequestError

OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 101),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("top_k", -1),
    ("top_k", 2.5),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("logprobs", -1),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [3]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_edges_are_accepted_and_stop_is_normalised() -> None:
    params = SamplingParams(
        temperature=0, top_p=1, min_p=1, top_k=1, max_tokens=None, logprobs=0, seed=-3, stop="ab"
    )
    assert params.stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (3,)


def test_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]


def test_request_counts_prompt_and_output() -> None:
    request = Request(0, [5, 6, 7], SamplingParams(), seed=1, max_length=10)
    request.token_ids.append(8)
    assert (request.num_prompt, request.num_tokens, request.num_output) == (3, 4, 1)
    assert request.output_token_ids == [8]
