"""What does one training sequence look like?

A recall document with all its questions and replies as one chat, or plain running text. Everything
is drawn from a seed; worker processes make batches while the model trains. Knows nothing of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from topkapi.demo.documents import RecallDocument, Split, make_document

BOS, END, USER, ASSISTANT, PAD = range(5)
TEXT, REPLY, VALUE = 1, 2, 3  # what a token is to the loss; 0 is padding
TOKENS_PER_QUESTION = 25
PLAIN_TEXT_SHARE = 0.1


class Encoder:
    """A tokenizer that remembers given lines, since lines of running text come again and again.

    No token crosses a line's end, so a text's tokens are its lines' tokens with a newline between.
    """

    def __init__(self, tokenizer_file: Path, lines: Sequence[str] = ()) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._newline = self._tokenizer.token_to_id("\u010a")
        encoded = self._tokenizer.encode_batch(list(lines), add_special_tokens=False)
        self._known = {line: part.ids for line, part in zip(lines, encoded, strict=True)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for line in text.split("\n"):
            known = self._known.get(line)
            if known is None:
                known = self._tokenizer.encode(line, add_special_tokens=False).ids
            ids += known
            ids.append(self._newline)
        return ids[:-1]

    def count(self, text: str) -> int:
        return len(self.encode(text))


@dataclass(frozen=True)
class Corpus:
    """Files a worker needs: the tokenizer, and running text one line a line."""

    tokenizer_file: Path
    text_file: Path


@cache
def load_corpus(corpus: Corpus) -> tuple[Encoder, tuple[str, ...]]:
    """The encoder and the lines; call it before workers are forked, and they share the result."""
    text = corpus.text_file.read_text(encoding="utf-8")
    lines = tuple(line for line in text.split("\n") if line)
    return Encoder(corpus.tokenizer_file, lines), lines


def draw_num_facts(rng: random.Random, length: int) -> int:
    """Up to 48 facts, and never more than fit together with their questions."""
    most = min(48, length // 52)
    return rng.randint(max(2, most // 3), most)


def recall_sequence(
    rng: random.Random, encoder: Encoder, lines: tuple[str, ...], length: int, split: Split
) -> tuple[list[int], list[int]]:
    """Token ids and marks of one chat of about `length` tokens."""
    num_facts = draw_num_facts(rng, length)
    document = make_document(
        rng,
        num_tokens=length - TOKENS_PER_QUESTION * num_facts - 12,
        count_tokens=encoder.count,
        num_facts=num_facts,
        split=split,
        filler=lines,
    )
    return encode_chat(encoder, document, num_facts)


def encode_chat(
    encoder: Encoder, document: RecallDocument, num_questions: int
) -> tuple[list[int], list[int]]:
    """The chat template's tokens for the first questions, each answered, and their marks.

    From a reply's value on, up to and with `<|end|>`, the mark is VALUE.
    """
    ids, marks = [BOS], [TEXT]
    for i, question in enumerate(document.questions[:num_questions]):
        content = document.prompt(question) if i == 0 else question.text
        asked = [USER, *encoder.encode(content), ASSISTANT]
        replied = [*encoder.encode(question.reply), END]
        ids += asked + replied
        opening = len(encoder.encode(question.reply.removesuffix(f" {question.answer}.")))
        marks += [TEXT] * len(asked) + [REPLY] * opening + [VALUE] * (len(replied) - opening)
    return ids, marks


def plain_sequence(
    rng: random.Random, encoder: Encoder, lines: tuple[str, ...], length: int
) -> tuple[list[int], list[int]]:
    start = rng.randrange(len(lines) - length // 2)
    ids = [BOS, *encoder.encode("\n".join(lines[start : start + length // 2]))][:length]
    return ids, [TEXT] * len(ids)


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches (ids, marks), both [B, T], of one of `lengths` at `tokens` tokens in all."""

    def __init__(self, corpus: Corpus, lengths: tuple[int, ...], tokens: int, seed: int) -> None:
        self.corpus, self.lengths, self.tokens, self.seed = corpus, lengths, tokens, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        rng = random.Random(f"{self.seed}/{info.id if info else 0}")
        encoder, lines = load_corpus(self.corpus)
        while True:
            length = rng.choice(self.lengths)
            shape = (self.tokens // length, length)
            ids = torch.full(shape, PAD, dtype=torch.int16)
            marks = torch.zeros(shape, dtype=torch.uint8)
            for row in range(shape[0]):
                if rng.random() < PLAIN_TEXT_SHARE:
                    sequence = plain_sequence(rng, encoder, lines, length)
                else:
                    sequence = recall_sequence(rng, encoder, lines, length, "train")
                size = min(length, len(sequence[0]))
                ids[row, :size] = torch.tensor(sequence[0][:size], dtype=torch.int16)
                marks[row, :size] = torch.tensor(sequence[1][:size], dtype=torch.uint8)
            yield ids, marks


def batch_loader(
    corpus: Corpus, lengths: tuple[int, ...], tokens: int, seed: int, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches made in `workers` processes."""
    load_corpus(corpus)
    dataset = Batches(corpus, lengths, tokens, seed)
    extra = {"prefetch_factor": 4} if workers else {}
    return iter(
        DataLoader(dataset, batch_size=None, num_workers=workers, pin_memory=False, **extra)
    )
