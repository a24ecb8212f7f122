"""Which tensors a local checkpoint directory holds, and whether it may be read at all.

Only safetensors are opened: a pickle runs code. fp8 weights are read through `BlockFp8Tensor`,
which dequantises when it is sliced. Knows nothing about models.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from topkapi.errors import CheckpointError
from topkapi.models.block_fp8 import DEFAULT_BLOCK, dequantize_blocks, scale_shape

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SCALE = "_scale_inv"
_EXPERT = re.compile(r"^(.*\.experts\.)(\d+)(\..*)$")


def config_json(directory: Path) -> dict[str, Any]:
    """`config.json` of a directory. Raises `CheckpointError` when there is none or it is broken."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: expected a local checkpoint directory, found none")
    return _read_json(directory / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from its index where it has one.

    Raises `CheckpointError` for a directory with pickled weights alone, a shard that is missing, or
    an index that points outside the directory.
    """
    if (directory / _INDEX).is_file():
        shards = _read_json(directory / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(n, str) for n in shards.values()):
            raise CheckpointError(f"{directory / _INDEX}: expected weight_map to name a file each")
        names = sorted(set(shards.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{directory / _INDEX}: {outside[0]!r} is not a plain file name")
    else:
        names = [_SINGLE]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        hint = (
            f"; {', '.join(pickles)} may hold weights, but loading pickles runs code: "
            "convert them to safetensors"
        )
        raise CheckpointError(
            f"{directory}: expected the weights in {', '.join(missing)}, found no such file"
            + (hint if pickles else "")
        )
    return [directory / name for name in names]


@dataclass(frozen=True)
class BlockFp8Tensor:
    """One fp8 weight with its scales, both still on disk; slicing it reads and dequantises.

    Stands where Transformers' loader expects a safetensors slice.
    """

    weight: Any
    scales: Any
    block: tuple[int, int]
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Two slices read no more than the blocks they touch: a rank's share of the matrix."""
        if isinstance(index, tuple) and all(isinstance(part, slice) for part in index):
            return self._window(*index, *[slice(None)] * (2 - len(index)))
        return dequantize_blocks(self.weight[...], self.scales[...], self.block, self.dtype)[index]

    def _window(self, rows: slice, columns: slice) -> torch.Tensor:
        read, scales, kept = [], [], []
        for part, size, block in zip((rows, columns), self.get_shape(), self.block, strict=True):
            start, stop, _ = part.indices(size)
            first = start // block
            read.append(slice(first * block, stop))
            scales.append(slice(first, -(-stop // block)))
            kept.append(slice(start - first * block, None, part.step))
        weight, scale = self.weight[tuple(read)], self.scales[tuple(scales)]
        return dequantize_blocks(weight, scale, self.block, self.dtype)[tuple(kept)]

    def get_shape(self) -> list[int]:
        """Sizes of the weight, without reading it."""
        return list(self.weight.get_shape())


def open_tensors(
    files: Iterable[Path], stack: ExitStack, *, block: tuple[int, int] | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Name to lazy tensor for all `files`, kept open by `stack`.

    An fp8 weight and its `weight_scale_inv` become one `BlockFp8Tensor` of `dtype`. Raises
    `CheckpointError` naming the tensor for a broken file, an fp8 weight without scales or scales
    without weight, and scales whose shape does not fit `block`.
    """
    tensors: dict[str, Any] = {}
    for path in files:
        try:
            handle = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
        tensors.update({name: handle.get_slice(name) for name in handle.keys()})  # noqa: SIM118
    for name in [name for name in tensors if name.endswith(_SCALE)]:
        weight = name.removesuffix(_SCALE)
        if weight not in tensors:
            raise CheckpointError(f"{name}: the checkpoint has these scales, but no {weight}")
        tensors[weight] = _fold(weight, tensors[weight], tensors.pop(name), block, dtype)
    for name, tensor in tensors.items():
        if not isinstance(tensor, BlockFp8Tensor) and tensor.get_dtype().startswith("F8"):
            raise CheckpointError(f"{name}: is fp8, but the checkpoint has no {name}{_SCALE}")
    return tensors


def _fold(
    name: str, weight: Any, scales: Any, block: tuple[int, int] | None, dtype: torch.dtype
) -> BlockFp8Tensor:
    block = DEFAULT_BLOCK if block is None else block
    shape = weight.get_shape()
    if len(shape) != 2 or not weight.get_dtype().startswith("F8"):
        raise CheckpointError(
            f"{name}: expected an fp8 matrix beside {name}{_SCALE}, got {weight.get_dtype()} "
            f"{list(shape)}"
        )
    expected = scale_shape((shape[0], shape[1]), block)
    if tuple(scales.get_shape()) != expected:
        raise CheckpointError(
            f"{name}{_SCALE}: expected shape {list(expected)} for a weight of {list(shape)} in "
            f"blocks of {list(block)}, got {list(scales.get_shape())}"
        )
    return BlockFp8Tensor(weight, scales, block, dtype)


def check_experts(names: Iterable[str], num_experts: int) -> None:
    """Raise `CheckpointError` naming an expert's tensor that other experts of its layer have.

    Transformers stacks experts when it loads, and would report the stack, not the tensor.
    """
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in names:
        parts = _EXPERT.match(name)
        if parts:
            found[parts[1], parts[3]].add(int(parts[2]))
    for (before, after), numbers in found.items():
        missing = sorted(set(range(num_experts)) - numbers)
        if missing:
            raise CheckpointError(
                f"{before}{missing[0]}{after} is missing: expected {num_experts} experts, "
                f"found {len(numbers)}"
            )
