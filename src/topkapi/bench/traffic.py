"""What do users send, and when? Seeded requests for `topkapi bench serve`, as data.

Arrivals are a Poisson process, lengths are drawn log-uniformly from ranges, and some requests begin
with a system prompt that others begin with, too. When, how long and what are drawn from streams of
their own, so that another rate sends the same requests. Knows no engine and no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from topkapi.errors import ConfigError

# (where to draw from, how many): token ids.
TokenSource = Callable[[random.Random, int], list[int]]


@dataclass(frozen=True)
class LengthRange:
    """Tokens from `low` to `high`, each doubling as likely as any other."""

    low: int
    high: int

    def draw(self, rng: random.Random, scale: float) -> int:
        """A length, scaled, at least 1."""
        exponent = rng.uniform(math.log(self.low), math.log(self.high + 1))
        return max(1, int(math.exp(exponent) * scale))


@dataclass(frozen=True)
class Kind:
    """One kind of request, `share` of the traffic."""

    share: float
    prompt: LengthRange
    output: LengthRange


_CHAT = (LengthRange(32, 512), LengthRange(16, 128))
_DOCUMENT = (LengthRange(2048, 6144), LengthRange(16, 64))
MIXES: Mapping[str, tuple[Kind, ...]] = MappingProxyType(
    {
        "short-chat": (Kind(1.0, *_CHAT),),
        "long-document": (Kind(1.0, *_DOCUMENT),),
        "mixed": (Kind(0.8, *_CHAT), Kind(0.2, *_DOCUMENT)),
    }
)


@dataclass(frozen=True)
class Traffic:
    """Which traffic to make.

    `rate` is in requests a second; `inf` sends all at once. `prefixes` system prompts of
    `prefix_tokens` each are shared out evenly at random; 0 is none. `length_scale` multiplies every
    drawn length. Raises `ConfigError` naming what cannot be.
    """

    mix: str = "mixed"
    requests: int = 32
    rate: float = math.inf
    prefixes: int = 0
    prefix_tokens: int = 512
    length_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mix not in MIXES:
            raise ConfigError(f"mix: expected one of {', '.join(MIXES)}, got {self.mix!r}")
        for name, least in (("requests", 1), ("prefixes", 0), ("prefix_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("rate", "length_scale"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class PlannedRequest:
    """`arrival` is in seconds after the start; `group` numbers its system prompt."""

    arrival: float
    prompt: tuple[int, ...]
    max_tokens: int
    group: int | None = None


def plan(traffic: Traffic, tokens: TokenSource, longest: int) -> list[PlannedRequest]:
    """All requests, in order of arrival.

    Prompt and output together stay within `longest` tokens: prompts are cut. Raises `ConfigError`
    where that leaves less than one token after the system prompt.
    """
    when, what, how_long = (random.Random(f"{traffic.seed} {name}") for name in ("t", "w", "l"))
    systems = [tokens(what, traffic.prefix_tokens) for _ in range(traffic.prefixes)]
    arrival, planned = 0.0, []
    for _ in range(traffic.requests):
        length, output = _draw(how_long, MIXES[traffic.mix], traffic.length_scale)
        group = what.randrange(len(systems)) if systems else None
        system: Sequence[int] = [] if group is None else systems[group]
        length = min(length, longest - output - len(system))
        if length < 1:
            raise ConfigError(
                f"a system prompt of {len(system)} tokens and an output of {output} do not fit the "
                f"model's {longest}: lower prefix_tokens or length_scale"
            )
        prompt = (*system, *tokens(what, length))
        planned.append(PlannedRequest(arrival, prompt, output, group))
        arrival += 0.0 if math.isinf(traffic.rate) else when.expovariate(traffic.rate)
    return planned


def _draw(rng: random.Random, kinds: Sequence[Kind], scale: float) -> tuple[int, int]:
    """Prompt and output length of one request."""
    kind = rng.choices(kinds, weights=[kind.share for kind in kinds])[0]
    return kind.prompt.draw(rng, scale), kind.output.draw(rng, scale)


def random_tokens(vocabulary: int, excluded: frozenset[int] = frozenset()) -> TokenSource:
    """Any token ids but the excluded ones (those that end a text, above all)."""
    allowed = [token for token in range(vocabulary) if token not in excluded]
    return lambda rng, count: rng.choices(allowed, k=count)


def windows_of(text: Sequence[int]) -> TokenSource:
    """Stretches of a text, from anywhere in it; it begins again where it ends."""
    return lambda rng, count: _window(text, rng.randrange(len(text)), count)


def _window(text: Sequence[int], start: int, count: int) -> list[int]:
    return [text[(start + place) % len(text)] for place in range(count)]
