"""The page of results that is read: Markdown, from the JSON lines of `topkapi bench ops` alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


_STEADY = (
    "`single / steady`: single is one replay of one call after the second-level cache was flushed, "
    "with the launch into an idle GPU. Steady is what a call of a decoding step takes between "
    "others: a graph of 8 to 64 calls in line, each on inputs of its own that are not cached, the "
    "time of its replay over their number. Calls of more than a millisecond and prefill have none."
)


def write_page(rows: Sequence[Row], path: Path) -> None:
    """Replace `path` by the page. Plots that lie beside it are named as `ops_plot` names them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(rows, path.stem))


def page(rows: Sequence[Row], stem: str = "ops") -> str:
    """Facts of the run, then for each operation a table, its plot, and who refused."""
    lines = ["# Every kernel of every operation", "", *_facts(rows), ""]
    for op in dict.fromkeys(row["op"] for row in rows):
        of_op = [row for row in rows if row["op"] == op]
        lines += [f"## {op}", ""]
        if any("seconds" in row for row in of_op):
            lines += [f"![{op}: time over the floor]({stem}_{op}.png)", "", *_table(of_op), ""]
        lines += _not_timed(of_op)
    return "\n".join(lines).rstrip() + "\n"


def by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Timed rows by the name of their case, in the order of the run."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if "seconds" in row:
            found.setdefault(row["case"], []).append(row)
    return found


def _facts(rows: Sequence[Row]) -> list[str]:
    """Where, when and with what; more than one value where runs were put together."""

    def values(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in rows if row.get(name)))

    packages = {f"{k} {v}" for row in rows for k, v in row.get("packages", {}).items()}
    lines = [
        f"{values('device')}, driver {values('driver') or 'none'}; torch {values('torch')}, "
        f"triton {values('triton') or 'none'}; peers: {', '.join(sorted(packages)) or 'none'}. "
        f"Commit {values('commit') or 'unknown'}, {values('date')}.",
        "",
    ]
    ceilings = next((row["ceilings"] for row in rows if "ceilings" in row), None)
    if ceilings:
        steady = ceilings.get("least_steady_seconds")
        lines += [
            f"Ceilings measured in the same run: copy {ceilings['bytes_per_second'] / 1e12:.2f} "
            f"TB/s; matrix products of random data {ceilings['bf16'] / 1e12:.0f} TFLOP/s in bf16, "
            f"{ceilings['fp8'] / 1e12:.0f} in fp8 ({ceilings['fp8_from']}). The floor is the "
            "larger of bytes and FLOPs over these. A kernel that does nothing takes "
            f"{ceilings['least_seconds'] * 1e6:.1f} us by this clock"
            + (f", {steady * 1e6:.1f} steady." if steady else "."),
            "",
        ]
    how = {row["timing"] for row in rows if "timing" in row}
    bare = any(row["role"] == "bare" for row in rows)
    lines += [
        f"Medians in microseconds ({', '.join(sorted(how)) or 'nothing timed'}; p20 and p80 are in "
        "the JSON lines), kernels of one row measured in turn. `floor %` is of our fastest kernel; "
        "`over peer` is the best other kernel's time over ours: above 1 ours is faster. `overlap`: "
        "neighbouring queries select as much in common as the demo model's. `~` breaks ties by "
        "chance, so that a selection need not be the same again. Peers run behind our contract: "
        "heads filled up, selections sorted, columns outside a row's range at -inf"
        + (
            "; `bare` is the peer's own call, without these, its inputs laid out beforehand."
            if bare
            else "."
        ),
    ]
    if any(row.get("steady_seconds") for row in rows):
        lines += ["", _STEADY]
    return lines


def _table(rows: Sequence[Row]) -> list[str]:
    kernels = list(dict.fromkeys(row["kernel"] for row in rows if "seconds" in row))
    ours = {row["kernel"] for row in rows if row["role"] == "ours"}
    loose = {row["kernel"] for row in rows if not row.get("exact", True)}
    marked = [f"**{k}**" if k in ours else f"{k} ~" if k in loose else k for k in kernels]
    several = len({row.get("commit") for row in rows}) > 1
    heads = ["case", *marked, "floor", "floor %", "over peer", "best peer"]
    steady = any(row.get("steady_seconds") for row in rows)
    heads += ["steady floor %", "steady over peer", "steady best peer"] if steady else []
    heads += ["commit"] if several else []
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 2) + "---|"]
    for case, group in by_case(rows).items():
        times = {row["kernel"]: row for row in group}
        cells = [case, *(_time(times.get(kernel)) for kernel in kernels)]
        cells.append(f"{group[0]['floor_seconds'] * 1e6:.1f}")
        cells += _best(group, "")
        cells += _best(group, "steady_") if steady else []
        if several:
            cells.append(str(group[0].get("commit")))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _best(rows: Iterable[Row], clock: str) -> list[str]:
    """Of our fastest kernel by one clock: floor reached, best peer's time over its, best peer."""
    best = best_of_ours(rows, clock)
    if best is None:
        return ["", "", ""]
    peer = best.get(f"{clock}best_peer", "")
    ratio = f"{best[f'{clock}over_best_peer']:.2f}" if peer else ""
    return [f"{best[f'{clock}fraction']:.0%}", ratio, peer]


def best_of_ours(rows: Iterable[Row], clock: str = "") -> Row | None:
    """The row of ours that is the fastest of one case; by the other clock with `steady_`."""
    key = f"{clock}seconds"
    ours = [row for row in rows if row["role"] == "ours" and row.get(key)]
    return min(ours, key=lambda row: row[key]["p50"], default=None)


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    mark = "" if row["timing"] != "launches" else " (not captured)"
    middle = row["seconds"]["p50"] * 1e6
    single = f"{middle:.0f}{mark}" if middle >= 1000 else f"{middle:.1f}{mark}"
    steady = row.get("steady_seconds")
    return f"{single} / {steady['p50'] * 1e6:.1f}" if steady else single


def _not_timed(rows: Sequence[Row]) -> list[str]:
    """Wrong answers one by one; refusals by reason, with how many cases they met."""
    lines = []
    for row in rows:
        for kind in ("wrong", "failed"):
            if kind in row:
                text = _plain(row[kind])
                lines.append(f"- **{kind}**: {row['kernel']} at {row['case']}: {text}")
    refused: dict[tuple[str, str], int] = {}
    for row in rows:
        if "refused" in row:
            key = row["kernel"], row["refused"]
            refused[key] = refused.get(key, 0) + 1
    for (kernel, reason), count in sorted(refused.items()):
        cases = "1 case" if count == 1 else f"{count} cases"
        lines.append(f"- {kernel} refused {cases}: {_plain(reason)}")
    return [*lines, ""] if lines else []


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
