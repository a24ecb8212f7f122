"""Scheduling: pure bookkeeping, driven here by a model that appends a token wherever one is due."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from topkapi.cache import PageAllocator, PageLeases, PrefixTree
from topkapi.engine.request import Request, SamplingParams
from topkapi.engine.scheduler import Batch, Scheduler, SchedulerLimits
from topkapi.errors import ConfigError

PAGE = 4


@dataclass
class Source:
    """Rows `1..size`, handed out lowest first; double frees are caught."""

    size: int
    unused: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.unused = set(range(1, self.size + 1))

    @property
    def available(self) -> int:
        return len(self.unused)

    def alloc(self, n: int) -> list[int]:
        taken = sorted(self.unused)[:n]
        assert len(taken) == n, "more asked than available"
        self.unused -= set(taken)
        return taken

    def free(self, items: list[int]) -> None:
        assert not self.unused & set(items), "double free"
        self.unused |= set(items)


def make(pages: int, tokens: int = 16, running: int = 8) -> tuple[Scheduler, PageLeases, Source]:
    leases, rows = PageLeases(PageAllocator(pages + 1, PAGE)), Source(running)
    return Scheduler(SchedulerLimits(tokens, running), leases, rows), leases, rows


def request(number: int, prompt: int, output: int = 3, priority: int = 0) -> Request:
    """No two have a page in common."""
    params = SamplingParams(max_tokens=output)
    tokens = list(range(1000 * number, 1000 * number + prompt))
    return Request(number, tokens, params, seed=0, max_length=10**6, priority=priority)


def pages_of(item: Request) -> list[int]:
    return item.lease.pages if item.lease else []


def step(scheduler: Scheduler) -> Batch:
    """One step of a model that always answers 7."""
    batch = scheduler.schedule()
    scheduler.advance(batch)
    for chunk in batch.chunks:
        if chunk.request.num_computed == chunk.request.num_tokens:
            chunk.request.token_ids.append(7)
            if chunk.request.num_output == chunk.request.params.max_tokens:
                scheduler.remove(chunk.request)
    return batch


def shape(batch: Batch) -> list[tuple[int, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks]


def test_a_long_prompt_comes_in_chunks_beside_decodes() -> None:
    scheduler, *_ = make(pages=20)
    scheduler.add(request(0, 3))
    assert shape(step(scheduler)) == [(0, 0, 3)]
    scheduler.add(request(1, 33, output=1))
    assert shape(step(scheduler)) == [(0, 3, 1), (1, 0, 15)]
    assert shape(step(scheduler)) == [(0, 4, 1), (1, 15, 15)]
    assert shape(step(scheduler)) == [(1, 30, 3)]
    assert not scheduler.has_work


def test_only_the_chunk_that_ends_a_prompt_samples() -> None:
    scheduler, *_ = make(pages=20)
    scheduler.add(request(0, 20))
    first, second = scheduler.schedule(), None
    assert [chunk.samples for chunk in first.chunks] == [False]
    scheduler.advance(first)
    second = scheduler.schedule()
    assert [chunk.samples for chunk in second.chunks] == [True]


def test_new_pages_are_named_once() -> None:
    scheduler, *_ = make(pages=20)
    scheduler.add(request(0, 18, output=8))
    named: list[int] = []
    owner = scheduler.waiting[0]
    while scheduler.has_work:
        [chunk] = scheduler.schedule().chunks
        assert chunk.first_new_page == len(named)
        named += chunk.new_pages
        assert named == pages_of(owner)
        scheduler.advance(Batch((chunk,)))
        if owner.num_computed == owner.num_tokens:
            owner.token_ids.append(7)
        if owner.num_output == 8:
            scheduler.remove(owner)
    assert len(named) == len(set(named)) == 7


def test_pages_of_a_step_that_failed_are_named_again() -> None:
    scheduler, *_ = make(pages=20)
    scheduler.add(request(0, 20))
    failed = scheduler.schedule()
    again = scheduler.schedule()
    assert again == failed
    assert len(again.chunks[0].new_pages) == 5


def test_admission_waits_for_space_and_keeps_order() -> None:
    scheduler, pages, _ = make(pages=6)
    for number, prompt in enumerate([12, 16, 1]):
        scheduler.add(request(number, prompt))
    assert shape(step(scheduler)) == [(0, 0, 12)]  # 1 needs 4 of 3 pages, and 2 may not overtake
    while scheduler.running:
        step(scheduler)
        if not any(r.request_id == 0 for r in scheduler.running):
            break
    assert shape(step(scheduler))[0] == (1, 0, 16)
    while scheduler.has_work:
        step(scheduler)
    assert pages.available == 6


def test_preemption_takes_the_youngest_and_recomputes_it() -> None:
    scheduler, pages, rows = make(pages=5, tokens=32)
    old, young = request(0, 4, output=12), request(1, 4, output=6)
    scheduler.add(old)
    step(scheduler)
    scheduler.add(young)
    while not scheduler.num_preemptions:
        step(scheduler)
        assert len(young.token_ids) < 20
    assert scheduler.waiting == [young]
    assert (young.num_computed, young.lease, young.row) == (0, None, None)
    kept = list(young.token_ids)
    while scheduler.has_work:
        batch = step(scheduler)
        for chunk in batch.chunks:
            if chunk.request is young and chunk.start == 0:
                assert chunk.length == len(kept)
    assert young.token_ids[: len(kept)] == kept
    assert (old.num_output, young.num_output) == (12, 6)
    assert (pages.available, rows.available) == (5, 8)


@pytest.mark.parametrize("seed", range(30))
def test_random_arrivals_all_finish_within_limits(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([5, 7, 12, 40])
    scheduler, pages, rows = make(pages=capacity, tokens=rng.choice([4, 9, 64]), running=4)
    requests = []
    for number in range(20):
        prompt = rng.randint(1, capacity * PAGE - 1)
        output = rng.randint(1, capacity * PAGE - prompt)
        requests.append(request(number, prompt, output))
    arriving = list(requests)
    for _ in range(100_000):
        while arriving and rng.random() < 0.3:
            scheduler.add(arriving.pop(0))
        batch = step(scheduler)
        assert batch.num_tokens <= scheduler.limits.max_batch_tokens
        assert batch.chunks or not scheduler.has_work
        assert len({id(chunk.request) for chunk in batch.chunks}) == len(batch.chunks)
        order = [r.request_id for r in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order)
        if not arriving and not scheduler.has_work:
            break
    assert all(r.num_output == r.params.max_tokens for r in requests)
    assert (pages.available, rows.available) == (capacity, 4)


def test_remove_waiting_and_running() -> None:
    scheduler, pages, rows = make(pages=10)
    requests = [request(number, 20) for number in range(3)]
    for item in requests:
        scheduler.add(item)
    step(scheduler)
    for item in reversed(requests):
        scheduler.remove(item)
    assert not scheduler.has_work
    assert (pages.available, rows.available) == (10, 8)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        SchedulerLimits(max_batch_tokens=4, max_running_requests=5)
    with pytest.raises(ConfigError, match="max_running_requests"):
        SchedulerLimits(max_running_requests=0)


def test_the_more_urgent_runs_first_and_equals_by_arrival() -> None:
    scheduler, *_ = make(pages=40, tokens=8)
    for number, priority in enumerate([0, 5, -1, 0]):
        scheduler.add(request(number, 8, output=1, priority=priority))
    order = []
    while scheduler.has_work:
        order += [number for number, *_ in shape(step(scheduler))]
    assert order == [2, 0, 3, 1]


def test_an_urgent_prompt_overtakes_a_long_one_under_way() -> None:
    scheduler, *_ = make(pages=40, tokens=8)
    scheduler.add(request(0, 40))
    step(scheduler)
    scheduler.add(request(1, 5, priority=-1))
    scheduler.add(request(2, 5))
    assert shape(step(scheduler)) == [(1, 0, 5), (0, 8, 3)]


def test_urgency_preempts_the_less_urgent_alone_and_only_if_that_is_enough() -> None:
    scheduler, pages, _ = make(pages=11, tokens=64)
    for number, priority in [(0, 0), (1, 3), (2, 3)]:
        scheduler.add(request(number, 8, output=9, priority=priority))
    step(scheduler)
    scheduler.add(request(3, 33, priority=1))  # 9 pages: request 0 is not to make way
    step(scheduler)
    assert [r.request_id for r in scheduler.running] == [0, 1, 2]
    scheduler.add(request(4, 12, priority=-2))
    step(scheduler)
    assert [r.request_id for r in scheduler.running] == [4, 0, 1]
    assert [r.request_id for r in scheduler.waiting] == [3, 2]
    while scheduler.has_work:
        step(scheduler)
    assert pages.available == 11


def sharing(pages: int, tokens: int = 64) -> Scheduler:
    leases = PageLeases(PageAllocator(pages + 1, PAGE), PrefixTree(PAGE))
    return Scheduler(SchedulerLimits(tokens, 8), leases, Source(8))


def same_prompt(number: int, length: int) -> Request:
    return Request(number, list(range(length)), SamplingParams(max_tokens=2), 0, 10**6)


def shared_step(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    scheduler.advance(batch)
    for chunk in batch.chunks:
        if chunk.samples:
            chunk.request.token_ids.append(7)
            scheduler.share(chunk.request)
    return batch


def test_a_prompt_that_is_being_computed_is_waited_for_and_then_found() -> None:
    scheduler = sharing(pages=40)
    for number in range(3):
        scheduler.add(same_prompt(number, 13))
    assert shape(shared_step(scheduler)) == [(0, 0, 13)]
    assert shape(shared_step(scheduler)) == [(0, 13, 1), (1, 12, 1), (2, 12, 1)]
    assert (scheduler.num_looked_up, scheduler.num_found) == (39, 24)


def test_a_prompt_that_takes_several_steps_is_waited_for_in_the_last() -> None:
    """What that step has room for would go to computing the same pages again."""
    scheduler = sharing(pages=60, tokens=16)
    scheduler.add(same_prompt(0, 45))
    scheduler.add(same_prompt(1, 49))
    scheduler.add(request(2, 5))
    steps = [shape(shared_step(scheduler)) for _ in range(4)]
    assert steps[:3] == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 13)]]
    assert steps[3] == [(0, 45, 1), (1, 44, 5), (2, 0, 5)]
    assert scheduler.num_found == 44


def test_a_prompt_of_whole_pages_runs_its_last_page_again() -> None:
    scheduler = sharing(pages=40)
    scheduler.add(same_prompt(0, 12))
    shared_step(scheduler)
    scheduler.add(same_prompt(1, 12))
    assert shape(shared_step(scheduler))[1] == (1, 8, 4)


def test_a_preempted_request_goes_on_from_what_is_kept() -> None:
    scheduler = sharing(pages=10)
    scheduler.add(same_prompt(0, 13))
    shared_step(scheduler)
    [item] = scheduler.running
    scheduler._preempt(item)
    assert shape(shared_step(scheduler)) == [(0, 12, 2)]
