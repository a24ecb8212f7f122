"""What does a fresh recall document look like, and is an answer to it right?

A document is running text with facts dropped in at random depths: passcodes and passwords of
people, lines marked as theirs, and at most one passkey. Every fact has look-alikes with the same
phrasing and another key, and every value is drawn at random, so that an answer can come from the
context alone. This file knows neither model nor tokenizer: the caller passes a function that counts
tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

Split = Literal["train", "test"]

_FIRST_NAMES = """
Anna Ben Clara Daniel Ella Frank Grace Henry Irene Jack Kate Leo Maria Nina Oscar Paul Rosa Sam
Tara Victor Wendy Adam Bella Carl Dora Eric Fiona George Hanna Ivan Julia Karl Laura Max Nora
Otto Peter Ruth Simon Tina Walter Zoe Alan Betty Colin Diana Emma Felix
"""
FIRST_NAMES = tuple(_FIRST_NAMES.split())
_LAST_NAMES = """
Archer Baker Carter Dixon Evans Fisher Grant Harris Ingram Jones Keller Lane Mason Nolan Owens
Parker Quinn Reed Stone Turner Vance Walker Young Abbott Brooks Cole Drake Ellis Ford Gibson
Hayes Irwin Jensen Knight Lewis Miller Norris Palmer Ross Shaw Taylor Vaughn Webb York Bennett
Cooper Dalton Foster
"""
LAST_NAMES = tuple(_LAST_NAMES.split())
_WORDS = """
amber anchor apple arrow autumn basket bell bird blanket boat bottle branch bread bridge brush
bucket butter button cabin camel candle canyon carpet castle cedar cherry circle clock cloud
coffee copper coral corner cotton cricket crystal desert diamond dolphin dragon eagle ember
engine falcon feather fiddle field forest fountain garden ginger glass globe granite hammer
harbor hazel helmet hill honey island ivory jacket jungle kettle ladder lantern lemon letter
lion magnet maple marble market meadow mirror monkey moon morning mountain needle nickel ocean
olive onion orange orchid oyster paper parrot pebble pencil pepper piano pillow pilot planet
pocket pond prairie pumpkin rabbit radio raven ribbon river rocket saddle salmon sand shadow
silver spider spring squirrel star storm summer table thunder tiger timber tower trumpet tunnel
turtle valley velvet violet wagon walnut whale window winter yellow
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True)
class Question:
    """One question about a document.

    `answer` is the bare value, `reply` the sentence the demo model is trained to answer with (it
    ends with the value), `depth` the place of the fact: 0.0 at the start of the text, 1.0 at its
    end.
    """

    text: str
    answer: str
    kind: str
    depth: float
    reply: str


@dataclass(frozen=True)
class RecallDocument:
    """A text and what can be asked about it, in random order, each fact once."""

    text: str
    questions: tuple[Question, ...]

    def prompt(self, question: Question) -> str:
        """The user's message: the document, an empty line, the question."""
        return f"{self.text}\n\n{question.text}"


@dataclass(frozen=True)
class _Kind:
    """How one kind of fact is stated, asked for, and answered."""

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    reply: str


_PASSCODE = _Kind(
    "passcode",
    (
        "The passcode of {key} is {value}.",
        "For {key} the passcode is {value}.",
        "Note that {key} has the passcode {value}.",
    ),
    ("What is the passcode of {key}?", "Which passcode does {key} have?"),
    "The passcode of {key} is {value}.",
)
_PASSWORD = _Kind(
    "password",
    (
        "The password of {key} is {value}.",
        "For {key} the password is {value}.",
        "Note that {key} has the password {value}.",
    ),
    ("What is the password of {key}?", "Which password does {key} have?"),
    "The password of {key} is {value}.",
)
_PASSKEY = _Kind(
    "passkey",
    ("The passkey is {value}.", "Remember that the passkey is {value}."),
    ("What is the passkey?",),
    "The passkey is {value}.",
)
_LINE = _Kind(
    "line",
    (
        "The marked line of {key} is {value}.",
        "For {key} the marked line is {value}.",
        "Note that {key} has the marked line {value}.",
    ),
    ("What is the marked line of {key}?", "Repeat the marked line of {key}."),
    "The marked line of {key} is {value}.",
)


@dataclass(frozen=True)
class _Fact:
    kind: _Kind
    key: str
    value: str
    statement: str


