"""How tensor arguments are named and checked.

One legend for the whole library, in docstrings and in error messages:

    R query rows     T tokens            S context positions   B requests
    H heads          Hi index heads      K selected tokens     D dims of a query or key
    L latent dims    P rope dims         V value dims          Di index dims

`check` binds those letters to sizes as it goes, so that the second argument of a call is
held to the sizes of the first. It knows nothing about what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from topkapi.errors import ShapeError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)


def check(
    name: str,
    tensor: torch.Tensor,
    shape: str,
    sizes: dict[str, int],
    *,
    dtypes: Iterable[torch.dtype] | None = None,
    like: torch.Tensor | None = None,
) -> None:
    """Hold one tensor argument to a shape such as `"R H D"`, or raise `ShapeError`.

    Each word of `shape` is a letter of the legend, bound in `sizes` at first sight and compared
    afterwards; a number, compared at once; or `*`, any size. `dtypes` lists what is accepted;
    `like` is a tensor whose device this one must share. Never synchronises.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{name}: expected a tensor [{shape}], got {type(tensor).__name__}")
    words = shape.split()
    known = ", ".join(f"{word}={sizes[word]}" for word in words if word in sizes)
    expected = f"[{', '.join(words)}]" + (f" with {known}" if known else "")
    if tensor.dim() != len(words):
        raise ShapeError(f"{name}: expected {expected}, got shape {list(tensor.shape)}")
    for word, size in zip(words, tensor.shape, strict=True):
        wanted = int(word) if word.isdigit() else sizes.setdefault(word, size)
        if word != "*" and wanted != size:
            raise ShapeError(
                f"{name}: expected {expected}, got shape {list(tensor.shape)} ({word} is {size})"
            )
    sizes.pop("*", None)
    if dtypes is not None and tensor.dtype not in tuple(dtypes):
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ShapeError(f"{name}: expected dtype {accepted}, got {tensor.dtype}")
    if like is not None and tensor.device != like.device:
        raise ShapeError(f"{name}: expected device {like.device}, got {tensor.device}")
