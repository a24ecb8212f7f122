"""`topkapi bench cpu`: sparse attention against Transformers' own, same model, prompt and machine.

Every measurement runs in a fresh process (`bench.side`), the sides in turn, so that a drift of the
machine's speed meets both. Reported: prefill seconds, decode seconds a token, peak memory above
the loaded model, and the ratios.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from topkapi.bench.record import environment
from topkapi.errors import ConfigError

CONTEXTS = (1024, 2048, 4096, 8192)
FIGURES = ("prefill_seconds", "decode_seconds_per_token", "peak_bytes_above_model")
OURS = "topkapi"


def run_side(side: str, path: str, context: int, decode_tokens: int, dtype: str) -> dict[str, Any]:
    """One measurement in its own process. A side that dies is a row with `failed`, not a crash."""
    command = [sys.executable, "-m", "topkapi.bench.side"]
    command += [side, path, str(context), str(decode_tokens), dtype]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"side": side, "context": context, "dtype": dtype}
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        return {**row, "failed": lines[-1][:300]}
    return {**row, **json.loads(answer.stdout.splitlines()[-1])}


def measure_all(
    path: str,
    sides: Sequence[str],
    contexts: Sequence[int],
    *,
    repeats: int,
    decode_tokens: int,
    dtype: str,
) -> Iterator[dict[str, Any]]:
    """Rows in the order they were measured: the sides alternate inside every repeat."""
    facts = environment(torch.device("cpu"))
    for context in contexts:
        for repeat in range(repeats):
            for side in sides:
                row = run_side(side, path, context, decode_tokens, dtype)
                yield {"bench": "cpu", "repeat": repeat, **row, **facts}


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians per (side, context), each with its ratio to ours where both were measured.

    A ratio is the median over repeats of (other / ours), pair by pair.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["side"], row["context"]), []).append(row)
    summary = []
    for (side, context), group in groups.items():
        line: dict[str, Any] = {"side": side, "context": context, "repeats": len(group)}
        failed = next((row["failed"] for row in group if "failed" in row), None)
        if failed:
            summary.append({**line, "failed": failed})
            continue
        ours = groups.get((OURS, context), [])
        for figure in FIGURES:
            line[figure] = median(row[figure] for row in group)
            if ours and not any("failed" in row for row in ours):
                pairs = zip(group, ours, strict=True)
                line[f"{figure}_ratio"] = median(a[figure] / b[figure] for a, b in pairs)
        line["same_tokens"] = bool(ours) and group[0]["tokens"] == ours[0].get("tokens")
        summary.append(line)
    return summary


def check_arguments(sides: Sequence[str], contexts: Sequence[int], limit: int) -> None:
    """Refuse unknown sides and contexts beyond what the model was made for, before any work."""
    known = {OURS, "transformers-sdpa", "transformers-eager"}
    if unknown := sorted(set(sides) - known):
        raise ConfigError(f"bench cpu: unknown side {', '.join(unknown)}; known: {sorted(known)}")
    if too_long := [context for context in contexts if not 256 <= context <= limit]:
        raise ConfigError(f"bench cpu: contexts must be 256..{limit}, got {too_long}")


def plot(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Three panels over the context length: prefill, decode, memory. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    titles = ("prefill, seconds", "decode, seconds per token", "peak memory above the model, GB")
    scales = (1.0, 1.0, 1e-9)
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    good = [row for row in summary if "failed" not in row]
    for axis, name, title, scale in zip(axes, FIGURES, titles, scales, strict=True):
        for side in dict.fromkeys(row["side"] for row in good):
            rows = [row for row in good if row["side"] == side]
            label = "Topkapi" if side == OURS else f"Transformers ({side.split('-')[1]})"
            contexts = [row["context"] for row in rows]
            axis.plot(contexts, [row[name] * scale for row in rows], marker="o", label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", subs=(2, 5))
        axis.set_xticks(sorted({row["context"] for row in good}))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axis.tick_params(axis="y", which="both", labelsize="small")
        axis.set_xlabel("context, tokens")
        axis.set_title(title)
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
