"""Which tokens may come next, when the text must obey a JSON schema, a regex or a grammar?

A thin layer over llguidance (optional: the `structured` extra), which computes the mask of allowed
tokens lazily, as far as the text has come, in Rust and outside the interpreter lock. What it cannot
follow is refused before the request runs. Knows token ids and masks, not requests or logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from topkapi.engine.sampling_params import SamplingParams
from topkapi.errors import RequestError

Bitmask = npt.NDArray[np.int32]

# Compiled grammars kept: a service sends the same few schemas over and over.
_KEPT = 32


class Grammar:
    """The place of one request in its grammar: `num_words` int32 words hold its mask of tokens."""

    def __init__(self, matcher: Any, executor: Any, num_words: int) -> None:
        self.num_words = num_words
        self._matcher = matcher
        self._executor = executor

    def advance(self, token_id: int) -> bool:
        """Take in the chosen token; whether the sentence is complete and nothing can follow.

        Raises `RequestError` where the grammar has grown beyond what the library follows.
        """
        if not self._matcher.consume_token(token_id):
            raise RequestError(f"the grammar could not be followed: {self._matcher.get_error()}")
        return bool(self._matcher.is_stopped())

    def mask_after(self, drafts: Sequence[int], bitmask: Bitmask) -> bool:
        """Fill `bitmask [num_words]` with what may follow the text and `drafts`; the place stays.

        False, and nothing filled, when the drafts themselves are not allowed.
        """
        taken = self._matcher.try_consume_tokens(list(drafts))
        allowed = taken == len(drafts)
        if allowed:
            self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        self._matcher.rollback(taken)
        return bool(allowed)

    @staticmethod
    def fill(grammars: Sequence[Grammar], bitmask: Bitmask) -> None:
        """Fill `bitmask [len(grammars), num_words]`, all rows at once over the library's threads.

        Bit i of word w is token 32 w + i. The grammars are distinct and of one compiler.
        """
        assert bitmask.flags["C_CONTIGUOUS"], "the library writes rows one after another"
        assert bitmask.shape == (len(grammars), grammars[0].num_words), "one row a grammar"
        rows = [(grammar._matcher, row) for row, grammar in enumerate(grammars)]
        grammars[0]._executor.unsafe_compute_mask_ptr(
            rows, bitmask.ctypes.data, bitmask.strides[0], len(grammars)
        )


class GrammarCompiler:
    """Grammars over one tokenizer. Nothing of the library is loaded before the first is needed."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._library: _Library | None = None
        self._matchers: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def check(self, params: SamplingParams) -> None:
        """Raises `RequestError` for a structure that is invalid or cannot be followed."""
        if params.structure is not None:
            self._matcher(params.structure)

    def start(self, params: SamplingParams) -> Grammar | None:
        """A fresh place at the start of what `params` ask for; None for free text.

        Raises `RequestError` as `check` does.
        """
        if params.structure is None:
            return None
        matcher = self._matcher(params.structure).deep_copy()
        assert self._library is not None, "a matcher comes from the library"
        return Grammar(matcher, self._library.executor, self._library.num_words)

    def _matcher(self, structure: tuple[str, str]) -> Any:
        """The matcher of a structure, at its start; compiled when it is not among the kept."""
        if structure in self._matchers:
            self._matchers.move_to_end(structure)
            return self._matchers[structure]
        if self._library is None:
            self._library = _Library(self._tokenizer, self._vocab_size, self._end_token_ids)
        matcher = self._library.compile(*structure)
        self._matchers[structure] = matcher
        if len(self._matchers) > _KEPT:
            self._matchers.popitem(last=False)
        return matcher


class _Library:
    """llguidance with one tokenizer loaded into it (about a second for a vocabulary of 128 K)."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: list[int]) -> None:
        if tokenizer is None:
            raise RequestError("the model has no tokenizer, so no text can be constrained")
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise RequestError(
                "json_schema, regex and grammar need llguidance: pip install 'topkapi[structured]'"
            ) from error
        try:
            self._tokenizer = from_tokenizer(
                tokenizer, max(vocab_size, len(tokenizer)), end_token_ids or None
            )
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"no text can be constrained with this tokenizer: {error}"
            ) from error
        self._llguidance = llguidance
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self.executor = llguidance.LLExecutor()
        self.num_words = -(-self._tokenizer.vocab_size // 32)

    def compile(self, name: str, text: str) -> Any:
        """A matcher at the start of the structure. Raises `RequestError`."""
        try:
            source = self._llguidance.grammar_from(name, text)
        except ValueError as error:
            raise RequestError(f"{name}: {error}") from error
        matcher = self._llguidance.LLMatcher(
            self._tokenizer, source, log_level=0, limits=self._limits
        )
        if matcher.is_error():
            raise RequestError(f"{name}: {matcher.get_error()}")
        return matcher
