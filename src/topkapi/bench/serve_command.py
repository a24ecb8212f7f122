"""`topkapi bench serve` on the command line: its options, its tables, its picture."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from topkapi.bench import serve
from topkapi.bench.record import write_lines
from topkapi.bench.traffic import MIXES, Traffic
from topkapi.cli_options import EngineChoices, takes
from topkapi.device import resolve_device

console = Console()
_CPU_SCALE = 0.125
TITLES = {
    "first_token": "time to the first token",
    "between_tokens": "time between tokens",
    "whole": "time to the last token",
}


@dataclass(frozen=True)
class TrafficChoices:
    """The traffic; the names are `Traffic`'s."""

    mix: Annotated[str, typer.Option(help=f"Lengths: {', '.join(MIXES)}.")] = "mixed"
    requests: Annotated[int | None, typer.Option(help="How many; else 16 on a CPU, 64.")] = None
    rate: Annotated[float, typer.Option(help="Requests a second; inf sends all at once.")] = (
        math.inf
    )
    prefixes: Annotated[int, typer.Option(help="System prompts that requests share.")] = 2
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each, scaled as lengths.")] = 1024
    length_scale: Annotated[
        float | None, typer.Option(help="Multiplies every length; else 1/8 on a CPU, 1.")
    ] = None
    seed: Annotated[int, typer.Option(help="Says everything about the requests.")] = 0

    def traffic(self, on_cpu: bool) -> Traffic:
        scale = self.length_scale
        if scale is None:
            scale = _CPU_SCALE if on_cpu else 1.0
        requests = self.requests
        if requests is None:
            requests = 16 if on_cpu else 64
        return Traffic(
            mix=self.mix,
            requests=requests,
            rate=self.rate,
            prefixes=self.prefixes,
            prefix_tokens=max(1, round(self.prefix_tokens * scale)),
            length_scale=scale,
            seed=self.seed,
        )


@takes(engine=EngineChoices, traffic=TrafficChoices)
def serve_command(
    engine: EngineChoices,
    traffic: TrafficChoices,
    variants: Annotated[
        str | None, typer.Option(help="Names, with commas between; all there are by default.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every variant, in turn.")] = 1,
    warm_up: Annotated[int | None, typer.Option(min=0, help="Requests before the clock.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds a request may take.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write JSON lines here, and a plot beside them.")
    ] = None,
) -> None:
    """Latency and throughput of the engine under traffic, with each of its features and without.

    --model random is four layers of DeepSeek-V3.2's sizes with random weights. With
    --speculative-num-steps the speculating variant drafts so many tokens, else as many as pay.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    on_cpu = resolve_device(engine.device).type == "cpu"
    sent = traffic.traffic(on_cpu)
    case = serve.ServeCase(
        model=engine.model,
        traffic=sent,
        engine=engine.options(),
        warm_up=(2 if on_cpu else sent.requests) if warm_up is None else warm_up,
        timeout=timeout,
    )
    names = None if variants is None else [name.strip() for name in variants.split(",")]
    rows = []
    for row in serve.measure(case, names, repeats=repeats):
        rows.append(row)
        print(f"{row['variant']}: {row.get('failed') or _told(row)}", file=sys.stderr)
        if out:  # a run that is cut short leaves what it measured
            write_lines(out, rows)
    worth = serve.ratios(rows)
    _print_variants(rows)
    if worth:
        _print_features(worth)
    if out:
        _keep(out, rows, worth)
    if any("failed" in row for row in rows):
        raise typer.Exit(1)


def _keep(out: Path, rows: Sequence[dict[str, Any]], worth: Sequence[dict[str, Any]]) -> None:
    facts = {"bench": "serve-ratios", **{key: rows[0][key] for key in ("model", "mix", "device")}}
    write_lines(out, [*rows, *({**facts, **line} for line in worth)])
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    plot(rows, out.with_suffix(".png"))


def _print_variants(rows: Sequence[dict[str, Any]]) -> None:
    """A column a variant and repeat."""
    some = rows[0]
    table = Table(title=f"{some['model']}, {some['mix']} traffic at {some['rate']} requests/s")
    table.add_column("p50 / p90 / p99")
    good = [row for row in rows if "failed" not in row]
    for row in good:
        table.add_column(row["variant"], justify="right")
    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "first token, ms": lambda row: _spread(row["first_token"], 1e3),
        "between tokens, ms": lambda row: _spread(row["between_tokens"], 1e3),
        "whole, s": lambda row: _spread(row["whole"], 1.0),
        "tokens/s": lambda row: f"{row['output_tokens_per_second']:.1f}",
        "requests/s": lambda row: f"{row['requests_per_second']:.2f}",
        "completed": _completed,
        "preempted": lambda row: str(row["preemptions"]),
        "prefix hits": lambda row: f"{row['prefix_hit_rate']:.0%}",
        "steps replayed": lambda row: row["graphs"]["off"] or str(row["graphs"]["replays"]),
        "tokens a verifying step": lambda row: _number(row["acceptance_length"]),
        "other tokens": _other_tokens,
    }
    for name, show in figures.items():
        table.add_row(name, *(show(row) for row in good))
    console.print(table)
    for row in rows:
        if "failed" in row:
            console.print(f"{row['variant']} failed: {row['failed']}", style="red")


def _told(row: dict[str, Any]) -> str:
    """One line, as soon as a variant is done."""
    first, between = _spread(row["first_token"], 1e3), _spread(row["between_tokens"], 1e3)
    rate = f"{row['output_tokens_per_second']:.1f} tokens/s"
    return f"{_completed(row)}, first token {first} ms, between tokens {between} ms, {rate}"


def _completed(row: dict[str, Any]) -> str:
    others = {name: n for name, n in row["reasons"].items() if name not in ("stop", "length")}
    told = "".join(f", {n} {name}" for name, n in others.items())
    return f"{row['completed']} of {row['requests']}{told}"


def _other_tokens(row: dict[str, Any]) -> str:
    parted = row["parted_after"]
    after = f", after {parted[0]} to {parted[-1]}" if parted else ""
    return f"{row['differ']} of {row['compared']}{after}"


def _spread(values: dict[str, float], scale: float) -> str:
    scaled = [value * scale for value in values.values()]
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in scaled)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _print_features(worth: Sequence[dict[str, Any]]) -> None:
    """A column a feature."""
    table = Table(title="Without / with (rates: with / without): above 1 the feature helps")
    table.add_column("")
    for line in worth:
        table.add_column(line["feature"], justify="right")
    figures = {
        f"{title} {percentile}": f"{name}_{percentile}"
        for name, title in TITLES.items()
        for percentile in ("p50", "p90", "p99")
    }
    figures |= {"tokens/s": "output_tokens_per_second", "requests/s": "requests_per_second"}
    for title, name in figures.items():
        table.add_row(title, *(_number(line[name]) for line in worth))
    table.add_row("other tokens", *(f"{line['differ']} of {line['compared']}" for line in worth))
    console.print(table)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Three panels, one a latency: the share of requests (or tokens) that took no longer. The
    first repeat of every variant. Needs matplotlib.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    good = [row for row in rows if "failed" not in row and row["repeat"] == 0]
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        for row in good:
            curve = row[f"{name}_curve"]
            shares = [place / max(len(curve) - 1, 1) for place in range(len(curve))]
            axis.plot(curve, shares, label=row["variant"])
        axis.set_xscale("log", subs=(2, 5))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axis.tick_params(axis="x", which="both", labelsize="small")
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("seconds")
        axis.set_title(title)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("share that took no longer")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
