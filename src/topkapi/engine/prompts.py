"""Which completions does a call ask for: of one prompt or several, with one choice or one for each?

Knows no engine and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from topkapi.engine.request import Prompt, SamplingParams
from topkapi.errors import ConfigError, RequestError


def completions(
    prompts: Sequence[Prompt | RequestError], params: Sequence[SamplingParams]
) -> Iterator[tuple[Prompt | RequestError, SamplingParams]]:
    """Every completion wanted, prompt by prompt."""
    for prompt, choice in zip(prompts, params, strict=True):
        for completion in choice.completions():
            yield prompt, completion


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or a list that holds a number) or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and not any(isinstance(item, str | Sequence) for item in items):
        return [cast("list[int]", items)]
    return cast("list[Prompt]", items)


def one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """`count` of them. Raises `ConfigError` for a list of another length."""
    params = SamplingParams() if params is None else params
    several = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(several) != count or not all(isinstance(item, SamplingParams) for item in several):
        raise ConfigError(
            f"sampling_params: expected one SamplingParams, or a list of {count}, got {params!r}"
        )
    return several
