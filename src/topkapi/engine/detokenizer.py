"""How do tokens become text while they arrive, and where does the text stop?

`Detokenizer` turns tokens into text one by one, never letting half a character out; `OutputText`
adds stop strings, which may begin in one token and end in a later one. Knows any tokenizer that has
`decode(token_ids, skip_special_tokens=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# A decoder shows bytes that are not (yet) a character as U+FFFD. At most three bytes of one
# character can be waiting for its last.
_REPLACEMENT = "\ufffd"
_MAX_WAITING = 3
# Tokens before the new ones that are decoded with them: enough for any joining rule (a leading
# space, a character in pieces), few enough that a token costs the same however long the text is.
_LEFT_CONTEXT = 6
_MAX_WINDOW = 32


class Decoder(Protocol):
    """The part of a tokenizer that detokenising needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """The text of a growing list of tokens.

    A window of the last tokens is decoded at each push; what was already given out of it is not
    given again. Work per token is bounded by the window, not by the text.
    """

    def __init__(
        self, decoder: Decoder, prompt_token_ids: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special = skip_special
        self._window = list(prompt_token_ids[-_LEFT_CONTEXT:])
        prompt = self._decode() if self._window else ""
        if _waiting(prompt):
            # The prompt ends inside a character: the new tokens are shown on their own.
            self._window, prompt = [], ""
        self._given = len(prompt)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is in pieces."""
        self._window.append(token_id)
        text = self._decode()
        stable = len(text) - _waiting(text)
        new, self._given = text[self._given : stable], max(self._given, stable)
        if len(self._window) > _MAX_WINDOW:
            held = len(text) - self._given
            self._window = self._window[-_LEFT_CONTEXT:]
            self._given = len(self._decode()) - held
        return new

    def flush(self) -> str:
        """What was still held back, as it stands: the last tokens may end inside a character."""
        text = self._decode() if self._window else ""
        new, self._given = text[self._given :], len(text)
        return new

    def _decode(self) -> str:
        return self._decoder.decode(self._window, skip_special_tokens=self._skip_special)


def _waiting(text: str) -> int:
    count = len(text) - len(text.rstrip(_REPLACEMENT))
    return min(count, _MAX_WAITING)


class OutputText:
    """The text of one request, cut at the first stop string.

    `push` and `finish` take in; `take` hands out what can no longer change.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: tuple[str, ...] = ()) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._stop = stop
        self._taken = 0
        self._finished = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take in a token; the stop string it completed, or None. With `may_stop` off, a stop
        string that it completes is ordinary text for good.
        """
        if self._detokenizer is None:
            return None
        return self._append(self._detokenizer.push(token_id), may_stop)

    def finish(self) -> str | None:
        """Take in what was held back, and hold back nothing more; the stop string it completed."""
        if self._finished or self._detokenizer is None:
            return None
        matched = self._append(self._detokenizer.flush())
        self._finished = True
        return matched

    def take(self) -> str:
        """The text that has become certain since the last call."""
        end = len(self.text) if self._finished else len(self.text) - self._held()
        new, self._taken = self.text[self._taken : end], max(self._taken, end)
        return new

    def _append(self, new: str, may_stop: bool = True) -> str | None:
        if not new:
            return None
        old = len(self.text)
        self.text += new
        if not may_stop:
            return None
        found = [(self.text.find(stop, max(old - len(stop) + 1, 0)), stop) for stop in self._stop]
        found = [(place, stop) for place, stop in found if place >= 0]
        if not found:
            return None
        place, matched = min(found)
        self.text = self.text[:place]
        self._finished = True
        return matched

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string may have begun."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
