"""Lightning-indexer logits in blocks, with plain torch.

`logit[r, s] = k_scale[s] * sum_h weights[r, h] * relu(q[r, h] . k[s])`, one request at a time: a
block of 512 keys is read once and multiplied with tiles of the request's query rows, so that the
`[rows, heads, 512]` scores of a tile stay in the processor's cache.

Every matrix product has whole 512s of columns and at least 16 rows, padded if need be: a BLAS
library changes its order of summation only for thinner shapes. A logit's bits then do not depend
on the batch, the chunk or the block of its row (`tests/kernels/torch_cpu` holds this for MKL).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from topkapi.context import Context
from topkapi.kernels.torch_cpu.fp8 import e4m3_to_fp32, read_index_keys
from topkapi.reference.indexer import context_slots

BLOCK_POSITIONS = 512
# Scores of a tile for one key and one thread: 1 MiB of scores a thread, so that work is shared out
# in pieces that are large and stay in cache.
_TILE_SCORES = 512
_MOST_THREADS = 8
_LEAST_SCORES = 16
_FEW_SCORES = 128


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

    request: int
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
    count = logits.shape[0]
    logits[max(rows.bounds[-1] - first, 0) :].fill_(float("-inf"))
    scratch = torch.empty(
        max(_tile_rows(q.shape[1]) * q.shape[1], _TILE_SCORES) * BLOCK_POSITIONS,
        dtype=torch.float32,
        device=q.device,
    )
    for request, begin, end in rows.spans(first, first + count):
        tiles = []
        for tile in _tiles(q, weights, rows, request, begin, end):
            scored = tile.longest - start if tile.longest > max(start, skip_below) else 0
            logits[tile.first - first : tile.last - first, scored:].fill_(float("-inf"))
            if scored:
                tiles.append(tile)
        if tiles:
            _score_request(tiles, index_cache, context, first, start, logits, scratch)


def _score_request(
    tiles: list[_Tile],
    index_cache: torch.Tensor,
    context: Context,
    first: int,
    start: int,
    logits: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Fill the visible part of `logits` for tiles of one request; `scratch` holds a tile."""
    stop = min(max(tile.longest for tile in tiles), start + logits.shape[1])
    few = max(tile.q.shape[0] for tile in tiles) <= _FEW_SCORES
    size = BLOCK_POSITIONS * (_TILE_SCORES // _FEW_SCORES if few else 1)
    dim = tiles[0].q.shape[1]
    blocks = _key_blocks(index_cache, context, tiles[0].request, start, stop, dim, size)
    for at, keys, scales in blocks:
        end_column = min(at + keys.shape[0], stop)
        for tile in tiles:
            if tile.longest <= at:
                continue
            block = _score_tile(tile, keys, scales, scratch)[:, : end_column - at]
            if tile.shortest < end_column:
                position = torch.arange(at, end_column, device=block.device)
                outside = position >= context.lengths[tile.first : tile.last, None]
                block.masked_fill_(outside, float("-inf"))
            lines = slice(tile.first - first, tile.last - first)
            logits[lines, at - start : end_column - start] = block


def _score_tile(
    tile: _Tile, keys: torch.Tensor, scales: torch.Tensor | None, scratch: torch.Tensor
) -> torch.Tensor:
    """Logits `[n, N]` of a tile against `keys [N, Di]`."""
    padded_rows, _, heads = tile.weights.shape
    shape = padded_rows * heads, keys.shape[0]
    scores = scratch[: shape[0] * shape[1]].view(shape)
    torch.mm(tile.q, keys.t(), out=scores)
    scores.relu_()
    logits = torch.bmm(tile.weights, scores.view(padded_rows, heads, -1))[:, 0]
    logits = logits[: tile.last - tile.first]
    return logits if scales is None else logits.mul_(scales)


def _tile_rows(heads: int) -> int:
    """Rows of a full tile: 512 scores a key and a thread, and never fewer than 16 scores."""
    scores = _TILE_SCORES * min(torch.get_num_threads(), _MOST_THREADS)
    return max(scores // heads, -(-_LEAST_SCORES // heads), 1)


def _tiles(
    q: torch.Tensor, weights: torch.Tensor, rows: Rows, request: int, begin: int, end: int
) -> Iterator[_Tile]:
    heads, index_dim = q.shape[1:]
    step = _tile_rows(heads)
    least = -(-_LEAST_SCORES // heads)
    for first in range(begin, end, step):
        last = min(first + step, end)
        missing = max(least - (last - first), 0)
        tile_q = q[first:last]
        fp8 = tile_q.dtype == torch.float8_e4m3fn
        tile_q = e4m3_to_fp32(tile_q.contiguous().view(torch.uint8)) if fp8 else tile_q.float()
        tile_weights = weights[first:last].float()
        if missing:
            tile_q = torch.nn.functional.pad(tile_q, (0, 0, 0, 0, 0, missing))
            tile_weights = torch.nn.functional.pad(tile_weights, (0, 0, 0, missing))
        lengths = rows.lengths[first:last]
        yield _Tile(
            request=request,
            first=first,
            last=last,
            longest=max(lengths),
            shortest=min(lengths),
            q=tile_q.reshape(-1, index_dim),
            weights=tile_weights[:, None].contiguous(),
        )


def _key_blocks(
    index_cache: torch.Tensor,
    context: Context,
    request: int,
    start: int,
    stop: int,
    dim: int,
    size: int,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """`(first position, keys [N, Di] fp32, scales [N] fp32 or None)` for `start:stop`.

    N is `size`, or less for the last block, but a multiple of 512: it is filled up with slots that
    follow the last one, whatever they hold, so that runs of slots stay runs. Keys in consecutive
    slots of an fp32 cache are not copied, and fp8 pages are copied whole. Other keys lie in memory
    that the next block uses again: fresh pages of memory would cost more than the copy.
    """
    slots = context_slots(context, request, stop)[start:].long()
    quantised = index_cache.dtype == torch.uint8
    missing = -slots.shape[0] % BLOCK_POSITIONS
    if missing:
        ramp = torch.arange(1, missing + 1, device=slots.device)
        if quantised:
            page_size = index_cache.shape[1] // (dim + 4)
            page, offset = slots[-1] // page_size, slots[-1] % page_size
            filling = page * page_size + (offset + ramp) % page_size
        else:
            filling = (slots[-1] + ramp).clamp_max_(index_cache.shape[0] - 1)
        slots = torch.cat((slots, filling))
    scratch = torch.empty(min(size, slots.shape[0]), dim, dtype=torch.float32, device=slots.device)
    for at in range(0, slots.shape[0], size):
        block = slots[at : at + size]
        if quantised:
            yield start + at, *read_index_keys(index_cache, block, dim)
        elif bool((block.diff() == 1).all()):
            keys = index_cache.narrow(0, int(block[0]), block.shape[0])
            yield start + at, keys.float(), None
        else:
            keys = scratch[: block.shape[0]]
            if index_cache.dtype == torch.float32:
                torch.index_select(index_cache, 0, block, out=keys)
            else:
                keys.copy_(index_cache.index_select(0, block))
            yield start + at, keys, None
