"""How does a row get the same bits whatever is computed beside it?

BLAS libraries choose another kernel, and so another order of sums, for another number of rows. Here
every product runs over tiles of a fixed number of rows, the last one filled up: a row's bits are
then its own, in any batch, chunk or place. So do sums over a row, as in a norm: on a GPU torch
gives a row more threads where there are few rows. Some of torch's CPU functions have one formula
for whole vectors of elements and another for what is left at the end of a buffer: there every row
is filled up. The price is the filling, and smaller products: this is for runs that must be
repeatable bit by bit, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from topkapi.models.experts import prepare_row_invariant

# On a GPU a product of few rows takes as long as reading the weights, and launches cost.
_CPU_TILE = 16
_GPU_TILE = 128
# Widest vector that torch's CPU functions work on at once, and the most elements one thread does.
_CPU_VECTOR = 64
_CPU_GRAIN = 32768
_TWO_FORMULAS = {
    nn.functional.silu,
    nn.functional.gelu,
    nn.functional.softplus,
    torch.sigmoid,
    torch.Tensor.sigmoid,
}
_SUMS = {torch.mean, torch.Tensor.mean, torch.sum, torch.Tensor.sum}
# torch's names of arguments that it also takes under NumPy's.
_OWN_NAMES = {"axis": "dim", "keepdims": "keepdim"}


class RowInvariant(TorchFunctionMode):
    """A context in which `nn.functional.linear`, and so every `nn.Linear`, activations, and sums
    and means over the last dimension are row-invariant.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is nn.functional.linear:
            return row_invariant_linear(*args, **given)
        if func in _TWO_FORMULAS and _has_two_formulas(*args, **given):
            return _elementwise(func, *args, **given)
        if func in _SUMS:
            given = {_OWN_NAMES.get(name, name): value for name, value in given.items()}
            if _is_over_rows(*args, **given):
                return _over_rows(func, *args, **given)
        return func(*args, **given)


def prepare(model: Any) -> None:
    """Ready a Transformers model, for good: experts are computed one after another, through
    `linear`, and the head is row-invariant outside of the context, too.
    """
    prepare_row_invariant(model)
    head: Any = model.get_output_embeddings()
    if type(head).forward is nn.Linear.forward:
        head.forward = partial(row_invariant_linear, weight=head.weight, bias=head.bias)


def row_invariant_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`input [..., K] @ weight [N, K]^T + bias [N]`, tile by tile of rows."""
    rows = input.reshape(-1, input.shape[-1])
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for first, tile, count in _tiles(rows, 0):
        out[first : first + count] = nn.functional.linear(tile, weight, bias)[:count]
    return out.view(*input.shape[:-1], weight.shape[0])


def per_head(x: torch.Tensor, weight: torch.Tensor, *, row_invariant: bool) -> torch.Tensor:
    """Each head's own product: `x [T, H, A]` and `weight [H, A, B]` to `[T, H, B]`."""
    by_head = x.transpose(0, 1)
    if not row_invariant:
        return torch.bmm(by_head, weight).transpose(0, 1)
    out = x.new_empty(weight.shape[0], x.shape[0], weight.shape[2])
    for first, tile, count in _tiles(by_head, 1):
        out[:, first : first + count] = torch.bmm(tile, weight)[:, :count]
    return out.transpose(0, 1)


def _has_two_formulas(input: torch.Tensor, *_: Any, **__: Any) -> bool:
    """Whether elements of `input` may be left over; one alone always is."""
    return input.device.type == "cpu" and input.ndim > 0 and input.numel() > 0


def _elementwise(
    func: Callable[..., torch.Tensor], input: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`func` of `input`, of any shape, such that no element of it is left over or at the end of a
    thread's share.
    """
    rows = input.reshape(-1, input.shape[-1])
    rows = nn.functional.pad(rows, (0, -rows.shape[1] % _CPU_VECTOR))
    step = max(1, _CPU_GRAIN // rows.shape[1])
    parts = [func(part, *args, **kwargs) for part in torch.split(rows, step)]
    return torch.cat(parts)[:, : input.shape[-1]].reshape(input.shape)


def _is_over_rows(
    input: torch.Tensor, dim: Any = None, *_: Any, out: Any = None, **__: Any
) -> bool:
    """Whether a sum or mean is over the last of several dimensions alone, and rounds."""
    if not input.is_floating_point() or input.ndim < 2 or not input.numel() or out is not None:
        return False
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    return len(dims) == 1 and dims[0] in (-1, input.ndim - 1)


def _over_rows(
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    dim: Any,
    keepdim: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """`func` over the last dimension of `input [..., K]`, tile by tile of rows."""
    rows = input.reshape(-1, input.shape[-1])
    parts = [func(tile, -1, **kwargs)[:count] for _, tile, count in _tiles(rows, 0)]
    out = torch.cat(parts).view(input.shape[:-1])
    return out.unsqueeze(-1) if keepdim else out


def _tiles(x: torch.Tensor, dim: int) -> list[tuple[int, torch.Tensor, int]]:
    """`(first row, contiguous tile, rows of it that are x's)`, in order; `dim` counts rows."""
    size = _GPU_TILE if x.device.type == "cuda" else _CPU_TILE
    tiles = []
    for first in range(0, x.shape[dim], size):
        part = x.narrow(dim, first, min(size, x.shape[dim] - first))
        count = part.shape[dim]
        shape = list(part.shape)
        shape[dim] = size
        tile = x.new_zeros(shape)
        tile.narrow(dim, 0, count).copy_(part)
        tiles.append((first, tile, count))
    return tiles
