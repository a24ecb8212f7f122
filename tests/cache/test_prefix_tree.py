"""Is a page found by exactly the tokens it was computed from, and does the oldest go first?"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkapi.cache import Lease, PageAllocator, PageLeases, PrefixTree
from topkapi.errors import CacheExhaustedError

PAGE = 2


@dataclass
class Shelf:
    """Host places that note which page's content they hold: pages are named by what they held."""

    size: int
    device: dict[int, tuple[int, ...]]
    unused: set[int] = field(init=False)
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unused = set(range(self.size))

    @property
    def available(self) -> int:
        return len(self.unused)

    def alloc(self) -> int:
        return self.unused.pop()

    def free(self, place: int) -> None:
        assert place not in self.unused, "freed twice"
        self.unused.add(place)

    def offload(self, pages: list[int], places: list[int]) -> None:
        for page, place in zip(pages, places, strict=True):
            self.held[place] = self.device[page]

    def restore(self, places: list[int], pages: list[int]) -> None:
        for page, place in zip(pages, places, strict=True):
            self.device[page] = self.held[place]


class World:
    """Leases over pages whose content is the whole prefix that was computed into them."""

    def __init__(self, pages: int, host: int = 0) -> None:
        self.content: dict[int, tuple[int, ...]] = {}
        self.host = Shelf(host, self.content) if host else None
        self.tree = PrefixTree(PAGE, self.host)
        self.allocator = PageAllocator(pages + 1, PAGE)
        self.leases = PageLeases(self.allocator, self.tree)
        self.held: list[tuple[Lease, tuple[int, ...]]] = []

    def open(self, tokens: tuple[int, ...]) -> Lease | None:
        """A lease for all of `tokens`, computed; None when it does not fit."""
        lease = self.leases.find(tokens, len(tokens) - 1)
        if not self.leases.fill(lease, -(-len(tokens) // PAGE)):
            self.leases.close(lease)
            return None
        for i, page in enumerate(lease.pages):
            whole = tokens[: (i + 1) * PAGE]
            if i < len(lease.nodes):
                assert self.content[page] == whole, "a page of other tokens was served"
            else:
                self.content[page] = whole
        self.held.append((lease, tokens))
        return lease

    def close(self, place: int, *, completed: bool = True) -> None:
        lease, tokens = self.held.pop(place)
        if completed:
            self.leases.complete(lease, tokens, len(tokens))
        self.leases.close(lease)

    def run(self, *tokens: int) -> int:
        """Compute and close; how many pages were found."""
        lease = self.open(tokens)
        assert lease is not None
        found = len(lease.nodes)
        self.close(-1)
        return found

    def check(self) -> None:
        nodes = list(self.tree.nodes())
        in_tree = [node.page for node in nodes if node.page is not None]
        own = [page for lease, _ in self.held for page in lease.pages[len(lease.nodes) :]]
        assert len(set(in_tree + own)) == len(in_tree + own)
        assert self.allocator.available + len(in_tree) + len(own) == self.leases.num_pages
        assert len(in_tree) == self.tree.num_pages
        assert len(nodes) - len(in_tree) == self.tree.num_host_pages
        for node in nodes:
            assert (node.page is None) != (node.place is None)
            assert node.refs == sum(node in lease.nodes for lease, _ in self.held)
            assert node.parent is not None
            if node.page is not None and node.parent.parent is not None:
                assert node.parent.page is not None, "a page hangs below one that is not there"
        if self.host is not None:
            assert self.host.size - self.host.available == self.tree.num_host_pages
        unlocked = sum(node.refs == 0 and node.page is not None for node in nodes)
        assert self.tree.num_evictable == unlocked


def test_the_longest_prefix_of_whole_pages_but_never_the_last_token() -> None:
    world = World(20)
    assert world.run(1, 2, 3, 4, 5) == 0
    assert world.run(1, 2, 3, 4, 5) == 2
    assert world.run(1, 2, 3, 4) == 1
    assert world.run(1, 2, 3, 9, 5) == 1
    assert world.run(1, 9, 3, 4, 5) == 0
    assert world.run(3, 4, 5) == 0
    world.check()


def test_nothing_is_found_before_it_is_complete() -> None:
    world = World(20)
    lease = world.open((1, 2, 3, 4, 5))
    assert lease is not None
    assert world.leases.complete(lease, (1, 2, 3, 4, 5), 3) == 3
    second = world.open((1, 2, 3, 4, 5))
    assert second is not None
    assert len(second.nodes) == 1
    world.check()


def test_a_page_computed_twice_is_kept_once() -> None:
    world = World(20)
    tokens = (1, 2, 3, 4, 5)
    first, second = world.open(tokens), world.open(tokens)
    assert first is not None
    assert second is not None
    assert world.leases.complete(first, tokens, 4) == 3
    assert world.leases.complete(second, tokens, 4) == 0
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert world.allocator.available == 20 - 4
    world.check()


def test_the_page_released_longest_ago_goes_first_and_leaves_before_their_parents() -> None:
    world = World(6)
    world.run(1, 1, 2, 2)
    world.run(3, 3, 4, 4)
    world.run(1, 1, 2, 2, 5)  # the second page of the first is used again, and both outlive 3, 4
    world.run(6, 6, 7, 7, 8, 8)
    assert world.run(3, 3, 4, 4, 0) == 1
    world.check()
    assert world.run(1, 1, 2, 2, 0) < 2


def test_locked_pages_stay_and_too_much_is_refused() -> None:
    world = World(4)
    lease = world.open((1, 1, 2, 2, 3))
    assert lease is not None
    world.leases.complete(lease, (1, 1, 2, 2, 3), 5)
    assert world.open((5, 5, 6, 6)) is None
    with pytest.raises(CacheExhaustedError):
        world.leases._take(2)
    assert world.open((5, 5)) is not None
    world.check()


def test_evicted_pages_come_back_from_the_host() -> None:
    world = World(3, host=3)
    world.run(1, 1, 2, 2, 3, 3)
    world.run(4, 4, 5, 5, 6, 6)
    assert (world.tree.num_pages, world.tree.num_host_pages) == (3, 3)
    assert world.run(1, 1, 2, 2, 3) == 2
    assert world.tree.num_restored == 2
    world.run(7, 7, 8, 8, 9, 9)
    world.check()
    assert world.run(1, 1, 2, 2, 3) == 2


def test_the_host_forgets_its_oldest_and_never_what_is_coming_back() -> None:
    world = World(3, host=1)
    world.run(1, 1, 2, 2, 3, 3)
    world.run(4, 4, 5, 5, 6, 6)
    assert world.tree.num_host_pages == 1
    assert world.run(1, 1, 2, 2, 3) == 1
    world.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "drop", "part"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(STEPS, st.integers(3, 9), st.integers(0, 5))
def test_nothing_is_lost_or_served_wrongly(
    steps: list[tuple[str, list[int], int]], pages: int, host: int
) -> None:
    world = World(pages, host)
    for what, tokens, number in steps:
        if what == "open":
            world.open(tuple(tokens))
        elif world.held and what == "part":
            lease, known = world.held[number % len(world.held)]
            world.leases.complete(lease, known, number % (len(known) + 1))
        elif world.held:
            world.close(number % len(world.held), completed=what == "close")
        world.check()
    while world.held:
        world.close(0)
    world.check()
    assert world.leases.available == pages
