"""The `topkapi bench` commands: what to measure, how it is shown, where it is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from topkapi.bench.ops_command import ops_command, ops_report_command, overlap_command
from topkapi.bench.record import environment, write_lines
from topkapi.bench.serve_command import serve_command
from topkapi.device import resolve_device
from topkapi.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure this machine, side by side in one run.")
app.command("serve")(serve_command)
app.command("ops")(ops_command)
app.command("ops-report")(ops_report_command)
app.command("overlap")(overlap_command)
console = Console()

OutOption = Annotated[
    Path | None, typer.Option("--out", help="Write JSON lines here (and a plot beside them).")
]


def _number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{option}: expected numbers with commas, got {text!r}") from None


@app.command("cpu")
def cpu_command(
    vs: Annotated[
        str, typer.Option(help="transformers (which is its sdpa), sdpa, eager, or all of them.")
    ] = "transformers",
    model: Annotated[str, typer.Option(help="demo, or a local model directory.")] = "demo",
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "1024,2048,4096,8192",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    decode_tokens: Annotated[int, typer.Option(min=3)] = 16,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    out: OutOption = None,
) -> None:
    """Prefill, decode and memory on the CPU, against Transformers' own attention."""
    from topkapi.bench import cpu
    from topkapi.models.loading import read_config, resolve_model_path

    others = {"transformers": ["transformers-sdpa"], "all": ["transformers-sdpa"]}
    others["all"] += ["transformers-eager"]
    sides = [cpu.OURS, *others.get(vs, [f"transformers-{vs}"])]
    lengths = [_number("contexts", text) for text in contexts.split(",")]
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype: expected float32 or bfloat16, got {dtype!r}")
    path = str(resolve_model_path(model))
    limit = read_config(path).max_position_embeddings
    cpu.check_arguments(sides, lengths, limit)
    rows = []
    for row in cpu.measure_all(
        path, sides, lengths, repeats=repeats, decode_tokens=decode_tokens, dtype=dtype
    ):
        rows.append({**row, "model": model})
        state = row.get("failed") or f"{row['prefill_seconds']:.2f} s prefill"
        print(f"{row['side']} at {row['context']}: {state}", file=sys.stderr)
    summary = cpu.summarise(rows)
    _print_cpu(summary)
    if out:
        write_lines(out, rows)
        cpu.plot(summary, out.with_suffix(".png"))


