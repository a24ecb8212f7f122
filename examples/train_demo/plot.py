"""How did the loss and the recall of the demo model move while it trained?

python plot.py metrics.jsonl ../../docs/images/demo_training.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

PHASE_COLOURS = {"dense": "#dfe7f1", "indexer": "#f6e3c5", "sparse": "#dcefdc"}


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of all runs, with the tokens of earlier runs added on."""
    rows: list[dict[str, Any]] = []
    before = last = 0
    run = None
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if run is not None and row.get("run") != run:
            before = last
        run = row.get("run")
        row["total"] = last = before + row["tokens"]
        rows.append(row)
    return rows


def shade(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """A background colour a phase."""
    start, current = 0.0, rows[0]["stage"].split("-")[0]
    for row in [*rows, {"stage": "end-", "total": rows[-1]["total"]}]:
        phase = row["stage"].split("-")[0]
        if phase != current:
            axes.axvspan(start / 1e6, row["total"] / 1e6, color=PHASE_COLOURS[current], lw=0)
            start, current = row["total"], phase
    axes.margins(x=0)


def draw_loss(axes: Axes, rows: list[dict[str, Any]]) -> None:
    steps = [row for row in rows if "text_loss" in row]
    millions = [row["total"] / 1e6 for row in steps]
    axes.plot(millions, [row["text_loss"] for row in steps], label="running text")
    axes.plot(millions, [row["value_loss"] for row in steps], label="values recalled")
    axes.plot(millions, [row["mtp_value_loss"] for row in steps], label="values, MTP layer", lw=1)
    taught = [row for row in steps if row["indexer_kl"] > 0]
    kl = [row["indexer_kl"] for row in taught]
    axes.plot([row["total"] / 1e6 for row in taught], kl, label="indexer KL")
    axes.set(yscale="log", ylabel="loss (nats a token), training batches")
    axes.legend(loc="lower left", ncols=2, frameon=False)


def draw_recall(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for mode, marker, size in (("dense", "o", 9), ("sparse", "s", 5)):
        seen = [row for row in rows if f"recall_{mode}" in row]
        axes.plot(
            [row["total"] / 1e6 for row in seen],
            [row[f"recall_{mode}"] for row in seen],
            marker,
            ms=size,
            label="sparse, k = 128" if mode == "sparse" else mode,
        )
    axes.axhline(0.95, color="grey", lw=0.8, ls="--")
    axes.set(ylim=(0, 1.03), ylabel="recall, fresh documents", xlabel="million tokens trained")
    axes.legend(loc="lower right", frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    rows = read(args.metrics)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    for axes in (top, bottom):
        shade(axes, rows)
    draw_loss(top, rows)
    draw_recall(bottom, rows)
    top.set_title("Topkapi demo model: dense (blue), indexer alone (orange), sparse (green)")
    args.image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.image, dpi=110)


if __name__ == "__main__":
    main()
