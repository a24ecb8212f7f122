"""The doctor's report as tables for a terminal. Knows nothing of how its facts were found."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from topkapi.dispatch import Verdict
from topkapi.doctor.report import DoctorReport


def print_report(report: DoctorReport, console: Console) -> None:
    """Facts, kernels, what `auto` takes, and what fits."""
    console.print(_facts(report), highlight=False)
    console.print(_kernels(report), highlight=False)
    console.print(_choices(report), highlight=False)
    console.print(_cache(report), highlight=False)
    if report.budget is not None:
        console.print(f"Fits: {report.budget.assumption}.", highlight=False)


def _facts(report: DoctorReport) -> Table:
    facts = Table(show_header=False, box=None)
    for name, version in report.versions.items():
        facts.add_row(name, version or "not installed")
    parts = [report.device.label]
    if report.memory_bytes is not None:
        parts.append(f"{report.memory_bytes / 2**30:.0f} GiB")
    if report.free_bytes is not None:
        parts.append(f"{report.free_bytes / 2**30:.1f} GiB free")
    facts.add_row("device", f"{report.device.name} ({', '.join(parts)})")
    if report.driver is not None:
        facts.add_row("driver", report.driver)
    return facts


def _name(report: DoctorReport) -> str:
    model = report.model or "DeepSeek-V3.2's sizes"
    return f"{model}, {report.dtype} queries, {report.cache_format} cache"


def _kernels(report: DoctorReport) -> Table:
    table = Table(title=f"Kernels: {_name(report)}")
    for column in ("operation", "kernel", "usable"):
        table.add_column(column, overflow="fold")
    phases = list(report.kernels)
    for op in report.kernels[phases[0]]:
        columns = zip(*(report.kernels[phase][op] for phase in phases), strict=True)
        for place, verdicts in enumerate(columns):
            said = [_said(verdict, report.heads) for verdict in verdicts]
            lines = [f"{phase}: {words}" for phase, words in zip(phases, said, strict=True)]
            usable = said[0] if len(set(said)) == 1 else "\n".join(lines)
            table.add_row("" if place else op, verdicts[0].kernel, usable)
    return table


def _said(verdict: Verdict, heads: int) -> str:
    if verdict.reason is not None:
        return f"no: {verdict.reason}"
    words = "yes" if verdict.auto else "yes, by name"
    if verdict.provider:
        words += f" ({verdict.provider})"
    if verdict.padded_heads:
        words += f", {verdict.padded_heads} heads computed beside the {heads}"
    return f"{words}; {verdict.note}" if verdict.note else words


def _choices(report: DoctorReport) -> Table:
    """A row for an operation, a column for a kind of step."""
    steps = list(dict.fromkeys((choice.phase, choice.rows) for choice in report.auto))
    context = report.auto[0].context
    table = Table(title=f"What auto takes at a context of {context:,}")
    table.add_column("operation")
    for phase, rows in steps:
        table.add_column(f"{phase}, {rows:,} row{'s' if rows > 1 else ''}", overflow="fold")
    taken = {
        (choice.op, choice.phase, choice.rows): choice.kernel or f"none: {choice.reason}"
        for choice in report.auto
    }
    for op in dict.fromkeys(choice.op for choice in report.auto):
        table.add_row(op, *(taken[op, *step] for step in steps))
    return table


def _cache(report: DoctorReport) -> Table:
    first = report.cache[0]
    owners = f"{first.indexers} of {first.layers} layers own an indexer"
    table = Table(title=f"Cache, bytes a token ({owners})")
    for column in (
        "format",
        "latent, a layer",
        "index key, a layer",
        "all layers",
        "tokens that fit",
    ):
        table.add_column(column, justify="left" if column == "format" else "right")
    for cost in report.cache:
        fit = "name a --model" if cost.tokens is None else f"{cost.tokens:,}"
        numbers = (cost.latent_bytes, cost.index_bytes, cost.bytes_per_token)
        table.add_row(cost.cache_format, *(f"{number:,}" for number in numbers), fit)
    return table
