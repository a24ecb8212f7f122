"""Which kernel was fastest, and where? The measured table that `auto` goes by.

The table is data (`measured_h200.json`): medians of `topkapi bench ops` on one GPU, with the date.
It speaks for that GPU alone, and for problems near the sizes that were measured; anywhere else it
says nothing, and our own order holds. `table_from_rows` makes it. Knows no kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

import torch

from topkapi.dispatch import Problem

# How far a problem may be from a measured size, each of its sizes: a factor of 2 ** this.
REACH = 2.0


@dataclass(frozen=True)
class Measured:
    """Kernels of one operation at one size, fastest first.

    `cache` and `query` (`e4m3` or empty) are exact, and so is `phase` where it is not empty. Sizes
    that the operation does not have are 0; so is `topk` for `sparse_mla`, whose selections are
    narrower in an eager step of short contexts than in the graph of the same step, and which must
    take one kernel in both. `kernels` are names and median microseconds.
    """

    op: str
    cache: str
    query: str
    phase: str
    rows: int
    context: int
    heads: int
    topk: int
    kernels: tuple[tuple[str, float], ...] = ()

    def distance(self, problem: Problem) -> float | None:
        """Sum of |log2| of the ratios of their sizes; None where this entry says nothing."""
        query = "e4m3" if problem.dtype == torch.float8_e4m3fn else ""
        if (problem.op, query) != (self.op, self.query):
            return None
        if self.cache not in ("", problem.cache_format) or self.phase not in ("", problem.phase):
            return None
        asked = problem.rows, problem.context, problem.num_heads, problem.topk
        total = 0.0
        for size, mine in zip(asked, (self.rows, self.context, self.heads, self.topk), strict=True):
            if mine == 0:
                continue
            ratio = abs(math.log2(size / mine)) if size else math.inf
            if ratio > REACH:
                return None
            total += ratio
        return total


@dataclass(frozen=True)
class Table:
    """Everything measured on one GPU on one day."""

    device: str
    date: str
    entries: tuple[Measured, ...]

    def fastest(self, problem: Problem) -> tuple[str, ...]:
        """Names in order of the nearest entry's times; () where no entry speaks for `problem`.

        Of static facts alone: the same inside a capture as outside.
        """
        if problem.device.name != self.device:
            return ()
        known = [(entry.distance(problem), entry) for entry in self.entries]
        near = [(distance, entry) for distance, entry in known if distance is not None]
        if not near:
            return ()
        best = min(near, key=lambda found: found[0])[1]
        return tuple(name for name, _ in best.kernels)

    def to_json(self) -> str:
        """As the file that `read_table` reads: one entry a line."""
        lines = ",\n  ".join(json.dumps(asdict(entry)) for entry in self.entries)
        head = f'"device": {json.dumps(self.device)},\n "date": {json.dumps(self.date)}'
        return f'{{{head},\n "entries": [\n  {lines}\n ]}}\n'


def read_table(text: str) -> Table:
    """A table from its JSON text. Raises `KeyError` or `ValueError` for what is not one."""
    data = json.loads(text)
    entries = []
    for entry in data["entries"]:
        kernels = tuple((str(name), float(time)) for name, time in entry["kernels"])
        entries.append(Measured(**{**entry, "kernels": kernels}))
    return Table(data["device"], data["date"], tuple(entries))


def table_from_rows(rows: Iterable[Mapping[str, Any]], kernels: Mapping[str, set[str]]) -> Table:
    """The table that rows of `topkapi bench ops` make; `kernels` names each operation's records.

    Rows without a time (refused, failed, wrong) and contenders that are no record are left out, and
    so are sizes at which one kernel was alone.
    Where all of a size were timed in line, among other calls in one graph as in a decoding step,
    that counts, not one call alone. Where an operation cannot know a measured size (the context,
    for `sparse_mla`), the times of its values are averaged, each size weighing the same. Raises
    `ValueError` for rows of two devices.
    """
    timed = [
        row
        for row in rows
        if row.get("bench") == "ops" and row["kernel"] in kernels.get(row["op"], ())
        and "seconds" in row
    ]  # fmt: skip
    devices = {row["device"] for row in timed}
    if len(devices) > 1:
        raise ValueError(f"rows: expected one device, got {', '.join(sorted(devices))}")
    found: dict[Measured, list[Mapping[str, Any]]] = {}
    for row in timed:
        found.setdefault(_size(row["op"], row["size"]), []).append(row)
    entries = [
        replace(size, kernels=_ordered(times))
        for size, group in found.items()
        if len(times := _times(group)) > 1
    ]
    date = max((row["date"] for row in timed), default="")
    return Table(next(iter(devices), ""), date, tuple(entries))


def _times(rows: list[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Microseconds of each kernel of one size, all by the same clock."""
    in_line = all(row.get("steady_seconds") for row in rows)
    times: dict[str, list[float]] = {}
    for row in rows:
        seconds = row["steady_seconds" if in_line else "seconds"]
        times.setdefault(row["kernel"], []).append(seconds["p50"] * 1e6)
    return times


def _size(op: str, size: Mapping[str, Any]) -> Measured:
    """What a `Problem` of this benchmark case would say, without any time yet."""
    scores = op in ("select", "indexer_logits")
    attends = op == "sparse_mla"
    phase = "decode" if size["requests"] == size["rows"] else "prefill"
    return Measured(
        op=op,
        cache="" if op == "topk" else size["cache"],
        query=size["query"] if scores else "",
        phase=phase if scores else "",
        rows=size["rows"],
        context=size["context"] if scores or op == "topk" else 0,
        heads=size["index_heads"] if scores else size["heads"] if attends else 0,
        topk=size["k"] if op in ("select", "topk") else 0,
    )


def _ordered(times: Mapping[str, list[float]]) -> tuple[tuple[str, float], ...]:
    """Fastest first by geometric mean. A kernel that lacks a size that others have comes last."""
    most = max(len(values) for values in times.values())
    means = {
        name: math.exp(sum(map(math.log, values)) / len(values)) for name, values in times.items()
    }
    ranked = sorted(means, key=lambda name: (len(times[name]) < most, means[name]))
    return tuple((name, round(means[name], 2)) for name in ranked)


H200 = read_table(files("topkapi.ops").joinpath("measured_h200.json").read_text())
