"""`topkapi bench demo-recall`: how often the demo model finds a fact again, sparse and dense.

Fresh documents, drawn from a seed; one question each. An answer is right when it ends with the
asked value, exactly. Dense means the same weights with `index_topk` raised past the context, so
that every token is selected.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from topkapi.demo.documents import Question, is_right, make_document
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams


@dataclass(frozen=True)
class RecallResult:
    """Recall over some documents, with the right answers per kind of question."""

    documents: int
    context: int
    k: int
    right: int
    seconds: float
    kinds: dict[str, tuple[int, int]]

    @property
    def recall(self) -> float:
        """Share of the questions answered exactly."""
        return self.right / self.documents


def measure(
    llm: LLM, *, documents: int, context: int, seed: int, use_tqdm: bool = True
) -> RecallResult:
    """Ask one question about each of `documents` fresh documents of at least `context` tokens."""
    count = _counter(llm)
    questions: list[Question] = []
    conversations = []
    for number in range(documents):
        document = make_document(seed * 1_000_003 + number, num_tokens=context, count_tokens=count)
        questions.append(document.questions[0])
        message = document.prompt(document.questions[0])
        conversations.append([{"role": "user", "content": message}])
    start = time.perf_counter()
    outputs = llm.chat(
        conversations, SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=use_tqdm
    )
    seconds = time.perf_counter() - start
    verdicts = [is_right(out.text, ask) for out, ask in zip(outputs, questions, strict=True)]
    return RecallResult(
        documents=documents,
        context=context,
        k=llm.config.index_topk,
        right=sum(verdicts),
        seconds=seconds,
        kinds=_by_kind(questions, verdicts),
    )


def _by_kind(questions: Sequence[Question], verdicts: Sequence[bool]) -> dict[str, tuple[int, int]]:
    kinds: dict[str, tuple[int, int]] = {}
    for question, verdict in zip(questions, verdicts, strict=True):
        right, total = kinds.get(question.kind, (0, 0))
        kinds[question.kind] = (right + verdict, total + 1)
    return kinds


def _counter(llm: LLM) -> Any:
    return lambda text: len(llm.tokenizer.encode(text, add_special_tokens=False))
