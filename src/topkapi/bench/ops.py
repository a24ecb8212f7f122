"""`topkapi bench ops`: every usable kernel of every operation, checked first, then timed in turn.

A kernel whose answer differs from the reference gets a row that says so, and no time. All that
answered right are timed in the same rounds (`clock`), beside floors from ceilings measured in the
same run (`ceilings`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from topkapi.bench import sizes
from topkapi.bench.cases import BenchCase
from topkapi.bench.ceilings import Ceilings, measure_ceilings
from topkapi.bench.check import Expected, expect
from topkapi.bench.clock import Timed, interleaved, prepare
from topkapi.bench.contenders import Contender, answer, contenders, spoil
from topkapi.bench.inputs import Arguments, make_inputs
from topkapi.bench.record import environment, package_versions, quantiles
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
# Memory that the allocator may keep between cases before it gives back what is unused.
_KEPT_BYTES = 40 * 2**30


def _failures() -> tuple[type[Exception], ...]:
    """What a launch may die of without ending the run: ours are compiled, peers are foreign."""
    found: tuple[type[Exception], ...] = (
        RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, AssertionError,
        ImportError, OSError,
    )  # fmt: skip
    if importlib.util.find_spec("triton") is not None:
        from triton.errors import TritonError

        found = (*found, TritonError)
    return found


FAILURES = _failures()


@dataclass(frozen=True)
class Plan:
    """How to measure, and whom (see `contenders`). `seconds` is the time that all rounds of a case
    should take together; without `timing` kernels are only compiled and checked. `commit` is kept
    with each row in place of what git says.
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
                row["failed"] = _in_words(error)
        if "failed" in row and not _alive(device):
            raise DeviceFailedError(_last_words(case, [contender.name], row["failed"]))
    if not timed or ceilings is None:
        return rows
    try:
        times = interleaved(timed, _rounds(timed, plan.seconds, device), device)
    except RuntimeError as error:
        if _alive(device):
            raise
        raise DeviceFailedError(_last_words(case, timed, _in_words(error))) from error
    moved, flops = case.work(_distinct(case, arguments))
    floor = ceilings.floor(moved, flops, case.arithmetic)
    for row in rows:
        name = row["kernel"]
        if name in times:
            row |= {"bytes": moved, "flops": flops, "arithmetic": case.arithmetic}
            row |= {"seconds": quantiles(times[name]), "rounds": len(times[name])}
            row |= {"timing": timed[name].how, "floor_seconds": floor}
    return compared(rows)


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
        return {"failed": _in_words(error)}
    spoil(got)
    return {"wrong": verdict.wrong} if verdict.wrong else {"error": verdict.error}


def _in_words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _rounds(timed: dict[str, Timed], seconds: float, device: torch.device) -> int:
    """As many as fit into `seconds`, within bounds."""
    once = interleaved(timed, 1, device)
    total = sum(times[0] for times in once.values())
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / max(total, 1e-9))))


def _distinct(case: BenchCase, arguments: Arguments) -> int | None:
    """How many different records a sparse attention reads."""
    if case.op != "sparse_mla":
        return None
    slots = arguments["slots"]
    return int(slots[slots >= 0].unique().numel())


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to timed rows of one case `fraction` (of the floor reached), and to ours
    `best_peer` and `over_best_peer`: its time over ours, above 1 where ours is faster.

    Plain torch counts as a peer where it is the fastest of the others.
    """
    others = [row for row in rows if "seconds" in row and row["role"] != "ours"]
    best = min(others, key=lambda row: row["seconds"]["p50"], default=None)
    for row in rows:
        if "seconds" not in row:
            continue
        middle = row["seconds"]["p50"]
        row["fraction"] = row["floor_seconds"] / middle
        if best is not None and row["role"] == "ours":
            row["best_peer"] = best["kernel"]
            row["over_best_peer"] = best["seconds"]["p50"] / middle
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
