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
# Times over the floor that are written on the axis; the second where the first would not fit.
_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_FEW_TICKS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
_MANY = 600


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
    # Panels of the same height side by side.
    groups = dict(sorted(groups.items(), key=lambda item: -len(by_case(item[1]))))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    columns = min(_COLUMNS, len(groups))
    lines = -(-len(groups) // columns)
    sizes = [len(by_case(group)) for group in groups.values()]
    heights = [0.9 + 0.2 * max(sizes[at : at + columns]) for at in range(0, len(sizes), columns)]
    figure, axes = pyplot.subplots(
        lines,
        columns,
        figsize=(3.6 * columns + 1.2, sum(heights) + 0.6),
        layout="constrained",
        squeeze=False,
        sharex=True,
        height_ratios=heights,
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
    slowest = max(1 / row["fraction"] for row in rows)
    # Shared by all panels.
    flat[0].set_xticks(_FEW_TICKS if slowest > _MANY else _TICKS)
    flat[0].set_xticks([], minor=True)
    flat[0].set_xlim(0.8, 1.25 * max(slowest, 2.0))
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
        # One below the other, so that equals do not hide each other.
        lower = 0.5 * (index + 0.5) / len(kernels) - 0.25
        _mark(axis, kernel, index, slow, [place[row["case"]] - lower for row in mine])
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
    kernels = list(dict.fromkeys(row["kernel"] for row in ours))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 5.6), layout="constrained", width_ratios=(3, 2)
    )
    if ours:
        ceilings = ours[0]["ceilings"]
        _plot_computing(left, [row for row in ours if row["flops"]], kernels, ceilings)
        _plot_moving(right, [row for row in ours if not row["flops"]], kernels, ceilings)
        figure.suptitle(f"{ours[0]['device']}: our kernels under the measured ceilings")
    _save(pyplot, figure, target)


def _kind(row: Row) -> str:
    """What one colour of the roofline stands for."""
    if row["op"] == "sparse_mla":
        return f"sparse_mla {row['size']['phase']}"
    return f"{row['op']}, {row['arithmetic']}" if row["flops"] else str(row["op"])


def _scatter(axis: Any, rows: Sequence[Row], kernels: Sequence[str], x: Any, y: Any) -> None:
    """A colour for each kind, a mark for each kernel, and a legend of both."""
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    for row in rows:
        marker = _MARKERS[kernels.index(row["kernel"]) % len(_MARKERS)]
        colour = f"C{kinds.index(_kind(row)) % 10}"
        axis.plot(x(row), y(row), marker, color=colour, markersize=5, alpha=0.7)
    for index, kind in enumerate(kinds):
        axis.plot([], [], "s", color=f"C{index % 10}", label=kind)
    for index, kernel in enumerate(kernels):
        if any(row["kernel"] == kernel for row in rows):
            axis.plot([], [], _MARKERS[index % len(_MARKERS)], color="grey", label=kernel)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(visible=True, which="both", alpha=0.2)


def _plot_computing(axis: Any, rows: Sequence[Row], kernels: Sequence[str], ceilings: Row) -> None:
    def intensity(row: Row) -> float:
        return float(row["flops"] / row["bytes"])

    def reached(row: Row) -> float:
        return float(row["flops"] / row["seconds"]["p50"] / 1e12)

    _scatter(axis, rows, kernels, intensity, reached)
    bandwidth = ceilings["bytes_per_second"]
    left = min((intensity(row) for row in rows), default=1.0) / 2
    right = 2 * max([ceilings["fp8"] / bandwidth, *(intensity(row) for row in rows)])
    for style, arithmetic in zip(
        ("-", "--", ":", "-."), dict.fromkeys(row["arithmetic"] for row in rows), strict=False
    ):
        peak = ceilings["bf16" if arithmetic == "fp16" else arithmetic]
        corners = [left, peak / bandwidth, right]
        heights = [min(peak, x * bandwidth) / 1e12 for x in corners]
        label = f"{arithmetic} ceiling, {peak / 1e12:.4g} TFLOP/s"
        axis.plot(corners, heights, style, color="black", linewidth=1.2, label=label)
    axis.set_xlabel("FLOPs a byte that must be moved")
    axis.set_ylabel("TFLOP/s")
    if rows:
        axis.legend(fontsize=7, loc="lower right")


def _plot_moving(axis: Any, rows: Sequence[Row], kernels: Sequence[str], ceilings: Row) -> None:
    _scatter(
        axis,
        rows,
        kernels,
        lambda row: row["bytes"] / 1e6,
        lambda row: row["bytes"] / row["seconds"]["p50"] / 1e12,
    )
    ceiling = ceilings["bytes_per_second"] / 1e12
    axis.axhline(ceiling, color="black", linewidth=1.2, label=f"copy, {ceiling:.3g} TB/s")
    axis.set_ylim(top=2 * ceiling)
    axis.set_xlabel("MB that must be moved")
    axis.set_ylabel("TB/s")
    axis.legend(fontsize=7, loc="lower right")


def _save(pyplot: Any, figure: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