def make_document(
    rng: int | random.Random,
    *,
    num_tokens: int,
    count_tokens: Callable[[str], int],
    num_facts: int = 10,
    split: Split = "test",
    filler: Sequence[str] | None = None,
) -> RecallDocument:
    """Makes a document of at least `num_tokens` tokens, and at most a line or two more.

    Args:
        rng: a seed, or a generator to draw from.
        num_tokens: length of the text by `count_tokens`.
        count_tokens: counts the tokens of a text; called once a line, then on the whole text.
        num_facts: how many facts the text holds; each becomes one question.
        split: which names may occur. No name of "test" ever occurs in "train".
        filler: lines of running text; the held-out plays shipped with the package by default.

    Raises:
        ValueError: the facts alone are longer than `num_tokens`, or a name list is too short.
    """
    rng = random.Random(rng) if isinstance(rng, int) else rng
    lines = _shipped_filler() if filler is None else filler
    facts = _draw_facts(rng, num_facts, split)
    budget = num_tokens - sum(count_tokens(fact.statement + "\n") for fact in facts)
    if budget < 0:
        need = f"{num_facts} facts need {num_tokens - budget} tokens, got {num_tokens}"
        raise ValueError(f"num_tokens: {need}; ask for fewer facts or a longer text")
    following = _following(rng, lines)
    running: list[str] = []
    while budget > 0:
        running.append(next(following))
        budget -= count_tokens(running[-1] + "\n")
    text, depths = _interleave(rng, running, [fact.statement for fact in facts])
    while count_tokens(text) < num_tokens:
        text = f"{text}\n{next(following)}"
    questions = [_ask(rng, fact, depth) for fact, depth in zip(facts, depths, strict=True)]
    rng.shuffle(questions)
    return RecallDocument(text, tuple(questions))


def is_right(answer_text: str, question: Question) -> bool:
    """Whether an answer ends with exactly the asked value.

    Case and spacing are forgiven, and so are a final full stop and quotes; a longer number that
    merely ends with the right digits is not.
    """
    given = " ".join(answer_text.lower().split()).rstrip(".!\"' ")
    wanted = question.answer.lower()
    if not given.endswith(wanted):
        return False
    before = given[: len(given) - len(wanted)]
    return not before or not (before[-1].isalnum() or before[-1] in "-.,")


@cache
def _shipped_filler() -> tuple[str, ...]:
    text = resources.files(__package__).joinpath("filler.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.split("\n") if line)


def _following(rng: random.Random, lines: Sequence[str]) -> Iterator[str]:
    """Consecutive lines from a random place on, around the end, without end."""
    start = rng.randrange(len(lines))
    while True:
        yield lines[start]
        start = (start + 1) % len(lines)


@cache
def _names(split: Split) -> tuple[str, ...]:
    """Full names of one split; one pair in eight is kept for the test split."""
    return tuple(
        f"{first} {last}"
        for i, first in enumerate(FIRST_NAMES)
        for j, last in enumerate(LAST_NAMES)
        if ((5 * i + 3 * j) % 8 == 0) == (split == "test")
    )


def _draw_facts(rng: random.Random, num_facts: int, split: Split) -> list[_Fact]:
    """Facts with keys that differ pairwise; at most one is a passkey."""
    weights = {_PASSCODE: 4, _PASSWORD: 3, _LINE: 2, _PASSKEY: 1}
    kinds = rng.choices(list(weights), weights=list(weights.values()), k=num_facts)
    names = rng.sample(_names(split), num_facts)
    first_digits = rng.sample("0123456789", 10)
    facts: list[_Fact] = []
    for i, (drawn, name) in enumerate(zip(kinds, names, strict=True)):
        kind = _PASSCODE if drawn is _PASSKEY and _PASSKEY in kinds[:i] else drawn
        value = _draw_value(rng, kind, first_digits[i % 10])
        statement = rng.choice(kind.statements).format(key=name, value=value)
        facts.append(_Fact(kind, name, value, statement))
    return facts


def _draw_value(rng: random.Random, kind: _Kind, first_digit: str) -> str:
    """A passcode takes its first digit from the caller, so that few in a document share a start."""
    if kind.name == "passcode":
        return first_digit + "".join(rng.choices("0123456789", k=3))
    if kind.name == "passkey":
        return "".join(rng.choices("0123456789", k=5))
    return " ".join(rng.sample(WORDS, 2 if kind.name == "password" else rng.randint(4, 6)))


def _interleave(
    rng: random.Random, running: list[str], statements: list[str]
) -> tuple[str, list[float]]:
    """Drops each statement before a random line; returns the text and each statement's depth."""
    gaps = [rng.randint(0, len(running)) for _ in statements]
    order = sorted(range(len(statements)), key=lambda i: gaps[i])
    pieces: list[str] = []
    starts = [0] * len(statements)
    length = taken = 0
    for i in order:
        pieces += running[taken : gaps[i]]
        length += sum(len(line) + 1 for line in running[taken : gaps[i]])
        taken = max(taken, gaps[i])
        starts[i] = length
        pieces.append(statements[i])
        length += len(statements[i]) + 1
    text = "\n".join(pieces + running[taken:])
    return text, [start / max(len(text), 1) for start in starts]


def _ask(rng: random.Random, fact: _Fact, depth: float) -> Question:
    text = rng.choice(fact.kind.questions).format(key=fact.key)
    reply = fact.kind.reply.format(key=fact.key, value=fact.value)
    return Question(text, fact.value, fact.kind.name, depth, reply)
