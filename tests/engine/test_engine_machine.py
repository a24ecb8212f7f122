"""Model checking: whatever comes, goes and is thrown out, every request gets the answer it would
get alone, and every page is accounted for after each step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.fake_model import VOCAB, World, alone
from topkapi.engine.engine import Engine, EngineLimits
from topkapi.engine.request import RequestOutput, SamplingParams, Urgency
from topkapi.engine.scheduler import Scheduler, SchedulerLimits

FAULTY = VOCAB  # never generated, so that only a prompt may hold it
# Long common beginnings, page borders among them.
PREFIXES = [[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9]]
MAX_STEPS = 3000


@dataclass(frozen=True)
class Asked:
    """What a request was asked for."""

    prompt: list[int]
    num_output: int
    timeout: float | None
    arrival: float


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, time and steps in any order, over caches of any size, with drafts and
    without.
    """

    @initialize(
        pages=st.integers(3, 14),
        running=st.integers(1, 5),
        tokens=st.integers(5, 40),
        host=st.sampled_from([0, 0, 1, 6]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        drafts=st.sampled_from([0, 0, 1, 4]),
    )
    def begin(
        self, pages: int, running: int, tokens: int, host: int, prefix_cache: bool, drafts: int
    ) -> None:
        self.world = World(
            pages,
            rows=running,
            host=host,
            prefix_cache=prefix_cache,
            faulty=frozenset({FAULTY}),
            drafts=drafts,
        )
        scheduler = Scheduler(SchedulerLimits(tokens, running), self.world.leases, self.world.table)
        if drafts:
            scheduler.wanted_drafts = self.world.model.wanted_drafts
        self.now = 0.0
        limits = EngineLimits(VOCAB + 1, pages * self.world.page_size, frozenset())
        self.engine = Engine(self.world.model, scheduler, limits, clock=lambda: self.now)
        self.asked: dict[int, Asked] = {}
        self.ended: set[int] = set()
        self.history: list[list[int]] = list(PREFIXES)

    @rule(
        prefix=st.integers(0, 30),
        rest=st.lists(st.sampled_from([0, 7, FAULTY]), min_size=1, max_size=14),
        num_output=st.integers(1, 20),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        timeout=st.sampled_from([None, None, None, 2.0, 9.0]),
    )
    def arrive(
        self, prefix: int, rest: list[int], num_output: int, priority: int, timeout: float | None
    ) -> None:
        """A prompt that begins as an earlier conversation does, or as another prompt."""
        prompt = [*self.history[prefix % len(self.history)], *rest]
        room = self.engine.limits.max_length - len(prompt)
        if room < 1:
            return
        num_output = min(num_output, room)
        params = SamplingParams(temperature=0, max_tokens=num_output)
        number = self.engine.add(prompt, params, urgency=Urgency(priority, timeout))
        self.asked[number] = Asked(prompt, num_output, timeout, self.now)

    @precondition(lambda self: self.asked.keys() - self.ended)
    @rule(number=st.integers(0, 1000))
    def abort(self, number: int) -> None:
        living = sorted(self.asked.keys() - self.ended)
        output = self.engine.abort(living[number % len(living)])
        assert output is not None
        assert output.finish_reason == "abort"
        self._check(output)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        self.now += 0.25
        for update in self.engine.step():
            if update.output is not None:
                self._check(update.output)
        for number in self.asked.keys() - self.ended:
            asked = self.asked[number]
            assert asked.timeout is None or self.now < asked.arrival + asked.timeout
        self.accounts()

    def _check(self, output: RequestOutput) -> None:
        asked = self.asked[output.request_id]
        assert output.request_id not in self.ended
        self.ended.add(output.request_id)
        assert output.token_ids == alone(asked.prompt, asked.num_output)[: len(output.token_ids)]
        expected = {"length", "abort"}
        if asked.timeout is not None:
            expected.add("timeout")
        if asked.prompt[-1] == FAULTY:
            expected = expected - {"length"} | {"error"}
        assert output.finish_reason in expected
        if output.finish_reason == "length":
            assert len(output.token_ids) == asked.num_output
            self.history.append([*asked.prompt, *output.token_ids])

    @invariant()
    def accounts(self) -> None:
        """Every page is free, in the tree, or one lease's own; locks are exactly the leases'."""
        if not hasattr(self, "engine"):
            return
        scheduler, leases = self.engine.scheduler, self.world.leases
        assert scheduler.running == sorted(scheduler.running, key=lambda r: r.order)
        assert scheduler.waiting == sorted(scheduler.waiting, key=lambda r: r.order)
        assert all(request.lease is None for request in scheduler.waiting)
        held = [request.lease for request in scheduler.running if request.lease is not None]
        assert len(held) == len(scheduler.running)
        own = [page for lease in held for page in lease.pages[len(lease.nodes) :]]
        nodes = list(leases.tree.nodes()) if leases.tree else []
        kept = [node.page for node in nodes if node.page is not None]
        assert len(set(own + kept)) == len(own + kept)
        assert leases.num_free + len(own) + len(kept) == leases.num_pages
        locks = Counter(node for lease in held for node in lease.nodes)
        assert all(node.refs == locks[node] for node in nodes)
        assert locks.keys() <= set(nodes)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self._step()
        assert self.ended == self.asked.keys(), "a request never ended"
        assert self.engine.step() == []
        assert self.world.leases.available == self.world.pages
        assert self.world.table.available == self.world.rows


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
