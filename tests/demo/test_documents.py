"""Are recall documents reproducible, honest and of the asked length; is judging answers fair?"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from topkapi.demo.documents import (
    FIRST_NAMES,
    LAST_NAMES,
    Question,
    RecallDocument,
    is_right,
    make_document,
)

FILLER = tuple(f"Line {i} of some running text that says nothing of note." for i in range(200))


def count_words(text: str) -> int:
    return len(text.split())


def make(seed: int, **options: object) -> RecallDocument:
    settings: dict[str, object] = {"num_tokens": 600, "count_tokens": count_words, **options}
    return make_document(seed, **settings)  # type: ignore[arg-type]


def names_in(text: str) -> set[str]:
    every = (f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES)
    return {name for name in every if name in text}


@pytest.mark.parametrize("num_tokens", [400, 1000, 4096])
def test_length_is_at_least_the_asked_one_and_little_more(num_tokens: int) -> None:
    longest = max(count_words(line) for line in FILLER)
    for seed in range(5):
        document = make(seed, num_tokens=num_tokens, filler=FILLER)
        assert num_tokens <= count_words(document.text) <= num_tokens + longest


def test_same_seed_same_document_and_another_seed_another() -> None:
    assert make(3) == make(3)
    assert make(3) == make_document(random.Random(3), num_tokens=600, count_tokens=count_words)
    assert make(3) != make(4)


@pytest.mark.parametrize("num_facts", [1, 2, 17, 48])
def test_every_fact_is_asked_once_and_stated_once(num_facts: int) -> None:
    document = make(5, num_tokens=2000, num_facts=num_facts, filler=FILLER)
    assert len(document.questions) == num_facts
    assert len({question.text for question in document.questions}) == num_facts
    for question in document.questions:
        stating = [
            line for line in document.text.split("\n") if line.endswith(f"{question.answer}.")
        ]
        assert len(stating) == 1, question


def test_depth_says_where_the_fact_stands() -> None:
    document = make(6, num_tokens=2000, num_facts=20, filler=FILLER)
    for question in document.questions:
        line = next(x for x in document.text.split("\n") if x.endswith(f"{question.answer}."))
        assert question.depth == pytest.approx(document.text.index(line) / len(document.text))
    depths = [question.depth for question in document.questions]
    assert min(depths) < 0.3
    assert max(depths) > 0.7


def test_the_answer_depends_on_the_context() -> None:
    """The same question never has the same answer in the documents of different seeds."""
    answers: dict[str, set[str]] = {}
    asked = 0
    for seed in range(60):
        for question in make(seed, num_tokens=900, num_facts=40, filler=FILLER).questions:
            if question.kind in ("passcode", "password"):
                asked += 1
                answers.setdefault(question.reply.removesuffix(f"{question.answer}."), set()).add(
                    question.answer
                )
    assert asked > 1000
    repeated = asked - sum(len(values) for values in answers.values())
    assert repeated <= asked * 0.005


def test_names_of_the_splits_do_not_meet() -> None:
    drawn = {
        split: set().union(
            *(
                names_in(make(seed, num_tokens=900, num_facts=40, filler=FILLER, split=split).text)
                for seed in range(30)
            )
        )
        for split in ("train", "test")
    }
    assert len(drawn["train"]) > 300
    assert len(drawn["test"]) > 150
    assert not drawn["train"] & drawn["test"]


def test_look_alikes_differ_in_key_and_value() -> None:
    document = make(8, num_tokens=1500, num_facts=40, filler=FILLER)
    for one, other in combinations(document.questions, 2):
        if one.kind == other.kind:
            assert not is_right(one.reply, other) or one.answer == other.answer


def test_shipped_filler_is_long_plain_text() -> None:
    document = make_document(1, num_tokens=40_000, count_tokens=count_words)
    lines = document.text.split("\n")
    assert len(lines) > 4000
    assert all(line and line == line.strip() for line in lines)


def test_too_many_facts_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"num_tokens: 10 facts need .* fewer facts"):
        make(1, num_tokens=20)


QUESTION = Question(
    "What is the passcode of Ann Lee?", "0417", "passcode", 0.5, "The passcode of Ann Lee is 0417."
)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (QUESTION.reply, True),
        ("0417", True),
        ("  the passcode IS\n0417.  ", True),
        ('It is "0417".', True),
        ("10417", False),
        ("1-0417", False),
        ("0417 or 0418", False),
        ("The passcode of Ann Lee is 417.", False),
        ("", False),
    ],
)
def test_is_right(answer: str, right: bool) -> None:
    assert is_right(answer, QUESTION) is right


def test_is_right_for_words() -> None:
    question = replace(QUESTION, answer="lemon river", reply="The password of Ann is lemon river.")
    assert is_right("The password of Ann is Lemon  River.", question)
    assert not is_right("The password of Ann is lemon.", question)
    assert not is_right("The password of Ann is watermelon river.", question)


def test_prompt_puts_the_question_after_an_empty_line() -> None:
    document = make(2)
    question = document.questions[0]
    assert document.prompt(question) == f"{document.text}\n\n{question.text}"
