"""Sampling choices are validated where they are made."""

from __future__ import annotations

import dataclasses

import pytest

from topkapi.engine.sampling_params import SamplingParams
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
    ("repetition_penalty", 0),
    ("repetition_penalty", 101),
    ("presence_penalty", -2.1),
    ("frequency_penalty", float("nan")),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"7": 1.0}),
    ("logit_bias", {7: 101}),
    ("logit_bias", [7]),
    ("logit_bias", 7),
    ("min_tokens", -1),
    ("min_tokens", 257),  # more than max_tokens
    ("n", 0),
    ("prompt_logprobs", -1),
    ("json_schema", "{"),
    ("json_schema", {"enum": [float("nan")]}),
    ("json_schema", {"enum": [object()]}),
    ("regex", 5),
    ("grammar", b"start: x"),
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


def test_params_are_hashable_and_can_be_replaced() -> None:
    params = SamplingParams(logit_bias={3: 1, 4: -2.5}, json_schema={"type": "object"}, stop=["a"])
    assert params.bias == ((3, 1.0), (4, -2.5))
    assert params.structure == ("json_schema", '{"type": "object"}')
    again = dataclasses.replace(params, temperature=0.5)
    assert again.bias == params.bias
    assert hash(again) != hash(params)
    assert hash(dataclasses.replace(again, temperature=1.0)) == hash(params)


def test_one_structure_at_most() -> None:
    with pytest.raises(RequestError, match="at most one"):
        SamplingParams(regex="a", grammar="start: /a/")


def test_completions_are_requests_of_their_own() -> None:
    params = SamplingParams(n=3, seed=5, top_k=2)
    parts = params.completions()
    assert [part.n for part in parts] == [1, 1, 1]
    assert parts[0] == dataclasses.replace(params, n=1)
    assert len({part.seed for part in parts}) == 3
    assert [part.seed for part in SamplingParams(n=2).completions()] == [None, None]
    assert SamplingParams().completions() == [SamplingParams()]
