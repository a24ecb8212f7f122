"""Kernels for sm90 (H100, H200) alone.

`KERNELS` can be imported without Triton: the records then refuse with that reason.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from topkapi.dispatch import Kernel, Problem


def _refuse_without_triton(problem: Problem) -> str | None:
    return "needs the triton package (pip install 'topkapi[gpu]')"


def _launch_without_triton(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel that refuses every problem was launched")


def _records() -> tuple[Kernel, ...]:
    if importlib.util.find_spec("triton") is None:
        return (Kernel("hopper", "sparse_mla", _refuse_without_triton, _launch_without_triton),)
    from topkapi.kernels.hopper import sparse_mla

    return (sparse_mla.SPARSE_MLA,)


KERNELS = _records()

__all__ = ["KERNELS"]
