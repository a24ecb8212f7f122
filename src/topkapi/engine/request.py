"""What is a request, what may its caller choose, and what comes back?

`SamplingParams` is frozen and validated on its own; `Request` is the engine's record of one prompt
under way; `RequestUpdate` and `RequestOutput` are what leaves the engine. Nothing here knows a
model, a cache or a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from topkapi.cache.leases import Lease
from topkapi.errors import RequestError

FinishReason = Literal["stop", "length", "error", "abort", "timeout"]
Prompt = str | Sequence[int]

MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        temperature: 0 is greedy (the lowest token id among ties); at most 100.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep this many tokens; 0 keeps all.
        min_p: drop tokens less probable than this share of the most probable one, in [0, 1].
        max_tokens: new tokens at most; None goes on until the context is full.
        stop: strings that end the text; the text ends before the first one. A single string is
            accepted.
        stop_token_ids: token ids that end the request beside the model's own end token.
        seed: makes sampling repeatable whatever else runs in the batch; None draws one.
        logprobs: None for none; n gives each chosen token's log-probability and the n best ones,
            of the model's own distribution (before temperature and filters).
        ignore_eos: go on past the model's end token.
        skip_special_tokens: leave special tokens out of the text.

    The filters apply in the order temperature, top_k, top_p, min_p.
    Raises `RequestError` naming the first field out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _whole("top_k", self.top_k, least=0)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, least=1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, least=0)
        if self.seed is not None:
            _whole("seed", self.seed, least=None)
        stop = _items("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop: expected non-empty strings, got {text!r}")
        listed = _items("stop_token_ids", self.stop_token_ids)
        ids = tuple(_whole("stop_token_ids", item, least=0) for item in listed)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as the tuple it was normalised to."""
        return tuple(self.stop)


def _in_range(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and low <= value <= high and not (open_low and value == low):  # type: ignore[operator]
        return
    bracket = "(" if open_low else "["
    raise RequestError(f"{name}: expected a number in {bracket}{low:g}, {high:g}], got {value!r}")


def _items(name: str, values: object) -> tuple[object, ...]:
    if not isinstance(values, Iterable):
        raise RequestError(f"{name}: expected a list, got {values!r}")
    return tuple(values)


def _whole(name: str, value: object, *, least: int | None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name}: expected a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise RequestError(f"{name}: expected at least {least}, got {number}")
    return number


@dataclass(frozen=True)
class TokenLogprob:
    """The natural-log probability of one chosen token, and the best ones at its place."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    `token_ids` are the new tokens, the one that ended the request included; `text` leaves out that
    token, the stop string and what followed it. `stop_reason` is the stop string or stop token id
    that ended it, None for the model's own end token. `error` is set exactly when `finish_reason`
    is `error`; what had been generated until then is kept. `num_cached_tokens` of the prompt were
    in the prefix cache.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class RequestUpdate:
    """What one step added to one request.

    `text` may be empty (half a character, or the possible start of a stop string, is held back) and
    all of a request's updates joined are its output's text. `output` is set on the last one.
    """

    request_id: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended, None while it goes on."""
        return None if self.output is None else self.output.finish_reason


@dataclass(eq=False)
class Request:
    """One prompt under way.

    `token_ids` holds prompt and output together; the first `num_computed` of them are in the cache,
    in the pages of `lease`. Row `row` of the request-to-token table names the slots of the first
    `num_mapped` of them. `max_length` bounds `len(token_ids)`. Lower `priority` runs first;
    `deadline` is a time of the engine's clock. `num_cached` tokens were in the prefix cache when it
    first ran, None before.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    max_length: int
    prompt: str | None = None
    num_prompt: int = field(init=False)
    num_computed: int = 0
    lease: Lease | None = None
    row: int | None = None
    num_mapped: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    priority: int = 0
    deadline: float | None = None
    num_cached: int | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """What runs before what: the more urgent, then the earlier."""
        return self.priority, self.request_id

    @property
    def num_skippable(self) -> int:
        """How many first tokens need not run where the cache holds them: all but the last."""
        return self.num_tokens - 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, as a new list."""
        return self.token_ids[self.num_prompt :]
