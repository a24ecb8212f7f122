"""`make demo`: a trained DSA model answers questions about a long document, on this machine.

The document is made on the spot from running text and random facts; every answer is checked
against the fact it asks for.
"""

from __future__ import annotations

import argparse
import random
import time

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from topkapi.demo.documents import Question, RecallDocument, is_right, make_document
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams

EXCERPT_LINES = 4


def main() -> None:
    """Make a document, ask, and show what came back. Exits 1 when no answer was right."""
    arguments = _arguments()
    console = Console()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    logging.disable_progress_bar()
    with console.status("loading the demo model"):
        llm = LLM("demo", device=arguments.device)
    document = make_document(
        seed,
        num_tokens=arguments.tokens,
        count_tokens=lambda text: len(llm.tokenizer.encode(text, add_special_tokens=False)),
        num_facts=max(arguments.questions, 8),
    )
    _introduce(console, llm, document, seed)
    right = 0
    for question in document.questions[: arguments.questions]:
        right += _ask(console, llm, document, question)
    asked = min(arguments.questions, len(document.questions))
    console.print(f"[bold]{right} of {asked} right[/]. Another document: run it again.")
    if not right:
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m topkapi.demo", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the document")
    parser.add_argument("--questions", type=int, default=5, help="how many questions to ask")
    parser.add_argument("--seed", type=int, default=None, help="the same document again")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return parser.parse_args()


def _introduce(console: Console, llm: LLM, document: RecallDocument, seed: int) -> None:
    config = llm.config
    tokens = len(llm.tokenizer.encode(document.text, add_special_tokens=False))
    table = Table(show_header=False, box=None)
    table.add_row("model", f"{config.model_type}, {config.num_hidden_layers} layers, trained")
    table.add_row("device", str(llm.device))
    table.add_row("document", f"{tokens:,} tokens, {len(document.questions)} facts, seed {seed}")
    table.add_row("attention", f"the best {config.index_topk} tokens for each query, in each layer")
    console.print(table)
    lines = document.text.splitlines()
    start = len(lines) // 2
    for line in lines[start : start + EXCERPT_LINES]:
        console.print(f"  [dim]... {line}[/]", highlight=False)
    console.print()


def _ask(console: Console, llm: LLM, document: RecallDocument, question: Question) -> bool:
    """Put one question after the whole document, print the answer and what it took."""
    message = {"role": "user", "content": document.prompt(question)}
    start = time.perf_counter()
    output: RequestOutput = llm.chat(
        [message], SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=False
    )[0]
    seconds = time.perf_counter() - start
    right = is_right(output.text, question)
    seen = len(output.prompt_token_ids) + len(output.token_ids)
    mark = "[green]right[/]" if right else f"[red]wrong, it is {question.answer}[/]"
    console.print(f"[bold]{question.text}[/]", highlight=False)
    console.print(f"  {output.text.strip()}  {mark}", highlight=False)
    computed = seen - output.num_cached_tokens
    console.print(
        f"  [dim]fact at {question.depth:.0%} of the document; each query attended to at most "
        f"{min(llm.config.index_topk, seen)} of {seen:,} tokens\n"
        f"  {output.num_cached_tokens:,} tokens from the prefix cache, {computed:,} computed in "
        f"{seconds:.1f} s ({computed / seconds:,.0f} tokens/s)[/]",
        highlight=False,
    )
    return right


if __name__ == "__main__":
    main()
