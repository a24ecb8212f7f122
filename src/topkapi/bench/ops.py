"""`topkapi bench ops`: every usable kernel of every operation, checked first, then timed in turn.

A kernel whose answer differs from the reference gets a row that says so, and no time. All that
answered right are timed in the same rounds (`clock`), beside floors from ceilings measured in the
same run (`ceilings`); on a GPU short calls of a decoding step also in line (`steady`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from topkapi.bench import sizes
from topkapi.bench.cases import BenchCase
from topkapi.bench.ceilings import Ceilings, measure_ceilings
from topkapi.bench.check import Expected, expect
from topkapi.bench.clock import Timed, interleaved, prepare
from topkapi.bench.contenders import FAILURES, Contender, answer, contenders, in_words, spoil
from topkapi.bench.inputs import Arguments, make_inputs
from topkapi.bench.record import environment, package_versions, quantiles
from topkapi.bench.steady import steady_times
from topkapi.errors import DeviceFailedError, KernelRefusedError, ShapeError

CASES = sizes.CPU_CASES

# Packages whose kernels may stand beside ours.
PEER_PACKAGES = (
    "sgl-flash-mla",
    "sgl-deep-gemm",
    "sglang-kernel",
    "sgl-kernel",
    "flash-attn-3",
    "flashinfer-python",
    "vllm",
    "tilelang",
    "amd-aiter",
)
MIN_ROUNDS, MAX_ROUNDS = 5, 20
# What takes longer than this on a GPU is timed twice, and not more.
_SLOW_SECONDS = 0.05
# Memory that the allocator may keep between cases before it gives back what is unused.
_KEPT_BYTES = 40 * 2**30


@dataclass(frozen=True)
class Plan:
    """How to measure, and whom (see `contenders`). `seconds` is the time that all rounds of a case
    should take together, and half of it again in line; without `timing` kernels are only compiled
    and checked. `commit` is kept with each row in place of what git says.
    """

    vs: frozenset[str] = frozenset({"all"})
    seconds: float = 0.1
    timing: bool = True
    without: frozenset[str] = frozenset()
    commit: str = ""


def run(cases: Sequence[BenchCase], device: torch.device, plan: Plan) -> Iterator[dict[str, Any]]:
    """One row a case and contender; those of one case together, when it is done.

    Raises `DeviceFailedError` where a kernel leaves a device that takes no more work.
    """
    facts = environment(device) | {"packages": package_versions(PEER_PACKAGES)}
    if plan.commit:
        facts["commit"] = plan.commit
    ceilings = measure_ceilings(device) if plan.timing else None
    for case in cases:
        row = {"bench": "ops", "case": case.name, "op": case.op, "group": case.group, **facts}
        sizes_and_ceilings: dict[str, Any] = {"size": case.facts()}
        if ceilings:
            sizes_and_ceilings["ceilings"] = ceilings.facts()
        for found in _measure(case, device, plan, ceilings):
            # A refusal needs no figures to be read by, and there are many.
            yield _rounded({**row, **({} if "refused" in found else sizes_and_ceilings), **found})
        if device.type == "cuda" and torch.cuda.memory_reserved(device) > _KEPT_BYTES:
            torch.cuda.empty_cache()


def _measure(
    case: BenchCase, device: torch.device, plan: Plan, ceilings: Ceilings | None
) -> list[dict[str, Any]]:
    arguments = make_inputs(case, device)
    expected = expect(case, arguments)
    rows: list[dict[str, Any]] = []
    timed: dict[str, Timed] = {}
    for contender in contenders(case, arguments, plan.vs, plan.without, device):
        row: dict[str, Any] = {"kernel": contender.name, "role": contender.role}
        row["exact"] = contender.exact
        row |= _judged(case, contender, arguments, expected)
        rows.append(row)
        if plan.timing and "error" in row:
            try:
                timed[contender.name] = prepare(contender.call, device)
            except FAILURES as error:
                row.pop("error")
                row["failed"] = in_words(error)
        if "failed" in row and not _alive(device):
            raise DeviceFailedError(_last_words(case, [contender.name], row["failed"]))
    if not timed or ceilings is None:
        return rows
    try:
        found = _timed(case, arguments, timed, plan, device)
    except RuntimeError as error:
        if _alive(device):
            raise
        raise DeviceFailedError(_last_words(case, timed, in_words(error))) from error
    moved, flops = case.work(_distinct(case, arguments))
    floor = ceilings.floor(moved, flops, case.arithmetic)
    work = {"bytes": moved, "flops": flops, "arithmetic": case.arithmetic, "floor_seconds": floor}
    for row in rows:
        if row["kernel"] in found:
            row |= {**work, **found[row["kernel"]]}
    return compared(rows)


def _timed(
    case: BenchCase,
    arguments: Arguments,
    timed: Mapping[str, Timed],
    plan: Plan,
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Times of each contender by both clocks; `steady_seconds` is None where the second has none.

    Raises `RuntimeError` where the device died.
    """
    times = _single_times(timed, plan.seconds, device)
    found: dict[str, dict[str, Any]] = {}
    for name, of_one in times.items():
        facts = {"seconds": quantiles(of_one), "rounds": len(of_one), "timing": timed[name].how}
        found[name] = {**facts, "steady_seconds": None}
    if device.type == "cuda":
        middles = {name: facts["seconds"]["p50"] for name, facts in found.items()}
        whom = plan.vs, plan.without
        steady = steady_times(case, arguments, middles, *whom, plan.seconds / 2, device)
        for name, facts in steady.items():
            found[name] |= facts
    return found