def _print_cpu(summary: list[dict[str, Any]]) -> None:
    table = Table(title="Same model, prompt and machine; ratios are other / Topkapi")
    for name in ("context", "side", "prefill s", "decode ms/token", "peak MB", "ratios", "tokens"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for row in summary:
        if "failed" in row:
            table.add_row(str(row["context"]), row["side"], row["failed"])
            continue
        figures = (
            f"{row['prefill_seconds']:.2f}",
            f"{row['decode_seconds_per_token'] * 1e3:.1f}",
            f"{row['peak_bytes_above_model'] / 1e6:.0f}",
        )
        names = ("prefill_seconds", "decode_seconds_per_token", "peak_bytes_above_model")
        ratios = " / ".join(
            f"{row[f'{name}_ratio']:.1f}" for name in names if f"{name}_ratio" in row
        )
        same = "same" if row["same_tokens"] else "differ"
        table.add_row(str(row["context"]), row["side"], *figures, ratios, same)
    console.print(table)


@app.command("demo-recall")
def demo_recall_command(
    documents: Annotated[int, typer.Option(min=1)] = 200,
    context: Annotated[int, typer.Option(min=512, help="Tokens of a document, at least.")] = 4096,
    seed: Annotated[int, typer.Option()] = 1,
    dense: Annotated[bool, typer.Option(help="Also run the same weights dense.")] = True,
    device: Annotated[str, typer.Option()] = "auto",
    out: OutOption = None,
) -> None:
    """How often the demo model finds a fact again, in fresh documents, sparse and dense."""
    from topkapi.bench import recall
    from topkapi.engine.llm import LLM

    table = Table(title=f"Recall over {documents} fresh documents of {context}+ tokens")
    for name in ("attention", "k", "right", "recall", "by kind", "seconds"):
        table.add_column(name, justify="right")
    rows = []
    facts = environment(resolve_device(device))
    sides: dict[str, dict[str, Any]] = {"sparse": {}}
    if dense:
        # Whole prompts, one at a time: then the backend attends to them in one dense product.
        whole = {"max_batch_tokens": 8192, "max_running_requests": 1}
        sides["dense"] = {"config_overrides": {"index_topk": 8192}, **whole}
    for name, options in sides.items():
        llm = LLM("demo", device=device, **options)
        result = recall.measure(llm, documents=documents, context=context, seed=seed)
        kinds = ", ".join(f"{kind} {a}/{b}" for kind, (a, b) in sorted(result.kinds.items()))
        right = f"{result.right}/{result.documents}"
        score = f"{result.recall:.3f}"
        table.add_row(name, str(result.k), right, score, kinds, f"{result.seconds:.0f}")
        row = {"bench": "demo-recall", "attention": name, "documents": documents, "seed": seed}
        row |= {"context": context, "k": result.k, "right": result.right, "kinds": result.kinds}
        rows.append({**row, "recall": result.recall, "seconds": result.seconds, **facts})
    console.print(table)
    if out:
        write_lines(out, rows)


@app.command("speculation")
def speculation_command(
    prompts: Annotated[int, typer.Option(min=2)] = 200,
    steps: Annotated[str, typer.Option(help="Numbers of drafts; auto is one.")] = "0,1,2,3,4,auto",
    batches: Annotated[str, typer.Option(help="Requests that run at once.")] = "1,8",
    context: Annotated[int, typer.Option(min=400, help="Tokens of a document.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2)] = 48,
    seed: Annotated[int, typer.Option()] = 1,
    device: Annotated[str, typer.Option()] = "auto",
    out: OutOption = None,
) -> None:
    """Acceptance and speed-up of the demo model's drafts; tokens must not change."""
    from topkapi.bench import speculation

    rows: list[dict[str, Any]] = []
    references: dict[str, list[list[int]]] = {}
    sizes = [_number("batches", text) for text in batches.split(",")]
    counts = [text if text == "auto" else _number("steps", text) for text in steps.split(",")]
    for batch in sizes:
        for count in counts:
            case = speculation.SpeculationCase(count, batch)
            rows += speculation.measure(
                case,
                prompts=prompts,
                context=context,
                max_tokens=max_tokens,
                device=device,
                seed=seed,
                references=references,
            )
            print(f"{count} drafts in batches of {batch}: done", file=sys.stderr)
    rows = speculation.with_speedups(rows)
    _print_speculation(rows)
    if out:
        facts = environment(resolve_device(device))
        write_lines(out, [{**row, **facts} for row in rows])
    if any(row["same_tokens"] < row["prompts"] for row in rows):
        raise typer.Exit(1)


@app.command("kv-formats")
def kv_formats_command(
    documents: Annotated[int, typer.Option(min=1)] = 100,
    windows: Annotated[int, typer.Option(min=1, help="Stretches of text for perplexity.")] = 8,
    context: Annotated[int, typer.Option(min=512, help="Tokens of each of them.")] = 2048,
    seed: Annotated[int, typer.Option()] = 1,
    device: Annotated[str, typer.Option()] = "auto",
    out: OutOption = None,
) -> None:
    """Accuracy of every cache format on the demo model: attention, perplexity, recall."""
    from topkapi.bench.kv_formats import FORMATS, measure

    table = Table(title=f"Cache formats, the demo model, {context} tokens")
    names = ("format", "bytes/token", "first layer", "last layer", "perplexity", "recall")
    for name in names:
        table.add_column(name, justify="left" if name == "format" else "right")
    facts = environment(resolve_device(device))
    rows = []
    for row in measure(
        FORMATS, device=device, windows=windows, documents=documents, context=context, seed=seed
    ):
        rows.append({"bench": "kv-formats", **row, **facts})
        table.add_row(
            row["format"],
            str(row["bytes_per_token"]),
            f"{row['first_layer_error']:.1e}",
            f"{row['last_layer_error']:.1e}",
            f"{row['perplexity']:.3f}",
            f"{row['recall']:.3f}",
        )
        print(f"{row['format']}: done", file=sys.stderr)
    console.print(table)
    if out:
        write_lines(out, rows)


def _print_speculation(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Greedy decoding with drafts, prompts cached before")
    for name in (
        "prompts",
        "batch",
        "drafts",
        "accepted",
        "tokens/s",
        "speed-up",
        "in CPU time",
        "same tokens",
    ):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    for row in rows:
        length, speedup, cpu = row["acceptance_length"], row["speedup"], row["cpu_speedup"]
        table.add_row(
            row["kind"],
            str(row["batch"]),
            str(row["steps"]),
            "" if length is None else f"{length:.2f}",
            f"{row['tokens_per_second']:.0f}",
            "" if speedup is None else f"{speedup:.2f}",
            "" if cpu is None else f"{cpu:.2f}",
            f"{row['same_tokens']}/{row['prompts']}",
        )
    console.print(table)
