"""Are pages and request rows handed out once, and faults noticed?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkapi.cache import PageAllocator, ReqToTokenPool
from topkapi.errors import CacheCorruptionError, CacheExhaustedError, ConfigError


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_pages_in_use_are_distinct_and_never_page_0(steps: list[tuple[bool, int]]) -> None:
    allocator, held = PageAllocator(9), []
    for take, n in steps:
        if take and n <= allocator.available:
            held += allocator.alloc(n)
        elif not take:
            allocator.free(held[:n])
            del held[:n]
        assert len(set(held)) == len(held)
        assert all(1 <= page <= 8 for page in held)
        assert allocator.available == 8 - len(held)


def test_exhaustion_takes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(1)
    with pytest.raises(CacheExhaustedError, match="2 free pages of 64 tokens left, 3 were asked"):
        allocator.alloc(3)
    assert allocator.available == 2
    assert len(allocator.alloc(2)) == 2


@pytest.mark.parametrize("pages", [[0], [4], [-1], [3], [1, 1]])
def test_a_wrong_free_is_noticed_and_frees_nothing(pages: list[int]) -> None:
    allocator = PageAllocator(4)
    assert sorted(allocator.alloc(2)) == [1, 2]
    with pytest.raises(CacheCorruptionError):
        allocator.free([2, *pages])
    assert allocator.available == 1
    allocator.free([2, 1])
    with pytest.raises(CacheCorruptionError, match="page 2 was freed twice"):
        allocator.free([2])


def test_growing_adds_pages_and_keeps_those_in_use() -> None:
    allocator = PageAllocator(3)
    held = allocator.alloc(2)
    allocator.grow(6)
    assert sorted(held + allocator.alloc(3)) == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="at least 6 pages, got 2"):
        allocator.grow(2)


def test_tokens_to_pages() -> None:
    allocator = PageAllocator(3, page_size=64)
    assert [allocator.pages_for(n) for n in (0, 1, 63, 64, 65)] == [0, 1, 1, 1, 2]
    with pytest.raises(ConfigError, match="page 0 is reserved"):
        PageAllocator(1)


def test_request_rows() -> None:
    table = ReqToTokenPool(3, 10)
    rows = table.alloc(2)
    with pytest.raises(CacheExhaustedError, match="1 free rows of 3, 2 were asked"):
        table.alloc(2)
    table.req_to_token[rows[0], :3] = 7
    table.grow(size=5, max_context_len=20)
    assert table.req_to_token.shape == (5, 20)
    assert table.req_to_token.sum() == 21
    assert table.available == 3
    table.free(rows)
    with pytest.raises(CacheCorruptionError):
        table.free(rows)
    assert sorted(table.alloc(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="at least"):
        table.grow(size=1)
    with pytest.raises(ConfigError, match="at least one row"):
        ReqToTokenPool(0, 4)
