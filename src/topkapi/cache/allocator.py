"""Which pages of the token pool are free? Knows page numbers only, never what they hold.

Page 0 is never handed out: its slot 0 is the dummy that padded rows write to.
"""

from __future__ import annotations

from collections.abc import Sequence

from topkapi.errors import CacheCorruptionError, CacheExhaustedError, ConfigError
from topkapi.layout import PAGE_SIZE


class PageAllocator:
    """Hands out pages `1..num_pages-1`, most recently freed first. Pure host state, no tensors."""

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE) -> None:
        """`num_pages` counts the reserved page 0. Raises `ConfigError` below 2 pages."""
        if num_pages < 2 or page_size < 1:
            raise ConfigError(
                "PageAllocator: expected at least 2 pages (page 0 is reserved) of at least 1 "
                f"token, got {num_pages} pages of {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = [False] + [True] * (num_pages - 1)

    @property
    def available(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def alloc(self, n: int) -> list[int]:
        """Take `n` pages. Raises `CacheExhaustedError`, taking none, when fewer are free."""
        if n > len(self._free):
            raise CacheExhaustedError(
                f"the token cache has {len(self._free)} free pages of {self.page_size} tokens "
                f"left, {n} were asked for; free requests, or make the cache larger"
            )
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises `CacheCorruptionError`, freeing none, for a page that is already
        free, named twice, reserved, or not of this pool.
        """
        for page in pages:
            if not 0 < page < self.num_pages:
                raise CacheCorruptionError(
                    f"page {page} cannot be freed: pages 1 to {self.num_pages - 1} exist"
                )
            if self._is_free[page]:
                raise CacheCorruptionError(f"page {page} was freed twice")
        if len(set(pages)) != len(pages):
            raise CacheCorruptionError(f"a page was freed twice in one call: {sorted(pages)}")
        for page in pages:
            self._is_free[page] = True
        self._free.extend(pages)

    def grow(self, num_pages: int) -> None:
        """Raise the number of pages to `num_pages`; pages in use stay as they are."""
        if num_pages < self.num_pages:
            raise ConfigError(
                f"PageAllocator.grow: expected at least {self.num_pages} pages, got {num_pages}"
            )
        self._free[:0] = range(num_pages - 1, self.num_pages - 1, -1)
        self._is_free += [True] * (num_pages - self.num_pages)
        self.num_pages = num_pages
