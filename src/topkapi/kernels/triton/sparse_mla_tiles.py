"""How the portable sparse MLA kernel is cut for a device: tiles, and programs that share a row.

Numbers measured on an H200 (docs/kernels/sparse_mla.md); what other devices hold is computed from
their shared memory. Knows no formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from topkapi.device import DeviceInfo


@dataclass(frozen=True)
class Tile:
    """How the work is cut: heads and tokens a tile, warps, pipeline stages, programs of an SM.

    `whole`: loads and products take all dims of a latent at once; otherwise 64, where a thread
    computes fewer addresses. `codes`: fp8 records stay what they are in shared memory, which
    `attend_codes` reads.
    """

    heads: int
    tokens: int
    warps: int
    stages: int
    per_sm: int = 1
    whole: bool = False
    codes: bool = False


def choose_tile(
    device: DeviceInfo, heads: int, latent: int, rope: int, itemsize: int, fp8: bool = False
) -> Tile:
    """The launch configuration for `heads` heads over records of `latent` and `rope` dims."""
    block_heads = min(64, _padded(heads))
    row = (_padded(latent) + (_padded(rope) if rope else 0)) * itemsize
    hip = device.backend == "hip"
    data_center = device.backend == "cuda" and int(device.arch) in (90, 100)
    if itemsize == 4:
        return Tile(16, 16, 8, 1)
    if data_center and block_heads == 64:
        fits = device.arch == 90 and (64 + 2 * 64) * row <= device.shared_memory
        return Tile(64, 64 if fits else 32, 8, 2, whole=True)
    if fp8 and not hip:
        # Blocks of 32 heads, whose products take more registers, were slower.
        return Tile(16, 64, 4, 3, per_sm=2, codes=True)
    if data_center:
        return Tile(block_heads, 64, 4, 3, per_sm=2)
    for most, tokens in ((32, 32), (16, 32), (16, 16)):
        block = min(most, block_heads)
        # The query, two buffers of tokens and room to convert one.
        if (block + 3 * tokens) * row <= device.shared_memory:
            return Tile(block, tokens, 4, 2 if hip else 3, whole=hip)
    return Tile(16, 16, 4, 1, whole=hip)


def choose_span(tile: Tile, latent: int, group: int) -> int:
    """How many dims of a latent, of fp8 groups of `group`, one load and product takes."""
    if tile.codes:
        return min(group, max(32, _padded(latent)))
    if tile.whole:
        return _padded(latent)
    even = latent & -latent
    return min(group or 64, even if even >= 16 else 64, _padded(latent))


def shares_scores(device: DeviceInfo, tile: Tile, latent: int, rope: int) -> bool:
    """Whether two groups of warps share a tile of scores as `wgmma` computes it.

    Needs loads of 16 bytes: only where both parts of a record come by `cp.async` does Triton wait
    for both products.
    """
    if latent % 8 or rope % 8 or not tile.whole:
        return False
    return device.arch == 90 and tile.heads >= 64 and tile.warps == 8


def _padded(size: int) -> int:
    """A size that a tile of matrix instructions may have."""
    return max(16, int(triton.next_power_of_2(size)))


def choose_splits(
    num_sms: int,
    programs: int,
    selected: int,
    *,
    heads: int,
    tokens: int,
    bytes_each: int,
    budget: int,
    per_sm: int = 1,
) -> int:
    """How many programs share one row's slots: enough to fill the device, within the budget.

    An SM runs `per_sm` programs at once, and there are `programs` of `heads` heads where none is
    shared. Each gets two tiles of `tokens` slots at least: what it does once takes as long. Where
    there is a merge anyway, one is enough if all have an SM of their own then, and of few heads:
    the merge pays for more. Partial results take `bytes_each` for each program of a row, over all
    rows.
    """
    programs = max(programs, 1)
    useful = min(num_sms * per_sm // programs, selected // (2 * tokens))
    if useful > 1 and heads < 64:
        useful = max(useful, min(num_sms // programs, selected // tokens))
    return max(1, min(useful, budget // max(bytes_each, 1), 64))
