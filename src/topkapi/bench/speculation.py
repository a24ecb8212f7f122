"""`topkapi bench speculation`: what drafts of the demo model's MTP layer are worth.

Half of the prompts ask for a fact of a fresh document, half continue running text. Every number of
drafts runs all of them greedily, in fp32, and its tokens must be those of plain decoding. Prompts
are computed and cached before the clock starts, so that it shows decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from topkapi.demo.documents import make_document
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams

TEXT_TOKENS = 160
KINDS = ("answers", "text")


@dataclass(frozen=True)
class SpeculationCase:
    """`steps` drafts (or `auto`) in batches of at most `batch` requests."""

    steps: int | str
    batch: int


def make_prompts(llm: LLM, kind: str, count: int, context: int, seed: int) -> list[list[int]]:
    """`count` prompts of one kind as token ids; documents have `context` tokens or a few more."""

    def size(text: str) -> int:
        return len(llm.tokenizer.encode(text, add_special_tokens=False))

    prompts: list[list[int]] = []
    for number in range(count):
        chance = seed * 1_000_003 + number
        if kind == "text":
            text = make_document(
                chance, num_tokens=TEXT_TOKENS, count_tokens=size, num_facts=0
            ).text
            prompts.append(llm.tokenizer.encode(text, add_special_tokens=False)[:TEXT_TOKENS])
        else:
            document = make_document(chance, num_tokens=context, count_tokens=size)
            message = document.prompt(document.questions[0])
            prompts.append(llm.encode_chat([{"role": "user", "content": message}]))
    return prompts


def measure(
    case: SpeculationCase,
    *,
    prompts: int,
    context: int,
    max_tokens: int,
    device: str,
    seed: int,
    references: dict[str, list[list[int]]],
) -> Iterator[dict[str, Any]]:
    """One row a kind of prompt. `references` has the tokens of the first case that ran."""
    llm = LLM(
        "demo",
        device=device,
        dtype="fp32",
        speculative_num_steps=case.steps,  # type: ignore[arg-type]
        max_running_requests=case.batch,
        max_tokens_in_cache=(prompts // 2 + case.batch) * (context + 128),
    )
    for kind in KINDS:
        count = prompts // 2 if kind == "text" else prompts - prompts // 2
        asked = make_prompts(llm, kind, count, context, seed)
        llm.generate(asked, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        # Running text has no end, and an end token in it says nothing.
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=kind == "text")
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = llm.generate(asked, params, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        tokens = [output.token_ids for output in outputs]
        same = sum(a == b for a, b in zip(tokens, references.setdefault(kind, tokens), strict=True))
        yield {
            "bench": "speculation",
            "kind": kind,
            "steps": case.steps,
            "batch": case.batch,
            "prompts": count,
            "context": context if kind == "answers" else TEXT_TOKENS,
            "tokens": sum(map(len, tokens)),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "acceptance_length": mean_acceptance(outputs),
            "same_tokens": same,
        }


def mean_acceptance(outputs: Sequence[RequestOutput]) -> float | None:
    """Tokens a verifying step gave on average, over all requests."""
    rounds = sum(output.num_rounds for output in outputs)
    return 1 + sum(output.num_accepted for output in outputs) / rounds if rounds else None


def with_speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with `tokens_per_second`, and `speedup` over no drafts in the same batch size.

    `cpu_speedup` goes by this process's time on the cores, which other work does not change much.
    """
    plain = {(row["kind"], row["batch"]): row for row in rows if row["steps"] == 0}
    out = []
    for row in rows:
        same = plain.get((row["kind"], row["batch"]))
        added = {"tokens_per_second": row["tokens"] / row["seconds"]}
        for name, clock in (("speedup", "seconds"), ("cpu_speedup", "cpu_seconds")):
            added[name] = None if same is None else same[clock] / row[clock]
        out.append({**row, **added})
    return out
