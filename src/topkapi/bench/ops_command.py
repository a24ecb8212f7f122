"""The commands `topkapi bench ops`, `ops-report` and `overlap`: what is asked, shown and kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from topkapi.bench.record import append_lines, environment, read_lines, write_lines
from topkapi.device import resolve_device
from topkapi.errors import ConfigError

# Wide where nobody wraps lines: in a file or a pipe.
console = Console(width=None if sys.stdout.isatty() else 150)

DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda[:N].")]


def ops_command(
    op: Annotated[str, typer.Option(help="Operations, by commas; all by default.")] = "",
    vs: Annotated[
        str, typer.Option(help="Beside ours: all, none, or kernels' names (torch.topk is one).")
    ] = "all",
    without: Annotated[
        str, typer.Option(help="Kernels to leave out: tilelang compiles for a minute a size.")
    ] = "",
    quick: Annotated[bool, typer.Option(help="A few sizes, seconds each.")] = False,
    device: DeviceOption = "auto",
    seconds: Annotated[float, typer.Option(min=0.0, help="Timing of one case, about.")] = 0.1,
    part: Annotated[str, typer.Option(help="I/N: the Ith of N parts of all cases.")] = "0/1",
    check_only: Annotated[bool, typer.Option(help="Compile and check, without a time.")] = False,
    commit: Annotated[
        str, typer.Option(help="Kept with the rows; for a tree that was copied without its git.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON lines; a table and plots beside them.")
    ] = None,
) -> None:
    """Every usable kernel of every operation: checked against the reference, then timed in turn."""
    from topkapi.bench import ops, sizes
    from topkapi.bench.contenders import check_names
    from topkapi.ops.registry import NAMES

    names, rivals, absent = _words(op), _words(vs), _words(without)
    if unknown := sorted(set(names) - set(NAMES)):
        known = ", ".join(NAMES)
        raise ConfigError(f"--op: no operation named {', '.join(unknown)}; known: {known}")
    check_names("--vs", rivals)
    check_names("--without", absent)
    where = resolve_device(device)
    cases = ops.chosen_cases(where, names=names, quick=quick, part=_part(part))
    plan = ops.Plan(frozenset(rivals), seconds, not check_only, frozenset(absent), commit)
    if check_only:
        cases = [sizes.shrunk(case, 2**21) for case in cases]
    if out:
        write_lines(out, [])
    rows: list[dict[str, Any]] = []
    for row in ops.run(cases, where, plan):
        rows.append(row)
        print(_in_one_line(row), file=sys.stderr, flush=True)
        if out:
            append_lines(out, [row])
    _print_ops(rows, str(where))
    if out and not check_only:
        _report(rows, out)
    if any("wrong" in row or ("failed" in row and row["role"] == "ours") for row in rows):
        raise typer.Exit(1)


def ops_report_command(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="JSON lines of `topkapi bench ops`."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; beside the first file by default.")
    ] = None,
    roofline: Annotated[
        Path | None, typer.Option(help="One more plot: all our kernels under the ceilings.")
    ] = None,
) -> None:
    """Draw the page and the plots of results again, from their JSON lines alone."""
    from topkapi.bench.ops_plot import plot_roofline

    rows = [row for file in files for row in read_lines(file)]
    _report(rows, out or files[0])
    if roofline:
        plot_roofline(rows, roofline)


def overlap_command(
    documents: Annotated[int, typer.Option(min=1)] = 3,
    context: Annotated[int, typer.Option(min=512, help="Tokens of each of them.")] = 4096,
    seed: Annotated[int, typer.Option()] = 1,
    device: DeviceOption = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="JSON lines.")] = None,
) -> None:
    """How much of its selection a query of the demo model shares with the queries before it."""
    from topkapi.bench import overlap

    facts = environment(resolve_device(device))
    found = list(overlap.measure(context=context, documents=documents, seed=seed, device=device))
    table = Table(title=f"Selected also by the query d tokens before, {context} tokens")
    for name in ("d", *(f"layer {row['layer']}" for row in found), "mean"):
        table.add_column(name, justify="right")
    for distance in found[0]["shares"]:
        shares = [row["shares"][distance] for row in found]
        mean = sum(shares) / len(shares)
        table.add_row(str(distance), *(f"{share:.3f}" for share in (*shares, mean)))
    console.print(table)
    if out:
        write_lines(out, [{"bench": "overlap", **row, **facts} for row in found])


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _part(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise ConfigError(f"--part: expected I/N with I below N, got {text!r}")
    return int(first), int(count)


def _in_one_line(row: dict[str, Any]) -> str:
    if "seconds" in row:
        state = f"{row['seconds']['p50'] * 1e6:.1f} us, {row['fraction']:.0%} of the floor"
        if steady := row.get("steady_seconds"):
            state += f"; steady {steady['p50'] * 1e6:.1f} us, {row['steady_fraction']:.0%}"
        elif "steady_failed" in row:
            state += f"; steady failed: {row['steady_failed']}"
    else:
        state = next((f"{key}: {row[key]}" for key in ("wrong", "failed", "refused") if key in row),
                     f"right, error {row.get('error', 0):.1e}")  # fmt: skip
    return f"{row['case']} | {row['kernel']} | {state}"


_COLUMNS = ("case", "kernel", "p50 us", "p20 - p80", "GB/s", "GFLOP/s", "floor", "over peer",
            "steady us")  # fmt: skip


def _print_ops(rows: list[dict[str, Any]], where: str) -> None:
    """Refusals are gathered below: a kernel mostly refuses many cases for one reason."""
    table = Table(title=f"Operations on {where}")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("case", "kernel") else "right")
    for row in rows:
        if "seconds" not in row:
            if bad := row.get("wrong") or row.get("failed"):
                table.add_row(row["case"], row["kernel"], "[red]wrong[/]", f"[red]{bad}[/]")
            continue
        times = {name: f"{value * 1e6:.1f}" for name, value in row["seconds"].items()}
        middle = row["seconds"]["p50"]
        ratio = f"{row['over_best_peer']:.2f} {row['best_peer']}" if "best_peer" in row else ""
        rates = f"{row['bytes'] / middle / 1e9:.1f}", f"{row['flops'] / middle / 1e9:.0f}"
        spread = f"{times['p20']} - {times['p80']}"
        steady = row.get("steady_seconds")
        found = times["p50"], spread, *rates, f"{row['fraction']:.0%}", ratio
        in_line = f"{steady['p50'] * 1e6:.1f}" if steady else ""
        table.add_row(row["case"], row["kernel"], *found, in_line)
    if table.row_count:
        console.print(table)
    counts = {state: sum(state in row for row in rows) for state in ("wrong", "failed", "refused")}
    others = ", ".join(f"{count} {state}" for state, count in counts.items())
    console.print(f"{where}: {len(rows) - sum(counts.values())} right, {others}", highlight=False)
    refused: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if "refused" in row:
            key = row["op"], row["kernel"], row["refused"]
            refused[key] = refused.get(key, 0) + 1
    for (op, kernel, reason), count in refused.items():
        cases = "1 case" if count == 1 else f"{count} cases"
        console.print(f"[dim]{op}, {kernel}, {cases}: {reason}[/]", highlight=False)


def _report(rows: list[dict[str, Any]], out: Path) -> None:
    from topkapi.bench.ops_page import write_page
    from topkapi.bench.ops_plot import plot_ops

    write_page(rows, out.with_suffix(".md"))
    try:
        plot_ops(rows, out)
    except ImportError as error:
        print(f"no plots: {error}; pip install matplotlib", file=sys.stderr)
