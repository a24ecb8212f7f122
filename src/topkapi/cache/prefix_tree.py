"""Which computed pages can be used again, by which tokens, and which of them go first?

A radix tree whose edges are whole pages of tokens: a node is one page, its path from the root the
tokens before it. One page number covers both records (latent and index key), because a token's two
records have the same slot. Pure host state; the bytes of evicted pages are `host_tier`'s.

What holds, always:
- A node is locked (`refs`) by everyone who reads it; a locked node's ancestors are locked, too.
- Pages on the device form a top part of the tree; below them may hang pages kept on the host.
- In both orders of eviction a node comes after all of its children there. So the oldest entry is
  always a leaf, and evicting costs the same however large the tree is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

PageKey = tuple[int, ...]


class HostStore(Protocol):
    """Where evicted pages are kept: copies pages out and back, and knows its free places."""

    @property
    def available(self) -> int: ...

    def alloc(self) -> int: ...

    def free(self, place: int) -> None: ...

    def offload(self, pages: Sequence[int], places: Sequence[int]) -> None: ...

    def restore(self, places: Sequence[int], pages: Sequence[int]) -> None: ...


@dataclass(eq=False)
class PageNode:
    """One computed page. It is on the device (`page`) or on the host (`place`), never both."""

    key: PageKey
    parent: PageNode | None
    page: int | None = None
    place: int | None = None
    refs: int = 0
    children: dict[PageKey, PageNode] = field(default_factory=dict)


class PrefixTree:
    """All computed pages that are kept, least recently released first to go.

    Attributes:
        num_pages: pages on the device, locked or not.
        num_host_pages: pages on the host.
        num_evicted, num_restored: pages that left the device, and that came back from the host.
    """

    def __init__(self, page_size: int, host: HostStore | None = None) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_host_pages = 0
        self.num_evicted = 0
        self.num_restored = 0
        self._host = host
        self._root = PageNode((), None)
        # Unlocked nodes, oldest first.
        self._idle: OrderedDict[PageNode, None] = OrderedDict()
        self._idle_host: OrderedDict[PageNode, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        """Device pages that nobody has locked."""
        return len(self._idle)

    def lock(self, token_ids: Sequence[int], max_pages: int) -> list[PageNode]:
        """Lock the longest known prefix of `token_ids`, at most `max_pages` pages of it.

        Pages on the device come first, those on the host after them: `restore` these before use.
        """
        node, found, size = self._root, [], self.page_size
        for first in range(0, max_pages * size, size):
            child = node.children.get(tuple(token_ids[first : first + size]))
            if child is None:
                break
            self._lock(child)
            found.append(child)
            node = child
        return found

    def unlock(self, nodes: Sequence[PageNode]) -> None:
        """Undo one lock of each node of a path, given from the root down."""
        for node in reversed(nodes):
            assert node.refs > 0, "a page was unlocked more often than locked"
            node.refs -= 1
            if not node.refs:
                (self._idle if node.page is not None else self._idle_host)[node] = None

    def insert(self, parent: PageNode | None, key: PageKey, page: int) -> PageNode:
        """The locked node of a computed page below `parent` (locked by the caller; None: the root).

        Takes `page` over unless the node is on the device already: `node.page` says which.
        """
        parent = parent or self._root
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PageNode(key, parent, page, refs=1)
            self.num_pages += 1
            return node
        self._lock(node)
        if node.page is None:
            self._leave_host(node)
            node.page = page
            self.num_pages += 1
        return node

    def evict(self, n: int) -> list[int]:
        """Give up the `n` device pages released longest ago, to the host where there is room, and
        return them. At most `num_evictable`.
        """
        pages: list[int] = []
        moved: list[tuple[int, int]] = []
        for _ in range(n):
            node, _ = self._idle.popitem(last=False)
            page, node.page = node.page, None
            assert page is not None, "a page on the host is not among the device's"
            pages.append(page)
            place = self._host_place()
            if place is None:
                self._drop(node)
            else:
                node.place = place
                self._idle_host[node] = None
                self.num_host_pages += 1
                moved.append((page, place))
        self.num_pages -= n
        self.num_evicted += n
        if moved and self._host is not None:
            self._host.offload([page for page, _ in moved], [place for _, place in moved])
        return pages

    def restore(self, nodes: Sequence[PageNode], pages: Sequence[int]) -> None:
        """Bring locked nodes back from the host into device `pages`, which the tree takes over."""
        if not nodes:
            return
        assert self._host is not None, "there is a host tier to restore from"
        places = [node.place for node in nodes if node.place is not None]
        self._host.restore(places, pages)
        for node, page in zip(nodes, pages, strict=True):
            self._leave_host(node)
            node.page = page
        self.num_pages += len(nodes)
        self.num_restored += len(nodes)

    def nodes(self) -> Iterable[PageNode]:
        """Every node, parents before children."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _lock(self, node: PageNode) -> None:
        if not node.refs:
            del (self._idle if node.page is not None else self._idle_host)[node]
        node.refs += 1

    def _host_place(self) -> int | None:
        """A free place on the host, made free by forgetting the oldest page there; None without."""
        if self._host is None:
            return None
        if not self._host.available:
            if not self._idle_host:
                return None
            self._drop(next(iter(self._idle_host)))
        return self._host.alloc()

    def _drop(self, node: PageNode) -> None:
        """Forget an unlocked node that is not on the device, and all below it."""
        assert node.parent is not None, "the root is never dropped"
        del node.parent.children[node.key]
        stack = [node]
        while stack:
            dropped = stack.pop()
            stack.extend(dropped.children.values())
            if dropped.place is not None:
                del self._idle_host[dropped]
                self._leave_host(dropped)

    def _leave_host(self, node: PageNode) -> None:
        assert self._host is not None, "the node was on the host"
        assert node.place is not None, "the node was on the host"
        self._host.free(node.place)
        node.place = None
        self.num_host_pages -= 1
