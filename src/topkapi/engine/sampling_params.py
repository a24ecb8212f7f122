"""What may the caller of one request choose about its tokens and its end?

`SamplingParams` is frozen, validated on its own, hashable, and knows neither model nor tokenizer:
what only they can tell (an unknown token id, a schema nobody can follow) the engine checks.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from topkapi.errors import RequestError

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
# The ranges of the OpenAI interface.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
_SEED_STEP = 0xD1342543DE82EF95
_STRUCTURES = ("json_schema", "regex", "grammar")


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
            of the model's own distribution (before penalties, temperature and filters).
        ignore_eos: go on past the model's end token.
        skip_special_tokens: leave special tokens out of the text.
        repetition_penalty: logits of tokens of prompt or output are divided by this where positive
            and multiplied where not, in (0, 100]; 1 changes nothing (Keskar et al. 2019).
        presence_penalty: taken from the logit of every token of the output, in [-2, 2].
        frequency_penalty: taken as often as the token is in the output, in [-2, 2].
        logit_bias: token id to what is added to its logit, in [-100, 100]. Kept as pairs.
        min_tokens: no end token, stop token or stop string ends the request before this many.
        n: completions of the prompt, each a request of its own (`completions`).
        prompt_logprobs: as `logprobs`, for the tokens of the prompt.
        json_schema: the text is JSON that this schema (a mapping, or JSON text) allows. Kept as
            JSON text.
        regex: the whole text matches this expression (of Rust's `regex`: no look-around).
        grammar: the text is a sentence of this grammar, in Lark or GBNF notation.

    Logits change in the order repetition, frequency and presence penalty, bias, allowed tokens;
    then the filters apply in the order temperature, top_k, top_p, min_p. At most one of
    `json_schema`, `regex` and `grammar` may be set; the request ends when nothing can follow.
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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    min_tokens: int = 0
    n: int = 1
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        stop = _items("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop: expected non-empty strings, got {text!r}")
        listed = _items("stop_token_ids", self.stop_token_ids)
        ids = tuple(_whole("stop_token_ids", item, least=0) for item in listed)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _json_text("json_schema", self.json_schema))
        structures = [name for name in _STRUCTURES if getattr(self, name) is not None]
        if len(structures) > 1:
            raise RequestError(f"expected at most one of {', '.join(_STRUCTURES)}, got several")
        for name in structures:
            if not isinstance(getattr(self, name), str):
                raise RequestError(f"{name}: expected a text, got {getattr(self, name)!r}")

    def _check_numbers(self) -> None:
        _in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        repetition = self.repetition_penalty
        _in_range("repetition_penalty", repetition, 0.0, MAX_REPETITION_PENALTY, open_low=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _in_range(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        for name, least in (("top_k", 0), ("min_tokens", 0), ("n", 1)):
            _whole(name, getattr(self, name), least=least)
        optional = (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0), ("seed", None))
        for name, lowest in optional:
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), least=lowest)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: expected at most max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as the tuple it was normalised to."""
        return tuple(self.stop)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as the pairs it was normalised to."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the next one's logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def structure(self) -> tuple[str, str] | None:
        """What the text must obey, as the field's name and value; None for free text."""
        for name in _STRUCTURES:
            value = getattr(self, name)
            if value is not None:
                return name, value
        return None

    def completions(self) -> list[SamplingParams]:
        """Params of each of the `n` completions, one request each. With a seed, the first keeps it
        and the others get seeds far from it.
        """
        if self.n == 1:
            return [self]
        return [
            dataclasses.replace(
                self, n=1, seed=None if self.seed is None else self.seed + place * _SEED_STEP
            )
            for place in range(self.n)
        ]


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


def _bias(values: object) -> tuple[tuple[int, float], ...]:
    listed = values.items() if isinstance(values, Mapping) else _items("logit_bias", values)
    pairs: dict[int, float] = {}
    for pair in listed:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise RequestError(f"logit_bias: expected a token id and a number, got {pair!r}")
        token_id = _whole("logit_bias", pair[0], least=0)
        _in_range("logit_bias", pair[1], -MAX_BIAS, MAX_BIAS)
        pairs[token_id] = float(pair[1])
    return tuple(pairs.items())


def _json_text(name: str, schema: object) -> str:
    """A schema as JSON text, which can be compared and hashed."""
    try:
        if isinstance(schema, str):
            json.loads(schema)
            return schema
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name}: expected a JSON schema: {error}") from error
