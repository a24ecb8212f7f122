"""The `topkapi` command: one function a command, and nothing that a library user would need.

Answers go to stdout, everything else to stderr. What a user can cause ends in one line and exit
code 1 (2 for a wrong option). Imports of torch stay inside the commands, so that help is quick.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

import topkapi
from topkapi.cli_options import EngineChoices, SamplingChoices, takes
from topkapi.errors import RequestError, TopkapiError

if TYPE_CHECKING:
    from topkapi.engine.llm import LLM
    from topkapi.engine.request import Prompt, RequestUpdate, SamplingParams
    from topkapi.engine.summary import CheckpointSummary


class _OneLineErrors(TyperGroup):
    """Turns every error that Topkapi raises on purpose into one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TopkapiError as error:
            _say(f"error: {error}")
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            _say("")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of our stdout has gone; the interpreter must not try to flush to it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="DeepSeek Sparse Attention on any machine.",
)

ContextFile = Annotated[
    Path | None,
    typer.Option("--context", exists=True, dir_okay=False, help="A text file to ask about."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"topkapi {topkapi.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """DeepSeek Sparse Attention on any machine."""


@app.command()
@takes(engine=EngineChoices, sampling=SamplingChoices)
def generate(
    engine: EngineChoices,
    sampling: SamplingChoices,
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads stdin.")] = "-",
    context: ContextFile = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask through the chat template (--context does).")
    ] = False,
) -> None:
    """Complete a prompt, or answer a question about a file."""
    params = sampling.params()
    text = (sys.stdin.read() if sys.stdin else "") if prompt == "-" else prompt
    with _load(engine) as llm:
        wanted: Prompt = text
        if chat or context:
            wanted = llm.encode_chat([{"role": "user", "content": _with_context(context, text)}])
        _answer(llm, wanted, params)


@dataclass(frozen=True)
class ChatChoices(SamplingChoices):
    """Answers may be longer."""

    max_tokens: Annotated[
        int, typer.Option(help="New tokens at most.", rich_help_panel="Sampling")
    ] = 1024


@app.command()
@takes(engine=EngineChoices, sampling=ChatChoices)
def chat(
    engine: EngineChoices,
    sampling: ChatChoices,
    context: ContextFile = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
) -> None:
    """Talk to a model in the terminal. /reset starts over, /quit (or end of input) leaves."""
    params = sampling.params()
    with _load(engine) as llm:
        _talk(llm, params, context, system)


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:N].")] = "auto",
    cache_format: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")] = "bf16",
    heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads of one device; the model's own.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="demo, or a local directory; DeepSeek-V3.2's sizes without.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What this machine can run: the device, every kernel or why not, and how many tokens fit."""
    from topkapi.doctor import examine
    from topkapi.doctor.tables import print_report

    report = examine(device, cache_format, heads, model)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report, Console())


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="demo, or a local Hugging Face directory.")],
    as_json: AsJson = False,
) -> None:
    """What a checkpoint is made of, and what a cached token costs. Loads no weights."""
    from topkapi.engine.summary import summarise

    summary = summarise(path)
    if as_json:
        typer.echo(json.dumps(summary.to_json(), indent=2))
    else:
        _print_summary(summary)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
    add_help_option=False,
)
def bench(ctx: typer.Context) -> None:
    """Measure this machine; `topkapi bench --help` lists what can be measured."""
    from topkapi.bench.command import app as benchmarks

    # A command's status is what the call returns where it does not end the process.
    if status := benchmarks(args=ctx.args, prog_name="topkapi bench", standalone_mode=False):
        raise typer.Exit(status)


def main() -> None:
    """The console script."""
    app(prog_name="topkapi")


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _load(engine: EngineChoices) -> LLM:
    with Console(stderr=True).status(f"loading {engine.model}"):
        from transformers.utils import logging

        from topkapi.engine.llm import LLM

        logging.disable_progress_bar()
        return LLM(engine.model, **engine.options())


def _talk(llm: LLM, params: SamplingParams, context: Path | None, system: str | None) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    _say("Ask away. /reset starts over, /quit leaves.")
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            messages = list(opening)
            _say("The conversation starts over.")
            continue
        first = len(messages) == len(opening)
        question = _with_context(context, line) if first else line
        asked = [*messages, {"role": "user", "content": question}]
        try:
            answer = _answer(llm, llm.encode_chat(asked), params)
        except RequestError as error:
            _say(f"error: {error}; the question was not added (/reset starts over)")
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def _with_context(context: Path | None, question: str) -> str:
    if context is None:
        return question
    try:
        return f"{context.read_text(encoding='utf-8').rstrip()}\n\n{question}"
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{context}: {error}", param_hint="--context") from error


def _answer(llm: LLM, prompt: Prompt, params: SamplingParams) -> str:
    """Stream one answer to stdout, its figures to stderr; the whole text."""
    start = time.perf_counter()
    updates: Iterator[RequestUpdate] = llm.stream(prompt, params)
    first, tokens, text = 0.0, 0, ""
    for update in updates:
        first = first or time.perf_counter() - start
        tokens += len(update.token_ids)
        text += update.text
        sys.stdout.write(update.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    seconds = time.perf_counter() - start
    _say(f"{tokens} tokens in {seconds:.1f} s, the first after {first:.1f} s")
    return text


def _lines() -> Iterator[str]:
    """Lines the user types, blank ones left out; ends with the input."""
    interactive = sys.stdin is not None and sys.stdin.isatty()
    while sys.stdin is not None:
        try:
            line = input("> ") if interactive else input()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _print_summary(summary: CheckpointSummary) -> None:
    console = Console()
    table = Table(show_header=False, box=None)
    config = summary.to_json()["config"]
    shared = sum(kind == "shared" for kind in config.pop("indexer_types"))
    layers = config["num_hidden_layers"]
    table.add_row("path", summary.path)
    for name, value in config.items():
        table.add_row(name, f"{value:g}" if isinstance(value, float) else str(value))
    table.add_row("indexers", f"{layers - shared} of {layers} layers own one")
    for name, count in summary.cache_bytes.items():
        table.add_row(f"cache, {name}", f"{count:,} bytes per token")
    if summary.parameters is not None and summary.weight_bytes is not None:
        table.add_row("parameters", f"{summary.parameters:,}")
        table.add_row("weights on disk", f"{summary.weight_bytes / 2**20:,.1f} MiB")
    console.print(table, highlight=False)


if __name__ == "__main__":
    main()
