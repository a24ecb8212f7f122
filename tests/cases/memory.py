"""Watching memory: outputs that start as NaN, and the largest tensor that was ever made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every `torch.empty` is full of NaN (or of the largest integer), so what is not written shows.

    Uses torch's deterministic mode, in which uninitialised memory is filled.
    """
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest storage that any operation under it returned.

    Views of an argument count as their own storage, so pass `ignore` what already existed.
    """

    def __init__(self, *ignore: torch.Tensor) -> None:
        super().__init__()
        self.bytes = 0
        self.shape: tuple[int, ...] = ()
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignore}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self._ignored and storage.nbytes() > self.bytes:
                    self.bytes, self.shape = storage.nbytes(), tuple(leaf.shape)
        return out
