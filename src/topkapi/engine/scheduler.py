"""Which requests run in the next step, and how many tokens of each?

Pure bookkeeping over page and row counts: no tensors, no model, no text. Running and waiting
requests together are always in order of arrival, so nobody is overtaken.

The rules:
- A step has a token budget. Decoding requests come first (one token each), then prompts under way
  get a chunk each, then waiting requests are admitted, all oldest first.
- Admission takes the pages of every known token at once, and leaves one spare page for each running
  request, so that a request just admitted is not thrown out by the next page somebody needs.
- A decode that needs a page when none is free preempts the youngest running request: its pages are
  freed and it waits, first in line, to be computed again from its tokens (seeds are counted by
  position, so its text does not change). The oldest request is never preempted while another runs,
  and every admitted request fits the cache alone: work always goes on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from topkapi.engine.request import Request
from topkapi.errors import ConfigError


class PageSource(Protocol):
    """The part of a page allocator that scheduling needs."""

    @property
    def available(self) -> int: ...

    def alloc(self, n: int) -> list[int]: ...

    def free(self, pages: list[int]) -> None: ...


class RowSource(Protocol):
    """The part of a request-to-token pool that scheduling needs."""

    def alloc(self, n: int) -> list[int]: ...

    def free(self, rows: list[int]) -> None: ...


@dataclass(frozen=True)
class SchedulerLimits:
    """How much runs at once.

    `max_batch_tokens` bounds the tokens of one step; a longer prompt is computed in chunks.
    Raises `ConfigError` when a full house of decodes would not fit one step.
    """

    max_batch_tokens: int = 2048
    max_running_requests: int = 64
    page_size: int = 64

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running_requests", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_batch_tokens < self.max_running_requests:
            raise ConfigError(
                f"max_batch_tokens: expected at least max_running_requests "
                f"({self.max_running_requests}), got {self.max_batch_tokens}"
            )


@dataclass(frozen=True)
class Chunk:
    """Tokens `start : start + length` of one request, to be computed in this step.

    `new_pages` are the pages that no finished step has mapped yet; `first_new_page` pages come
    before them. `samples` says that the chunk reaches the request's last token, so that the next
    one is sampled from it.
    """

    request: Request
    start: int
    length: int
    first_new_page: int
    new_pages: tuple[int, ...]

    @property
    def samples(self) -> bool:
        return self.start + self.length == self.request.num_tokens


@dataclass(frozen=True)
class Batch:
    """The chunks of one step: at most one for each request."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class Scheduler:
    """Holds every unfinished request. See the file's docstring for the rules."""

    def __init__(self, limits: SchedulerLimits, pages: PageSource, rows: RowSource) -> None:
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._pages = pages
        self._rows = rows

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self.waiting)

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no request holds."""
        return self._pages.available

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits the cache alone."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not, and give its pages and row back."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def schedule(self) -> Batch:
        """Choose the next step's chunks; empty only when there is no work."""
        chunks: list[Chunk] = []
        budget = self.limits.max_batch_tokens
        preemptions = self.num_preemptions
        for request in list(self.running):
            if _decodes(request) and request.row is not None:
                chunk = self._decode(request)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= 1
        for request in self.running:
            if budget and not _decodes(request):
                chunks.append(_chunk(request, budget))
                budget -= chunks[-1].length
        while budget and self.num_preemptions == preemptions and self._can_admit():
            chunks.append(self._admit(budget))
            budget -= chunks[-1].length
        return Batch(tuple(chunks))

    def advance(self, batch: Batch) -> None:
        """Note that every chunk of `batch` is in the cache, its pages mapped. Call before appending
        new tokens. A step that failed is not noted: its chunks come again.
        """
        for chunk in batch.chunks:
            chunk.request.num_computed = chunk.start + chunk.length
            chunk.request.num_mapped = chunk.first_new_page + len(chunk.new_pages)

    def _decode(self, request: Request) -> Chunk | None:
        """One more token for a request, or None when it had to be preempted itself."""
        missing = max(self._pages_for(request.num_tokens) - len(request.pages), 0)
        while missing > self._pages.available:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return None
        request.pages.extend(self._pages.alloc(missing))
        return _chunk(request, 1)

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.limits.max_running_requests:
            return False
        needed = self._pages_for(self.waiting[0].num_tokens)
        return needed + len(self.running) <= self._pages.available

    def _admit(self, budget: int) -> Chunk:
        request = self.waiting.popleft()
        request.pages = self._pages.alloc(self._pages_for(request.num_tokens))
        [request.row] = self._rows.alloc(1)
        self.running.append(request)
        return _chunk(request, budget)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        if request.pages:
            self._pages.free(request.pages)
        if request.row is not None:
            self._rows.free([request.row])
        request.pages, request.row, request.num_mapped = [], None, 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)


def _decodes(request: Request) -> bool:
    return request.num_tokens - request.num_computed == 1 and request.num_computed > 0


def _chunk(request: Request, budget: int) -> Chunk:
    length = min(request.num_tokens - request.num_computed, budget)
    new_pages = tuple(request.pages[request.num_mapped :])
    return Chunk(request, request.num_computed, length, request.num_mapped, new_pages)
