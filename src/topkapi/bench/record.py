"""What a measurement carries beside its figure: machine, versions, commit; and where it is kept.

Results are JSON lines, one measurement a line, so that runs can be appended and compared.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from topkapi import __version__
from topkapi.device import device_info, driver_version


def environment(device: torch.device) -> dict[str, Any]:
    """The facts without which a figure means nothing. Starts `git` and, beside a GPU, `nvidia-smi`;
    never synchronises.
    """
    info = device_info(device)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": info.name if device.type == "cuda" else _cpu_name(),
        "driver": driver_version() if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        "topkapi": __version__,
        "commit": _commit(),
    }


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace `path` by `rows`, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add `rows` to `path`, so that a run which dies leaves what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row, sort_keys=True) + "\n" for row in rows)


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version of each of these distributions that is installed."""
    found = {package: _version(package) for package in packages}
    return {package: known for package, known in found.items() if known}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def quantiles(times: Iterable[float], points: Sequence[int] = (20, 50, 80)) -> dict[str, float]:
    """Percentiles of a sample, by nearest rank: p20, p50 and p80. Empty for an empty one."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return {f"p{q}": ordered[round(last * q / 100)] for q in points} if ordered else {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the tree that this package belongs to; `-dirty` where the package was changed since. None
    without git, and for a package that was installed somewhere in another project's tree.
    """
    package = Path(__file__).resolve().parents[1]
    if not _git(package, "ls-files", "--", "__init__.py"):
        return None
    commit = _git(package, "rev-parse", "--short", "HEAD")
    changed = commit and _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{commit}-dirty" if changed else commit or None


def _git(folder: Path, *command: str) -> str:
    """What git says; nothing where it fails or is not installed."""
    if shutil.which("git") is None:
        return ""
    answer = subprocess.run(
        ["git", "-C", str(folder), *command], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip()


def _cpu_name() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
