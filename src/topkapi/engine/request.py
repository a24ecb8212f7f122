"""What is a request on its way through the engine, and what comes back?

`Request` is the engine's record of one prompt under way; `RequestUpdate` and `RequestOutput` are
what leaves the engine. Nothing here knows a model, a cache or a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from topkapi.cache.leases import Lease
from topkapi.engine.grammar import Grammar
from topkapi.engine.sampling_params import SamplingParams
from topkapi.errors import RequestError

__all__ = [
    "FinishReason",
    "Prompt",
    "Request",
    "RequestOutput",
    "RequestUpdate",
    "Sampled",
    "SamplingParams",
    "SamplingRow",
    "TokenLogprob",
    "Urgency",
]

FinishReason = Literal["stop", "length", "error", "abort", "timeout"]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Urgency:
    """When a request runs, and how long it may take.

    Lower `priority` runs first, 0 is the usual, and equals go by arrival. `timeout` is in seconds
    from arrival; a request that takes longer ends with what it has and `finish_reason` `timeout`.
    Raises `RequestError` for a priority that is no whole number or a timeout that is not positive.
    """

    priority: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise RequestError(f"priority: expected a whole number, got {self.priority!r}")
        if self.timeout is None:
            return
        number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not number or not self.timeout > 0:
            raise RequestError(f"timeout: expected seconds, more than 0, got {self.timeout!r}")


@dataclass(frozen=True)
class TokenLogprob:
    """The natural-log probability of one chosen token, and the best ones at its place."""

    token_id: int
    logprob: float
    top: dict[int, float]


# What a step gives a request: a token, or the run of tokens that speculation found.
Sampled = TokenLogprob | list[TokenLogprob]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    `token_ids` are the new tokens, the one that ended the request included; `text` leaves out that
    token, the stop string and what followed it. `stop_reason` is the stop string or stop token id
    that ended it, None for the model's own end token. `error` is set exactly when `finish_reason`
    is `error`; what had been generated until then is kept, as it is on `abort` and `timeout`.
    `num_cached_tokens` of the prompt were in the prefix cache. `prompt_logprobs` has one entry a
    prompt token, None for the first, which nothing predicts; it is shorter where the request ended
    before its prompt was computed.
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
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_rounds: int = 0
    num_accepted: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verifying step gave on average, 1 when no draft was right; None without any."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else None


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
    first ran, None before. `end_token_ids` may not be chosen before `params.min_tokens`. `grammar`
    is its place in what constrains it, None for free text. `prompt_logprobs` are those of prompt
    tokens 1, 2, ... as far as they are known.
    `num_rounds` steps verified drafts, of which `num_accepted` were right. The draft layer has
    still to follow the last `num_unfollowed` of the computed tokens.
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
    end_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_rounds: int = 0
    num_accepted: int = 0
    num_unfollowed: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """What runs before what: the more urgent, then the earlier."""
        return self.priority, self.request_id

    @property
    def num_skippable(self) -> int:
        """How many of the first tokens need not run where the cache holds them: all but the last,
        and as far as prompt log-probabilities that are wanted are known.
        """
        known = len(self.prompt_logprobs)
        if self.params.prompt_logprobs is not None and known < self.num_prompt - 1:
            return known
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


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits: the request whose next token it gives.

    `drafts` are tokens proposed after the request's own, which this row already counts as chosen:
    a verifying step has one row for each number of drafts accepted.
    """

    request: Request
    drafts: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        """Place of the row's token among the request's output tokens."""
        return self.request.num_output + len(self.drafts)

    @property
    def must_go_on(self) -> bool:
        """Whether the request's end may not be chosen yet."""
        early = self.index < self.request.params.min_tokens
        return early and bool(self.request.end_token_ids)

    @property
    def changes_logits(self) -> bool:
        """Whether the token is chosen from other logits than the model's own."""
        params = self.request.params
        return bool(
            params.penalises or params.bias or self.request.grammar is not None or self.must_go_on
        )
