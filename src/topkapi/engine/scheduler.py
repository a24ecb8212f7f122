"""Which requests run in the next step, and how many tokens of each?

Pure bookkeeping over pages and rows: no tensors, no model, no text. Everybody has a place in one
order, the more urgent priority first and then the earlier arrival.

The rules:
- A step has a token budget. Decoding requests come first (one token each); what is left goes, in
  order, to prompts under way and to waiting requests, as a chunk each.
- A request starts after the longest prefix that the cache holds, and takes the pages of all its
  other known tokens at once. It leaves one spare page for each running request, so that a request
  just admitted is not thrown out by the next page somebody needs. Nobody is admitted past a
  waiting request that does not fit.
- A request whose next page another one, which samples in this very step, has computed by then
  waits for the next step, and finds it there.
- A decode that needs a page when none is free preempts the last running request: it lets its pages
  go and waits, to be computed again from its tokens (seeds are counted by position, so its text
  does not change), as far as they have left the prefix cache by then. A waiting request preempts
  those of a less urgent priority, never its equals. The first request is never preempted, and every
  request fits the cache alone: work always goes on.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

from topkapi.cache.leases import PageLeases
from topkapi.engine.request import Request
from topkapi.errors import ConfigError

_ORDER = attrgetter("order")


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

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running_requests"):
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
    one is sampled from it. `num_drafts` guesses of what follows are then computed with it, in slots
    of the same pages.
    """

    request: Request
    start: int
    length: int
    first_new_page: int
    new_pages: tuple[int, ...]
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        """Tokens the step computes for the request, drafts included."""
        return self.length + self.num_drafts

    @property
    def samples(self) -> bool:
        return self.start + self.length == self.request.num_tokens