def _alive(device: torch.device) -> bool:
    """Whether the device still takes work of this process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _last_words(case: BenchCase, names: Iterable[str], error: str) -> str:
    return (
        f"{case.name}: {error}. The device takes no more work of this process; the rows of the "
        f"cases before are kept. It was one of {', '.join(names)}: measure them apart (--vs, "
        "--without)"
    )


def _rounded(value: Any) -> Any:
    """Floats to six digits: more than any clock has."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _judged(
    case: BenchCase, contender: Contender, arguments: Arguments, expected: Expected
) -> dict[str, Any]:
    """`error` of a right answer; else `refused`, `failed` or `wrong`, in words."""
    try:
        got = answer(case, contender, arguments)
        verdict = expected.judge(got, contender.exact)
    except (KernelRefusedError, ShapeError) as refusal:
        name = contender.name.split(" + ")[0]
        return {"refused": str(refusal).split(f"{name}: ", 1)[-1]}
    except FAILURES as error:
        return {"failed": in_words(error)}
    spoil(got)
    return {"wrong": verdict.wrong} if verdict.wrong else {"error": verdict.error}


def _single_times(
    timed: Mapping[str, Timed], seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """As many rounds as fit into `seconds`, within bounds. What is slow is not in them."""
    once = interleaved(timed, 1, device, warm_rounds=1)
    slow = device.type == "cuda"
    apart = {n: timed[n] for n, times in once.items() if slow and times[0] > _SLOW_SECONDS}
    quick = {name: one for name, one in timed.items() if name not in apart}
    total = sum(once[name][0] for name in quick)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / max(total, 1e-9))))
    times = interleaved(quick, rounds, device)
    again = interleaved(apart, 1, device, warm_rounds=0)
    return {name: times[name] if name in quick else once[name] + again[name] for name in timed}


def _distinct(case: BenchCase, arguments: Arguments) -> int | None:
    """How many different records a sparse attention reads."""
    if case.op != "sparse_mla":
        return None
    slots = arguments["slots"]
    return int(slots[slots >= 0].unique().numel())


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to timed rows of one case `fraction` (of the floor reached), and to ours
    `best_peer` and `over_best_peer`: its time over ours, above 1 where ours is faster. With
    `steady_` before, the same by the other clock.

    Plain torch counts as a peer where it is the fastest of the others.
    """
    for clock in ("", "steady_"):
        timed = [row for row in rows if row.get(f"{clock}seconds")]
        middles = {row["kernel"]: row[f"{clock}seconds"]["p50"] for row in timed}
        others = [row["kernel"] for row in timed if row["role"] != "ours"]
        best = min(others, key=lambda name: middles[name], default=None)
        for row in timed:
            middle = middles[row["kernel"]]
            row[f"{clock}fraction"] = row["floor_seconds"] / middle
            if best is not None and row["role"] == "ours":
                row[f"{clock}best_peer"] = best
                row[f"{clock}over_best_peer"] = middles[best] / middle
    return rows


def chosen_cases(
    device: torch.device,
    *,
    names: Collection[str] = (),
    quick: bool = False,
    part: tuple[int, int] = (0, 1),
) -> list[BenchCase]:
    """The sizes for this device, of the operations named (all of them if none is); part `(i, n)`
    is the ith of n stretches: neighbours are the same kernels' at other sizes.
    """
    wanted = [
        case for case in sizes.sizes_for(device, quick=quick) if not names or case.op in names
    ]
    which, count = part
    return wanted[which * len(wanted) // count : (which + 1) * len(wanted) // count]
