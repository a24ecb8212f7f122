"""Kernels for any GPU that Triton compiles for.

`KERNELS` can be imported without Triton: the records then refuse with that reason.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from topkapi.dispatch import Kernel, Problem

_OPS = (
    "indexer_logits",
    "topk",
    "select",
    "sparse_mla",
    "write_latent",
    "write_index_key",
    "gather_latent",
    "step_metadata",
    "quantize_index_query",
    "apply_rope",
)


def _refuse_without_triton(problem: Problem) -> str | None:
    return "needs the triton package (pip install 'topkapi[gpu]')"


def _launch_without_triton(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kernel that refuses every problem was launched")


def _records() -> tuple[Kernel, ...]:
    if importlib.util.find_spec("triton") is None:
        return tuple(
            Kernel("triton", op, _refuse_without_triton, _launch_without_triton) for op in _OPS
        )
    from topkapi.kernels.triton import (
        index_queries,
        indexer_logits,
        records,
        rope,
        select,
        sparse_mla,
        step_metadata,
        topk,
    )

    return (
        indexer_logits.INDEXER_LOGITS,
        topk.TOPK,
        select.SELECT,
        sparse_mla.SPARSE_MLA,
        records.WRITE_LATENT,
        records.WRITE_INDEX_KEY,
        records.GATHER_LATENT,
        step_metadata.STEP_METADATA,
        index_queries.QUANTIZE_INDEX_QUERY,
        rope.APPLY_ROPE,
    )


KERNELS = _records()

__all__ = ["KERNELS"]
