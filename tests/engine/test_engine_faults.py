"""A request that goes wrong while it runs ends alone."""

from __future__ import annotations

import pytest

from engine.test_scheduler import Source
from topkapi.cache import PageAllocator, PageLeases, PrefixTree
from topkapi.engine.engine import Engine, EngineLimits
from topkapi.engine.request import RequestOutput, SamplingParams, TokenLogprob, Urgency
from topkapi.engine.scheduler import Batch, Scheduler, SchedulerLimits
from topkapi.errors import KernelRefusedError, RequestError

BAD = 12


class Countdown:
    """A model whose next token is the last one minus 1; given token 12 it raises `fault`, or gives
    NaN logits where that is None.
    """

    def __init__(self, fault: Exception | None) -> None:
        self.fault = fault

    def run(self, batch: Batch) -> list[TokenLogprob]:
        last = [chunk.request.token_ids[-1] for chunk in batch.chunks]
        if BAD in last and self.fault is not None:
            raise self.fault
        return [
            TokenLogprob(-1 if token == BAD else token - 1, 0.0, {})
            for chunk, token in zip(batch.chunks, last, strict=True)
            if chunk.samples
        ]


def make(fault: Exception | None = None) -> tuple[Engine, PageLeases]:
    leases = PageLeases(PageAllocator(21, 4), PrefixTree(4))
    scheduler = Scheduler(SchedulerLimits(16, 8), leases, Source(8))
    return Engine(Countdown(fault), scheduler, EngineLimits(100, 40, frozenset({0}))), leases


def drain(engine: Engine) -> dict[int, RequestOutput]:
    outputs = {}
    for _ in range(200):
        if not engine.has_work:
            break
        for update in engine.step():
            if update.output is not None:
                outputs[update.request_id] = update.output
    return outputs


@pytest.mark.parametrize(("fault", "word"), [(None, "NaN"), (RuntimeError("no memory"), "memory")])
def test_only_the_request_at_fault_ends_with_an_error(fault: Exception | None, word: str) -> None:
    engine, pages = make(fault)
    starts = [5, BAD, 7, BAD + 3, 30]  # three of them meet the bad token on their way down
    ids = [engine.add([50] * 5 + [start], SamplingParams()) for start in starts]
    outputs = drain(engine)
    for request_id, start in zip(ids, starts, strict=True):
        output = outputs[request_id]
        if start < BAD:
            assert output.finish_reason == "stop"
            assert output.token_ids == list(range(start - 1, -1, -1))
        else:
            assert output.finish_reason == "error"
            assert isinstance(output.error, RequestError)
            assert word in str(output.error)
            assert output.token_ids == list(range(start - 1, BAD - 1, -1))
    assert pages.available == 20


def test_a_refusing_kernel_is_nobodys_fault() -> None:
    engine, pages = make(KernelRefusedError("no kernel"))
    ids = [engine.add([5], SamplingParams()), engine.add([BAD], SamplingParams())]
    with pytest.raises(KernelRefusedError):
        engine.step()
    for request_id in ids:
        output = engine.abort(request_id)
        assert output is not None
        assert output.finish_reason == "abort"
    assert engine.abort(ids[0]) is None
    assert pages.available == 20


def test_stop_strings_need_a_tokenizer() -> None:
    engine, _ = make()
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.add([5], SamplingParams(stop="a"))


def test_a_request_out_of_time_ends_with_what_it_has() -> None:
    now = [100.0]
    leases = PageLeases(PageAllocator(21, 4), PrefixTree(4))
    scheduler = Scheduler(SchedulerLimits(16, 8), leases, Source(8))
    limits = EngineLimits(100, 40, frozenset({0}))
    engine = Engine(Countdown(None), scheduler, limits, clock=lambda: now[0])
    slow = engine.add([50], SamplingParams(), urgency=Urgency(timeout=3))
    never = engine.add([11], SamplingParams(), urgency=Urgency(priority=5, timeout=0.5))
    free = engine.add([8], SamplingParams())
    outputs = {}
    for _ in range(10):
        for update in engine.step():
            if update.output is not None:
                outputs[update.request_id] = update.output
                assert update.finish_reason == update.output.finish_reason
        now[0] += 1
    assert (outputs[slow].finish_reason, outputs[slow].token_ids) == ("timeout", [49, 48, 47])
    assert (outputs[never].finish_reason, outputs[never].token_ids) == ("timeout", [10])
    assert outputs[free].finish_reason == "stop"
    assert engine.step() == []
    assert engine.stats().finished == {"timeout": 2, "stop": 1}
    assert leases.available == 20


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": "1"}, {"priority": 0.5}])
def test_urgency_is_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Urgency(**wrong)  # type: ignore[arg-type]


def test_pages_of_nan_logits_are_not_served() -> None:
    engine, _ = make()
    prompt = [50] * 8
    for _ in range(2):
        engine.add([*prompt, BAD], SamplingParams())
        outputs = drain(engine)
        assert [output.num_cached_tokens for output in outputs.values()] == [0]
    engine.add([*prompt, 3], SamplingParams())
    engine.add([*prompt, 4], SamplingParams())
    assert [output.num_cached_tokens for output in drain(engine).values()] == [0, 8]
