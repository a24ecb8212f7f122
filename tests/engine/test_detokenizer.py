"""Text that arrives token by token: whole characters only, and cut at stop strings."""

from __future__ import annotations

import random

import pytest

from topkapi.engine.detokenizer import Detokenizer, OutputText


class Bytes:
    """A tokenizer whose token ids are bytes of UTF-8; 256 is a special token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        parts, run = [], bytearray()
        for token in token_ids:
            if token < 256:
                run.append(token)
            elif not skip_special_tokens:
                parts.append(run.decode(errors="replace") + "<end>")
                run.clear()
        return "".join(parts) + run.decode(errors="replace")


TEXTS = [
    "",
    "plain",
    "für die Größe",
    "日本語テキスト",
    "🙂🙃 mixed é🙂",
    "e\u0301 combining \u200d",
]


def stream(data: bytes, prompt: bytes = b"") -> list[str]:
    detokenizer = Detokenizer(Bytes(), list(prompt))
    return [detokenizer.push(byte) for byte in data] + [detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "a", "ein Größerer"])
def test_characters_come_whole(text: str, prompt: str) -> None:
    parts = stream(text.encode() * 9, prompt.encode())
    assert "".join(parts) == text * 9
    assert not any("\ufffd" in part for part in parts)


def test_a_character_cut_off_at_the_end_is_shown_as_it_stands() -> None:
    parts = stream("a🙂".encode()[:-1])
    assert parts == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_give_the_text_of_the_whole(seed: int) -> None:
    data = random.Random(seed).randbytes(400)
    assert "".join(stream(data)) == data.decode(errors="replace")


def test_a_real_replacement_character_gets_out() -> None:
    assert "".join(stream("a\ufffd\ufffd\ufffd\ufffdb".encode())) == "a\ufffd\ufffd\ufffd\ufffdb"


def test_a_prompt_that_ends_inside_a_character_is_left_alone() -> None:
    data = "é".encode()
    assert stream(data[1:] + b"a", data[:1]) == ["", "\ufffda", ""]


def test_special_tokens() -> None:
    for skip, expected in ((True, "ab"), (False, "a<end>b")):
        detokenizer = Detokenizer(Bytes(), skip_special=skip)
        assert "".join(detokenizer.push(token) for token in (97, 256, 98)) == expected


def run(text: str, stop: tuple[str, ...]) -> tuple[str, list[str], str | None]:
    """Feed bytes until a stop string; (text, what was handed out at each push, the stop)."""
    output = OutputText(Detokenizer(Bytes()), stop)
    taken, matched = [], None
    for byte in text.encode():
        matched = output.push(byte)
        taken.append(output.take())
        if matched:
            break
    matched = matched or output.finish()
    taken.append(output.take())
    return output.text, taken, matched


STOPS = [
    ("hello END there", ("END",), "hello ", "END"),
    ("hello EN there", ("END",), "hello EN there", None),
    ("EEND", ("END",), "E", "END"),
    ("ababac", ("abac",), "ab", "abac"),
    ("a\n\nb", ("\n\n", "b"), "a", "\n\n"),
    ("xay", ("ay", "xay"), "", "xay"),
    ("grüße", ("üß",), "gr", "üß"),
    ("abc EN", ("END",), "abc EN", None),
]


@pytest.mark.parametrize(("text", "stop", "kept", "matched"), STOPS)
def test_stop_strings_across_tokens(
    text: str, stop: tuple[str, ...], kept: str, matched: str | None
) -> None:
    got, taken, found = run(text, stop)
    assert (got, found) == (kept, matched)
    assert "".join(taken) == kept


def test_one_token_may_hold_a_stop_string_and_more() -> None:
    class Words:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(["one ", "two STOP three"][token] for token in token_ids)

    output = OutputText(Detokenizer(Words()), ("STOP", "three"))
    assert output.push(0) is None
    assert output.push(1) == "STOP"
    assert output.take() == output.text == "one two "


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = OutputText(None, ())
    assert (output.push(3), output.finish(), output.take(), output.text) == (None, None, "", "")
