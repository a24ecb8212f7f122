"""Which kernels exist for each operation, best first.

The one place that knows every kernel package. `topkapi doctor` prints what each says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch

from topkapi.device import device_info
from topkapi.dispatch import Kernel, Op, Problem
from topkapi.kernels import external, hopper, tilelang, torch_cpu
from topkapi.kernels import triton as triton_kernels
from topkapi.ops.measured import H200

NAMES = (
    "indexer_logits",
    "topk",
    "select",
    "sparse_mla",
    "write_latent",
    "write_index_key",
    "gather_latent",
)

_KERNELS: tuple[Kernel, ...] = (
    *hopper.KERNELS,
    *triton_kernels.KERNELS,
    *tilelang.KERNELS,
    *external.KERNELS,
    *torch_cpu.KERNELS,
)

# A step asks the same few questions once a layer.
_fastest_there = lru_cache(maxsize=1024)(H200.fastest)


# Another kernel's scores differ in their last digits: were it taken for another number of rows,
# what a row selects would depend on its batch.
_ALWAYS_THE_SAME = frozenset({"indexer_logits", "select"})


def _fastest(problem: Problem) -> tuple[str, ...]:
    """What the measured table says, at no cost on a device that it does not speak for."""
    if problem.device.name != H200.device or problem.op in _ALWAYS_THE_SAME:
        return ()
    return _fastest_there(problem)


OPS: Mapping[str, Op] = MappingProxyType(
    {name: Op(name, tuple(k for k in _KERNELS if k.op == name), _fastest) for name in NAMES}
)


def problem_for(op: str, like: torch.Tensor, **facts: object) -> Problem:
    """The `Problem` of one call: the device, dtype and capture state of `like`, and `facts`."""
    capture = like.is_cuda and torch.cuda.is_current_stream_capturing()
    return Problem(op, device_info(like.device), like.dtype, capture=capture, **facts)  # type: ignore[arg-type]
