"""Where do pages live that the device has no room for? In host memory, both records together.

One place is the bytes of one page over all layers, latents then index keys, so that moving a page
is one copy between the machines' memories. Knows bytes, not tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from topkapi.cache.pool import NSATokenToKVPool
from topkapi.errors import CacheCorruptionError, ConfigError


class HostTier:
    """A fixed number of places for pages of one pool, in page-locked memory beside a GPU.

    Copies are queued on the current stream, where everything that reads or writes a page runs too:
    nothing synchronises, and nothing is read before it has been written.
    """

    def __init__(self, pool: NSATokenToKVPool, num_places: int) -> None:
        """Allocates `num_places` pages at once. Raises `ConfigError` below one."""
        if num_places < 1:
            raise ConfigError(f"HostTier: expected at least one page, got {num_places}")
        self._pool = pool
        self._page_bytes = [view.shape[1] for view in pool.page_views()]
        pinned = pool.device.type == "cuda"
        shape = (num_places, sum(self._page_bytes))
        self._bytes = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        self._free = list(range(num_places - 1, -1, -1))
        self._is_free = [True] * num_places

    @property
    def available(self) -> int:
        """Places that hold nothing."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self._bytes.nbytes

    def alloc(self) -> int:
        """Take a place. The caller has seen that one is available."""
        place = self._free.pop()
        self._is_free[place] = False
        return place

    def free(self, place: int) -> None:
        """Give a place back. Raises `CacheCorruptionError` when it was free."""
        if self._is_free[place]:
            raise CacheCorruptionError(f"host place {place} was freed twice")
        self._is_free[place] = True
        self._free.append(place)

    @torch.inference_mode()
    def offload(self, pages: Sequence[int], places: Sequence[int]) -> None:
        """Copy device pages out. The pages may be overwritten by whatever is queued afterwards."""
        views = self._pool.page_views()
        for page, place in zip(pages, places, strict=True):
            record = torch.cat([view[page] for view in views])
            self._bytes[place].copy_(record, non_blocking=True)

    @torch.inference_mode()
    def restore(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy places back into device pages. The places may be freed at once."""
        views = self._pool.page_views()
        for place, page in zip(places, pages, strict=True):
            record = self._bytes[place].to(self._pool.device, non_blocking=True)
            parts = torch.split(record, self._page_bytes)
            for view, part in zip(views, parts, strict=True):
                view[page].copy_(part)
