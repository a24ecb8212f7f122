"""Constrained text: refused early or followed to the letter, row by row and for a batch at once."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from engine.conftest import make_tokenizer
from topkapi.engine.grammar import Grammar, GrammarCompiler
from topkapi.engine.request import Request, SamplingParams, SamplingRow
from topkapi.engine.sampler import NOTHING_ALLOWED, Sampler
from topkapi.engine.token_mask import allowed_tokens, mask_
from topkapi.errors import RequestError

pytest.importorskip("llguidance")

TOKENIZER = make_tokenizer()
END = 1
VOCABULARY = len(TOKENIZER) + 7  # a model may have more logits than its tokenizer has tokens


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCABULARY, frozenset({END}))


def make_row(
    compiler: GrammarCompiler, text: str = "", drafts: str = "", **choices: Any
) -> SamplingRow:
    """A row of a request that has said `text` so far."""
    params = SamplingParams(**choices)
    request = Request(0, [5], params, 0, max_length=999, end_token_ids=(END,))
    request.grammar = compiler.start(params)
    for token in tokens(text):
        request.token_ids.append(token)
        if request.grammar is not None:
            request.grammar.advance(token)
    return SamplingRow(request, tuple(tokens(drafts)))


def tokens(text: str) -> list[int]:
    """One token a byte: what the grammar allows it allows however it is cut."""
    letters = [TOKENIZER.encode(letter, add_special_tokens=False) for letter in text]
    return [token for letter in letters for token in letter]


def allowed(rows: list[SamplingRow]) -> list[set[int]]:
    bits = np.unpackbits(allowed_tokens(rows, VOCABULARY).view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, VOCABULARY:].any()
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def begins(ids: set[int]) -> set[str]:
    return {"end" if token == END else TOKENIZER.decode([token])[0] for token in ids}


REFUSED = [
    ({"json_schema": {"type": "objekt"}}, "json_schema"),
    ({"json_schema": {"$ref": "#/$defs/none"}}, "json_schema"),
    ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "json_schema"),
    ({"json_schema": {"not": {"type": "string"}}}, "json_schema"),
    ({"json_schema": "5"}, "json_schema"),
    ({"regex": "[a-"}, "regex"),
    ({"regex": "a(?=b)"}, "regex"),
    ({"grammar": ""}, "grammar"),
    ({"grammar": 'start: "a" b'}, "grammar"),
    ({"grammar": 'root ::= "a" b'}, "grammar"),
]


@pytest.mark.parametrize(("choice", "word"), REFUSED, ids=str)
def test_what_nobody_can_follow_is_refused(
    compiler: GrammarCompiler, choice: dict[str, Any], word: str
) -> None:
    with pytest.raises(RequestError, match=f"^{word}: "):
        compiler.check(SamplingParams(**choice))


def test_masks_follow_the_text(compiler: GrammarCompiler) -> None:
    regex = "ab[0-9]{1,2}|ax"
    said = ["", "a", "ab", "ab1"]
    got = allowed([make_row(compiler, text, regex=regex) for text in said])
    digits = set("0123456789")
    assert [begins(ids) for ids in got] == [{"a"}, {"b", "x"}, digits, digits | {"end"}]


def test_drafts_count_without_moving_the_request(compiler: GrammarCompiler) -> None:
    regex = "ab[0-9]{1,2}|ax"
    row = make_row(compiler, "a", regex=regex)
    chain = [SamplingRow(row.request, tuple(tokens("b7")[:j])) for j in range(3)]
    digits = set("0123456789")
    for _ in range(2):
        got = [begins(ids) for ids in allowed(chain)]
        assert got == [{"b", "x"}, digits, digits | {"end"}]
    wrong = allowed([SamplingRow(row.request, tuple(tokens("qb"))), row])
    assert len(wrong[0]) == VOCABULARY  # never asked for: the draft before it is refused
    assert begins(wrong[1]) == {"b", "x"}


def test_the_end_is_noticed(compiler: GrammarCompiler) -> None:
    grammar = compiler.start(SamplingParams(regex="ab?"))
    assert grammar is not None
    a, b = tokens("ab")
    assert not grammar.advance(a)
    assert grammar.advance(b)
    ended = compiler.start(SamplingParams(regex="ab?"))
    assert ended is not None
    assert not ended.advance(a)
    assert ended.advance(END)
    with pytest.raises(RequestError, match="grammar"):
        compiler.start(SamplingParams(regex="ab?")).advance(b)  # type: ignore[union-attr]


def test_minimum_length_gives_way_to_the_end_of_the_grammar(compiler: GrammarCompiler) -> None:
    got = allowed(
        [
            make_row(compiler, "a", regex="a+", min_tokens=3),
            make_row(compiler, "aaa", regex="a+", min_tokens=3),
            make_row(compiler, "", regex="", min_tokens=3),
            make_row(compiler, "a", min_tokens=3),
        ]
    )
    assert [begins(ids) for ids in got[:3]] == [{"a"}, {"a", "end"}, {"end"}]
    assert got[3] == set(range(VOCABULARY)) - {END}


def test_masked_logits_of_a_mixed_batch(compiler: GrammarCompiler) -> None:
    rows = [
        make_row(compiler),
        make_row(compiler, "4", regex="[0-9]+"),
        make_row(compiler, "[", json_schema={"type": "array", "items": {"type": "integer"}}),
        make_row(compiler, min_tokens=2),
        make_row(compiler, "x", grammar='root ::= "x" "y"*'),
    ]
    logits = torch.randn(5, VOCABULARY)
    masked = logits.clone()
    mask_(masked, rows)
    for i, ids in enumerate(allowed(rows)):
        if rows[i].request.grammar is None and not rows[i].must_go_on:
            ids = set(range(VOCABULARY))
        kept = masked[i].isfinite()
        assert set(kept.nonzero()[:, 0].tolist()) == ids
        assert torch.equal(masked[i][kept], logits[i][kept])
    alone = torch.cat([_masked(logits[i : i + 1], rows[i]) for i in range(5)])
    assert torch.equal(alone, masked)


def _masked(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    logits = logits.clone()
    mask_(logits, [row])
    return logits


def test_nothing_possible_is_told_apart(compiler: GrammarCompiler) -> None:
    row = make_row(compiler, regex="a")
    logits = torch.zeros(1, VOCABULARY)
    logits[0, tokens("a")] = float("-inf")
    assert Sampler().sample(logits, [row]).token_ids.tolist() == [NOTHING_ALLOWED]


def test_more_tokens_than_logits() -> None:
    compiler = GrammarCompiler(TOKENIZER, 40, frozenset({END}))
    row = make_row(compiler, regex="[!a-z]+")
    assert allowed_tokens([row], 40).shape == (1, 2)
    logits = torch.zeros(1, 40)
    mask_(logits, [row])
    assert TOKENIZER.decode(logits.isfinite()[0].nonzero()[:, 0].tolist()) == "!"


def test_compiled_once_and_apart(compiler: GrammarCompiler) -> None:
    params = SamplingParams(regex="[a-f]{3}z")
    first, second = compiler.start(params), compiler.start(params)
    assert first is not None
    assert second is not None
    first.advance(tokens("a")[0])
    mask = np.zeros((2, first.num_words), dtype=np.int32)
    Grammar.fill([first, second], mask)
    assert (mask[0] == mask[1]).all()
    first.advance(tokens("b")[0])
    first.advance(tokens("c")[0])
    Grammar.fill([first, second], mask)
    assert (mask[0] != mask[1]).any()
    for i in range(100):  # more than are kept
        compiler.check(SamplingParams(regex=f"q{i}"))


def test_without_the_library_or_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(regex="a")
    with pytest.raises(RequestError, match="no tokenizer"):
        GrammarCompiler(None, 10).check(params)
    with pytest.raises(RequestError, match="this tokenizer"):
        GrammarCompiler(object(), 10).check(params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"topkapi\[structured\]"):
        GrammarCompiler(TOKENIZER, 10).check(params)
    assert GrammarCompiler(None, 10).start(SamplingParams()) is None
