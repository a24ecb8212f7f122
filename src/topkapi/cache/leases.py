"""Which pages does a request hold, and which of them does it share?

A lease is the pages of one request in order of position: first pages of the prefix tree, shared
and locked, then pages of its own. Full pages of its own move into the tree once they are computed.
Pure bookkeeping over page numbers: what a page holds, and who computes it, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from topkapi.cache.allocator import PageAllocator
from topkapi.cache.prefix_tree import PageNode, PrefixTree
from topkapi.errors import CacheExhaustedError


@dataclass(eq=False)
class Lease:
    """`pages[i]` holds tokens `i * page_size` and on; the first `len(nodes)` are the tree's."""

    nodes: list[PageNode] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class PageLeases:
    """Lends the pages of one pool. Without a tree nothing is shared and nothing is kept."""

    def __init__(self, pages: PageAllocator, tree: PrefixTree | None = None) -> None:
        self.tree = tree
        self._pages = pages

    @property
    def page_size(self) -> int:
        return self._pages.page_size

    @property
    def num_pages(self) -> int:
        """All pages that can be lent."""
        return self._pages.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._pages.available

    @property
    def available(self) -> int:
        """Pages that can be lent now, free ones and those kept for reuse alone."""
        return self.num_free + (self.tree.num_evictable if self.tree else 0)

    def find(self, token_ids: Sequence[int], limit: int) -> Lease:
        """A lease of the longest computed prefix of at most `limit` tokens, in whole pages, and of
        nothing else yet.
        """
        if self.tree is None:
            return Lease()
        return Lease(self.tree.lock(token_ids, limit // self.page_size))

    def missing(self, lease: Lease, num_pages: int) -> int:
        """Pages that `fill` would take: those beyond the lease's, and its own on the host."""
        held = len(lease.pages) or sum(node.page is not None for node in lease.nodes)
        return max(num_pages - held, 0)

    def fill(self, lease: Lease, num_pages: int, *, spare: int = 0) -> bool:
        """Make the lease `num_pages` long; False, taking nothing, unless `spare` pages stay free.

        Pages of its prefix that are on the host come back to the device.
        """
        needed = self.missing(lease, num_pages)
        if needed + spare > self.available:
            return False
        taken = self._take(needed)
        if not lease.pages and lease.nodes:
            assert self.tree is not None, "shared pages come from a tree"
            away = [node for node in lease.nodes if node.page is None]
            self.tree.restore(away, taken[: len(away)])
            taken = taken[len(away) :]
            lease.pages = [node.page for node in lease.nodes if node.page is not None]
        lease.pages.extend(taken)
        return True

    def complete(self, lease: Lease, token_ids: Sequence[int], num_computed: int) -> int:
        """Put the lease's full computed pages into the tree, for others to use.

        A page that the tree has already is given back and the tree's used instead. Returns the
        first index of `pages` that changed so, `len(pages)` when none did.
        """
        changed, size = len(lease.pages), self.page_size
        if self.tree is None:
            return changed
        for i in range(len(lease.nodes), num_computed // size):
            parent = lease.nodes[-1] if lease.nodes else None
            own = lease.pages[i]
            node = self.tree.insert(parent, tuple(token_ids[i * size : (i + 1) * size]), own)
            assert node.page is not None, "an inserted page is on the device"
            lease.nodes.append(node)
            if node.page != own:
                self._pages.free([own])
                lease.pages[i] = node.page
                changed = min(changed, i)
        return changed

    def close(self, lease: Lease) -> None:
        """Give everything back; pages of the tree stay in it until their room is needed."""
        if self.tree is not None:
            self.tree.unlock(lease.nodes)
        self._pages.free(lease.pages[len(lease.nodes) :])
        lease.nodes, lease.pages = [], []

    def _take(self, n: int) -> list[int]:
        short = n - self._pages.available
        if short > 0:
            if self.tree is None or self.tree.num_evictable < short:
                raise CacheExhaustedError(f"{n} pages were asked for, {self.available} can be lent")
            self._pages.free(self.tree.evict(short))
        return self._pages.alloc(n)
