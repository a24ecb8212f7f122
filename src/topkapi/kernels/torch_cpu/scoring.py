"""Lightning-indexer logits in blocks, with plain torch.

`logit[r, s] = k_scale[s] * sum_h weights[r, h] * relu(q[r, h] . k[s])`, one request at a time: a
block of 512 keys is read once and multiplied with tiles of the request's query rows, so that the
`[rows, heads, 512]` scores of a tile stay in the processor's cache.

Every matrix product has 512 columns and at least 16 rows, padded if need be, because a BLAS
library changes its order of summation only for thinner shapes. A logit's bits then do not depend on
the batch, the chunk or the block that its row is in (`tests/kernels/torch_cpu` holds this for MKL).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from topkapi.context import Context
from topkapi.layout.index_key import fp8_page_views
from topkapi.reference.indexer import context_slots

BLOCK_POSITIONS = 512
_TILE_SCORES = 512
_LEAST_SCORES = 16


@dataclass(frozen=True)
class Rows:
    """The host's copy of what a context says about its rows: read once a call.

    `lengths` has R entries, `bounds` B + 1: request b owns rows `bounds[b]:bounds[b + 1]`.
    """

    lengths: list[int]
    bounds: list[int]

    @classmethod
    def of(cls, context: Context) -> Rows:
        """Synchronises on a GPU."""
        return cls(context.lengths.tolist(), context.cu_seqlens_q.tolist())

    def spans(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """`(request, first row, last row)` of every request with rows in `first:last`."""
        for request in range(len(self.bounds) - 1):
            begin, end = max(self.bounds[request], first), min(self.bounds[request + 1], last)
            if begin < end:
                yield request, begin, end


@dataclass(frozen=True)
class _Tile:
    """Rows `first:last` of one request, their queries `[M, Di]` and weights `[n, 1, Hi]`."""

    first: int
    last: int
    longest: int
    shortest: int
    q: torch.Tensor
    weights: torch.Tensor


def score_rows(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context: Context,
    rows: Rows,
    first: int,
    start: int,
    logits: torch.Tensor,
    *,
    skip_below: int = 0,
) -> None:
    """Fill `logits [n, W]` fp32 for rows `first:first + n` and positions `start:start + W`.

    -inf where a row does not see the position. Tiles of rows none of which is longer than
    `skip_below` are left at -inf, unscored.
    """
    logits.fill_(float("-inf"))
    count, width = logits.shape
    index_dim = q.shape[2]
    scores = torch.empty(
        _tile_rows(q.shape[1]) * q.shape[1], BLOCK_POSITIONS, dtype=torch.float32, device=q.device
    )
    for request, begin, end in rows.spans(first, first + count):
        longest = max(rows.lengths[begin:end])
        if longest <= max(start, skip_below):
            continue
        tiles = [
            tile
            for tile in _tiles(q, weights, rows, begin, end)
            if tile.longest > max(start, skip_below)
        ]
        stop = min(longest, start + width)
        for at, keys, scales in _key_blocks(index_cache, context, request, start, stop, index_dim):
            columns = slice(at - start, min(at + BLOCK_POSITIONS, stop) - start)
            for tile in tiles:
                if tile.longest <= at:
                    continue
                block = _score_tile(tile, keys, scales, scores)[:, : columns.stop - columns.start]
                if tile.shortest < start + columns.stop:
                    position = torch.arange(at, start + columns.stop, device=q.device)
                    outside = position >= context.lengths[tile.first : tile.last, None]
                    block.masked_fill_(outside, float("-inf"))
                logits[tile.first - first : tile.last - first, columns] = block


def _score_tile(
    tile: _Tile, keys: torch.Tensor, scales: torch.Tensor | None, scores: torch.Tensor
) -> torch.Tensor:
    """Logits `[n, 512]` of a tile against `keys [512, Di]`; `scores` is scratch memory."""
    padded_rows, _, heads = tile.weights.shape
    scores = scores[: tile.q.shape[0]]
    torch.mm(tile.q, keys.t(), out=scores)
    scores.relu_()
    logits = torch.bmm(tile.weights, scores.view(padded_rows, heads, BLOCK_POSITIONS))[:, 0]
    logits = logits[: tile.last - tile.first]
    return logits if scales is None else logits.mul_(scales)


def _tile_rows(heads: int) -> int:
    """Rows of a full tile: as many as make 512 scores a key, and never fewer than 16 scores."""
    return max(_TILE_SCORES // heads, -(-_LEAST_SCORES // heads), 1)


def _tiles(
    q: torch.Tensor, weights: torch.Tensor, rows: Rows, begin: int, end: int
) -> Iterator[_Tile]:
    heads, index_dim = q.shape[1:]
    step = _tile_rows(heads)
    least = -(-_LEAST_SCORES // heads)
    for first in range(begin, end, step):
        last = min(first + step, end)
        missing = max(least - (last - first), 0)
        tile_q = q[first:last].float()
        tile_weights = weights[first:last].float()
        if missing:
            tile_q = torch.nn.functional.pad(tile_q, (0, 0, 0, 0, 0, missing))
            tile_weights = torch.nn.functional.pad(tile_weights, (0, 0, 0, missing))
        lengths = rows.lengths[first:last]
        yield _Tile(
            first=first,
            last=last,
            longest=max(lengths),
            shortest=min(lengths),
            q=tile_q.reshape(-1, index_dim),
            weights=tile_weights[:, None].contiguous(),
        )


def _key_blocks(
    index_cache: torch.Tensor, context: Context, request: int, start: int, stop: int, dim: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """`(first position, keys [512, Di] fp32, scales [512] fp32 or None)` for `start:stop`.

    The last block is filled up with its last key. Keys in consecutive slots of an fp32 cache are
    not copied.
    """
    slots = context_slots(context, request, stop)[start:].long()
    missing = -slots.shape[0] % BLOCK_POSITIONS
    if missing:
        slots = torch.cat((slots, slots[-1:].expand(missing)))
    grid = slots.view(-1, BLOCK_POSITIONS)
    if index_cache.dtype == torch.uint8:
        page_size = index_cache.shape[1] // (dim + 4)
        keys, scales = fp8_page_views(index_cache, dim, page_size)
        table = _e4m3_values(index_cache.device)
        for block, block_slots in enumerate(grid):
            page, offset = block_slots // page_size, block_slots % page_size
            codes = keys.view(torch.uint8)[page, offset]
            values = table.index_select(0, codes.view(-1).int()).view(BLOCK_POSITIONS, dim)
            yield start + block * BLOCK_POSITIONS, values, scales[page, offset]
        return
    ramp = torch.arange(BLOCK_POSITIONS, device=slots.device)
    consecutive = (grid == grid[:, :1] + ramp).all(1).tolist()
    for block, first in enumerate(grid[:, 0].tolist()):
        if consecutive[block]:
            values = index_cache[first : first + BLOCK_POSITIONS]
        else:
            values = index_cache.index_select(0, grid[block])
        yield start + block * BLOCK_POSITIONS, values.float(), None


def _e4m3_values(device: torch.device) -> torch.Tensor:
    """All 256 e4m3 values `[256]` fp32 by their code: a lookup is faster than torch's cast."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).float()
