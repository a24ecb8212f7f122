"""The plots of `topkapi bench ops`, from its JSON lines alone. Needs matplotlib.

One figure an operation: how many times the physical floor each kernel takes, size by size. And one
roofline: what our kernels reach under the ceilings that were measured beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topkapi.bench.ops_page import Row, by_case

_MARKERS = "osD^vP*X<>"
_COLUMNS = 4


def plot_ops(rows: Sequence[Row], path: Path) -> list[Path]:
    """One PNG an operation that was timed, beside `path`: `STEM_OPERATION.png`.

    Raises `ImportError` without matplotlib.
    """
    written = []
    for op in dict.fromkeys(row["op"] for row in rows if "seconds" in row):
        target = path.with_name(f"{path.stem}_{op}.png")
        _plot_op([row for row in rows if row["op"] == op and "seconds" in row], target)
        written.append(target)
    return written


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot


def _plot_op(rows: Sequence[Row], target: Path) -> None:
    """A panel for each group of cases, a line for each size, a mark for each kernel."""
    pyplot = _pyplot()
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    columns = min(_COLUMNS, len(groups))
    lines = -(-len(groups) // columns)
    most = max(len(by_case(group)) for group in groups.values())
    size = 3.6 * columns + 1.2, lines * (0.9 + 0.22 * most) + 0.6
    figure, axes = pyplot.subplots(
        lines, columns, figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    flat = list(axes.flat)
    for axis, (group, found) in zip(flat, groups.items(), strict=False):
        _plot_group(axis, group, found, kernels)
    for axis in flat[len(groups) :]:
        axis.set_axis_off()
    for at in range(columns):
        shown = [line[at] for line in axes if line[at].axison]
        shown[-1].set_xlabel("time / floor")
        shown[-1].xaxis.set_tick_params(labelbottom=True)
    handles = [_mark(flat[0], kernel, index) for index, kernel in enumerate(kernels)]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(6, len(kernels)))
    _save(pyplot, figure, target)


def _mark(axis: Any, kernel: str, index: int, x: Any = (), y: Any = ()) -> Any:
    (handle,) = axis.plot(
        x,
        y,
        linestyle="none",
        marker=_MARKERS[index % len(_MARKERS)],
        color=f"C{index % 10}",
        markersize=6,
        alpha=0.85,
        label=kernel,
    )
    return handle


def _plot_group(axis: Any, group: str, rows: Sequence[Row], kernels: Sequence[str]) -> None:
    cases = by_case(rows)
    place = {case: len(cases) - 1 - at for at, case in enumerate(cases)}
    for index, kernel in enumerate(kernels):
        mine = [row for row in rows if row["kernel"] == kernel]
        slow = [1 / row["fraction"] for row in mine]
        _mark(axis, kernel, index, slow, [place[row["case"]] for row in mine])
    axis.set_xscale("log")
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_yticks(list(place.values()), [_size(case) for case in place])
    axis.set_ylim(-0.6, len(place) - 0.4)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_title(group, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(visible=True, alpha=0.3)


def _size(case: str) -> str:
    """`4096 x 65536` of a case's name, in thousands: `4096 x 64k`."""
    words = case.rsplit(", ", 1)[-1].split(" x ")
    return " x ".join([words[0], *(f"{int(word) // 1024}k" for word in words[1:])])


def plot_roofline(rows: Sequence[Row], target: Path) -> None:
    """Our kernels: left, FLOP/s over arithmetic intensity, under the ceilings; right, those that
    compute next to nothing, as bytes a second over bytes. Raises `ImportError` without matplotlib.
    """
    pyplot = _pyplot()
    ours = [row for row in rows if row.get("role") == "ours" and "seconds" in row]
    computing = [row for row in ours if row["flops"]]
    moving = [row for row in ours if not row["flops"]]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 5.4), layout="constrained", width_ratios=(3, 2)
    )
    if ours:
        ceilings = ours[0]["ceilings"]
        _plot_computing(left, computing, ceilings)
        _plot_moving(right, moving, ceilings)
        figure.suptitle(f"{ours[0]['device']}: our kernels under the measured ceilings")
    _save(pyplot, figure, target)


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By kernel, operation and phase."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        phase = row["size"]["phase"] if row["op"] in ("sparse_mla", "select") else ""
        name = " ".join(filter(None, (row["kernel"], row["op"], phase)))
        if row["op"] in ("sparse_mla", "indexer_logits", "select"):
            name += f", {row['arithmetic']} products"
        found.setdefault(name, []).append(row)
    return found


def _plot_computing(axis: Any, rows: Sequence[Row], ceilings: Row) -> None:
    for index, (name, found) in enumerate(_series(rows).items()):
        intensity = [row["flops"] / row["bytes"] for row in found]
        reached = [row["flops"] / row["seconds"]["p50"] / 1e12 for row in found]
        _mark(axis, name, index, intensity, reached)
    low, high = axis.get_xlim()
    edges = max(low, 0.5), max(high, 2 * ceilings["fp8"] / ceilings["bytes_per_second"])
    used = dict.fromkeys(row["arithmetic"] for row in rows)
    for style, arithmetic in zip(("-", "--", ":", "-."), used, strict=False):
        peak = ceilings["bf16" if arithmetic == "fp16" else arithmetic]
        ridge = peak / ceilings["bytes_per_second"]
        corners = [edges[0], ridge, edges[1]]
        heights = [min(peak, x * ceilings["bytes_per_second"]) / 1e12 for x in corners]
        label = f"{arithmetic} ceiling, {peak / 1e12:.3g} TFLOP/s"
        axis.plot(corners, heights, style, color="black", linewidth=1.2, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOPs a byte that must be moved")
    axis.set_ylabel("TFLOP/s")
    axis.grid(visible=True, which="both", alpha=0.2)
    axis.legend(fontsize=7, loc="lower right")


def _plot_moving(axis: Any, rows: Sequence[Row], ceilings: Row) -> None:
    for index, (name, found) in enumerate(_series(rows).items()):
        size = [row["bytes"] / 1e6 for row in found]
        _mark(axis, name, index, size, [r["bytes"] / r["seconds"]["p50"] / 1e12 for r in found])
    ceiling = ceilings["bytes_per_second"] / 1e12
    axis.axhline(ceiling, color="black", linewidth=1.2, label=f"copy, {ceiling:.3g} TB/s")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("MB that must be moved")
    axis.set_ylabel("TB/s")
    axis.grid(visible=True, which="both", alpha=0.2)
    axis.legend(fontsize=7, loc="lower right")


def _save(pyplot: Any, figure: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