@dataclass(frozen=True)
class Batch:
    """The chunks of one step: at most one for each request."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)


class Scheduler:
    """Holds every unfinished request. See the file's docstring for the rules.

    Attributes:
        waiting, running: in order.
        num_preemptions: how often a request lost its pages.
        num_looked_up, num_found: tokens of all requests admitted, and those found in the cache.
        wanted_drafts: how many drafts a decoding request would like, given how many decode. It gets
            all of them or none, of budget and pages that nobody else needs in this step.
    """

    wanted_drafts: Callable[[Request, int], int] | None = None

    def __init__(self, limits: SchedulerLimits, leases: PageLeases, rows: RowSource) -> None:
        self.limits = limits
        self.leases = leases
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_looked_up = 0
        self.num_found = 0
        self._refused: tuple[Request, int, int] | None = None
        self._rows = rows

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self.waiting)

    @property
    def free_pages(self) -> int:
        """Pages of the cache that no request holds."""
        return self.leases.available

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits the cache alone."""
        insort(self.waiting, request, key=_ORDER)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not, and give its pages and row back."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def schedule(self) -> Batch:
        """Choose the next step's chunks; empty only when there is no work."""
        self._make_room()
        preemptions = self.num_preemptions
        chunks = self._with_drafts(self._next_tokens())
        budget = self.limits.max_batch_tokens - Batch(tuple(chunks)).num_tokens
        prompts = deque(request for request in self.running if not _decodes(request))
        admitting = self.num_preemptions == preemptions
        while budget:
            chunk = None
            if admitting and self.waiting and not _precedes(prompts, self.waiting[0]):
                chunk = self._admit(budget, chunks)
                admitting = chunk is not None
            if chunk is None and prompts:
                chunk = _chunk(prompts.popleft(), budget)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.length
        return Batch(tuple(chunks))

    def advance(self, batch: Batch) -> None:
        """Note that every chunk of `batch` is in the cache, its pages mapped. Call before appending
        new tokens. A step that failed is not noted: its chunks come again.
        """
        for chunk in batch.chunks:
            chunk.request.num_computed = chunk.start + chunk.length
            chunk.request.num_mapped = chunk.first_new_page + len(chunk.new_pages)

    def share(self, request: Request) -> None:
        """Let others use the request's computed pages, which a sound token has come out of."""
        if request.lease is not None:
            finished = request.num_computed - request.num_unfollowed
            changed = self.leases.complete(request.lease, request.token_ids, finished)
            request.num_mapped = min(request.num_mapped, changed)

    def _next_tokens(self) -> list[Chunk]:
        """One more token for every request that is past its prompt, preempting from the end."""
        chunks = []
        for request in list(self.running):
            if not _decodes(request) or request.lease is None:
                continue
            pages = self._pages_for(request.num_tokens)
            while not self.leases.fill(request.lease, pages):
                last = self.running[-1]
                self._preempt(last)
                if last is request:
                    break
            if request.lease is not None:
                chunks.append(_chunk(request, 1))
        return chunks

    def _with_drafts(self, decodes: list[Chunk]) -> list[Chunk]:
        """Give decodes their drafts, in order, of at most half the budget that they leave."""
        if self.wanted_drafts is None:
            return decodes
        left = (self.limits.max_batch_tokens - len(decodes)) // 2
        chunks = []
        for chunk in decodes:
            request = chunk.request
            wanted = self.wanted_drafts(request, len(decodes))
            longest = request.num_tokens + wanted
            assert request.lease is not None, "a running request holds pages"
            if (
                0 < wanted <= left
                and longest <= request.max_length
                and self.leases.fill(
                    request.lease, self._pages_for(longest), spare=len(self.running)
                )
            ):
                chunk = replace(_chunk(request, 1), num_drafts=wanted)
                left -= wanted
            chunks.append(chunk)
        return chunks

    def _admit(self, budget: int, chunks: Sequence[Chunk]) -> Chunk | None:
        """The first chunk of the first waiting request, or None when it has to wait on."""
        request = self.waiting[0]
        # Looking a long prompt up takes time: not again before something has changed.
        state = request, len(self.running), self.leases.available
        if len(self.running) >= self.limits.max_running_requests or state == self._refused:
            return None
        lease = self.leases.find(request.token_ids, request.num_skippable)
        cached = len(lease.nodes) * self.leases.page_size
        pages = self._pages_for(request.num_tokens)
        if self._computed_now(request, cached, chunks):
            self.leases.close(lease)
            return None
        if not self.leases.fill(lease, pages, spare=len(self.running)):
            self.leases.close(lease)
            self._refused = state
            return None
        del self.waiting[0]
        request.lease, request.num_computed = lease, cached
        request.num_cached = cached if request.num_cached is None else request.num_cached
        [request.row] = self._rows.alloc(1)
        insort(self.running, request, key=_ORDER)
        self.num_looked_up += request.num_tokens
        self.num_found += cached
        return _chunk(request, budget)

    def _computed_now(self, request: Request, cached: int, chunks: Sequence[Chunk]) -> bool:
        """Whether the page that `request` misses next, with the same prefix, can be found after
        this step: a request that samples in it has computed the page by then, and shares it.
        """
        end = cached + self.leases.page_size
        if self.leases.tree is None or end > request.num_skippable:
            return False
        page = request.token_ids[cached:end]
        return any(
            end <= chunk.start + chunk.length
            and chunk.samples
            and chunk.request.token_ids[cached:end] == page  # cheap, and seldom true by chance
            and chunk.request.token_ids[:cached] == request.token_ids[:cached]
            for chunk in chunks
        )

    def _make_room(self) -> None:
        """Preempt less urgent requests for the first waiting one, if that is enough."""
        if not self.waiting or not self._less_urgent(self.waiting[0]):
            return
        urgent = self.waiting[0]
        lease = self.leases.find(urgent.token_ids, urgent.num_skippable)
        needed = self.leases.missing(lease, self._pages_for(urgent.num_tokens))

        def fits(running: int, available: int) -> bool:
            return running < self.limits.max_running_requests and needed + running <= available

        victims = self._less_urgent(urgent)
        held = sum(len(request.lease.pages) for request in victims if request.lease)
        if fits(len(self.running) - len(victims), self.leases.available + held):
            while victims and not fits(len(self.running), self.leases.available):
                self._preempt(victims.pop())
        self.leases.close(lease)

    def _less_urgent(self, request: Request) -> list[Request]:
        return [other for other in self.running if other.priority > request.priority]

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        insort(self.waiting, request, key=_ORDER)

    def _release(self, request: Request) -> None:
        if request.lease is not None:
            self.leases.close(request.lease)
        if request.row is not None:
            self._rows.free([request.row])
        request.lease, request.row, request.num_mapped = None, None, 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.leases.page_size)


def _decodes(request: Request) -> bool:
    return request.num_tokens - request.num_computed == 1 and request.num_computed > 0


def _precedes(prompts: deque[Request], waiting: Request) -> bool:
    return bool(prompts) and prompts[0].order < waiting.order


def _chunk(request: Request, budget: int) -> Chunk:
    assert request.lease is not None, "a running request holds pages"
    length = min(request.num_tokens - request.num_computed, budget)
    new_pages = tuple(request.lease.pages[request.num_mapped :])
    return Chunk(request, request.num_computed, length, request.num_mapped, new_pages)
