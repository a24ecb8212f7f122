"""A model whose cache can be read: every slot says which tokens it was computed from.

It computes what a scheduler tells it to and checks that each context it reads is the request's own,
slot by slot; so a page that is shared wrongly, served too early, freed too early or lost on its way
to the host and back is noticed where it is read. Its next token depends on the whole context. It
drafts where it is asked to: some guesses are right, and the wrong ones leave their slots spoilt.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from topkapi.cache import PageAllocator, PageLeases, PrefixTree, ReqToTokenPool
from topkapi.engine.request import Request, Sampled, TokenLogprob
from topkapi.engine.scheduler import Batch, Chunk

VOCAB = 50


def digest(before: int, token: int) -> int:
    """What a slot holds: a name of the token and of all before it."""
    return zlib.crc32(f"{before} {token}".encode())


def next_token(context: int) -> int:
    return context % VOCAB


def alone(prompt: Sequence[int], num_output: int) -> list[int]:
    """The answer of `num_output` tokens that the model gives a request which has it to itself."""
    context = 0
    for token in prompt:
        context = digest(context, token)
    answer = []
    for _ in range(num_output):
        answer.append(next_token(context))
        context = digest(context, answer[-1])
    return answer


@dataclass
class FakeHost:
    """Host places holding the content of pages."""

    slots: dict[int, int]
    size: int
    page_size: int
    unused: list[int] = field(init=False)
    held: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unused = list(range(self.size))

    @property
    def available(self) -> int:
        return len(self.unused)

    def alloc(self) -> int:
        return self.unused.pop()

    def free(self, place: int) -> None:
        assert place not in self.unused, "freed twice"
        self.unused.append(place)

    def offload(self, pages: Sequence[int], places: Sequence[int]) -> None:
        for page, place in zip(pages, places, strict=True):
            self.held[place] = [self.slots[slot] for slot in self._slots(page)]
            for slot in self._slots(page):
                del self.slots[slot]

    def restore(self, places: Sequence[int], pages: Sequence[int]) -> None:
        for place, page in zip(places, pages, strict=True):
            self.slots.update(zip(self._slots(page), self.held.pop(place), strict=True))

    def _slots(self, page: int) -> range:
        return range(page * self.page_size, (page + 1) * self.page_size)


class FakeModel:
    """A runner over slots in a dictionary. `faulty` tokens spoil the logits that they end in. A
    request has up to `drafts` drafts a step, and then offers its newest pages late.
    """

    def __init__(
        self, page_size: int, faulty: frozenset[int] = frozenset(), drafts: int = 0
    ) -> None:
        self.slots: dict[int, int] = {}
        self.num_run = 0
        self._page_size = page_size
        self._faulty = faulty
        self._drafts = drafts
        self._table: dict[tuple[int, int], int] = {}

    def wanted_drafts(self, request: Request, batch_size: int) -> int:
        return (request.request_id + request.num_tokens + batch_size) % (self._drafts + 1)

    def run(self, batch: Batch) -> list[Sampled]:
        chosen: list[Sampled] = []
        for chunk in batch.chunks:
            context = self._run(chunk)
            if not chunk.samples:
                continue
            bad = chunk.request.token_ids[-1] in self._faulty
            token = TokenLogprob(-1 if bad else next_token(context), 0.0, {})
            if self._drafts:
                chunk.request.num_unfollowed = context % 3
            chosen.append([token, *self._verify(chunk, context)] if chunk.num_drafts else token)
        return chosen

    def _verify(self, chunk: Chunk, context: int) -> list[TokenLogprob]:
        """The tokens after the first: those that drafts guessed and what follows the last right
        one. All drafts are computed, the wrong ones, too.
        """
        right, found = context % (chunk.num_drafts + 1), []
        first = chunk.start + chunk.length
        for place in range(chunk.num_drafts):
            guess = next_token(context) if place < right else VOCAB + 1
            context = digest(context, guess)
            self.slots[self._slot(chunk, first + place)] = context
            self.num_run += 1
            if place < right:
                found.append(TokenLogprob(next_token(context), 0.0, {}))
        return found

    def _slot(self, chunk: Chunk, position: int) -> int:
        assert chunk.request.row is not None
        page = self._table[chunk.request.row, position // self._page_size]
        return page * self._page_size + position % self._page_size

    def _run(self, chunk: Chunk) -> int:
        request = chunk.request
        assert request.row is not None
        assert chunk.length > 0
        for place, page in enumerate(chunk.new_pages):
            self._table[request.row, chunk.first_new_page + place] = page
        context, end = 0, chunk.start + chunk.length
        for position, token in enumerate(request.token_ids[:end]):
            context = digest(context, token)
            slot = self._slot(chunk, position)
            if position < chunk.start:
                assert self.slots.get(slot) == context, "a slot holds another request's tokens"
            else:
                self.slots[slot] = context
                self.num_run += 1
        return context


@dataclass
class World:
    """The parts of an engine over a fake model."""

    pages: int
    page_size: int = 4
    rows: int = 4
    host: int = 0
    prefix_cache: bool = True
    faulty: frozenset[int] = frozenset()
    drafts: int = 0
    model: FakeModel = field(init=False)
    leases: PageLeases = field(init=False)
    table: ReqToTokenPool = field(init=False)

    def __post_init__(self) -> None:
        self.model = FakeModel(self.page_size, self.faulty, self.drafts)
        host = FakeHost(self.model.slots, self.host, self.page_size) if self.host else None
        tree = PrefixTree(self.page_size, host) if self.prefix_cache else None
        self.leases = PageLeases(PageAllocator(self.pages + 1, self.page_size), tree)
        self.table = ReqToTokenPool(self.rows, self.pages * self.page_size)
