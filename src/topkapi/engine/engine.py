"""One engine: requests go in, and every step gives what it added to each of them.

The loop is schedule -> run -> accept. A request that is invalid is refused when it is added; one
that goes wrong later (NaN logits, a forward pass that only fails with it) ends with an error of its
own while the others go on. One thread at a time may call in. Knows tokens and text, not files or
chat templates.
"""

from __future__ import annotations

import copy
import operator
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from topkapi.engine.detokenizer import Decoder, Detokenizer, OutputText
from topkapi.engine.grammar import GrammarCompiler
from topkapi.engine.graphs import GraphStats
from topkapi.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestUpdate,
    Sampled,
    SamplingParams,
    TokenLogprob,
    Urgency,
)
from topkapi.engine.sampler import NOTHING_ALLOWED
from topkapi.engine.scheduler import Batch, Scheduler
from topkapi.engine.selection_stats import SelectionStats
from topkapi.engine.speculation_stats import SpeculationStats
from topkapi.engine.stats import CacheStats, EngineStats
from topkapi.engine.timeline import Timeline
from topkapi.errors import KernelRefusedError, ParallelError, RequestError, TopkapiError

# What a forward pass may raise for the sake of one request; out-of-memory is a RuntimeError.
_FAULTS = (TopkapiError, RuntimeError, ValueError, ArithmeticError, LookupError)


class BatchRunner(Protocol):
    """The part of a runner that the engine needs."""

    def run(self, batch: Batch) -> Sequence[Sampled]:
        """The next token of every chunk that samples, in order; id -1 where logits held NaN.

        For a chunk with drafts it is a list: the accepted drafts, then the token after them.
        """


@dataclass(frozen=True)
class EngineLimits:
    """What any request is held to: `max_length` bounds prompt and output together."""

    vocab_size: int
    max_length: int
    eos_token_ids: frozenset[int]


@dataclass(eq=False)
class _Live:
    """A request under way, with its text."""

    request: Request
    text: OutputText


@dataclass(frozen=True)
class Watched:
    """What a runner tells of itself as it goes, for `Engine.stats`."""

    timeline: Timeline = field(default_factory=Timeline)
    selection: SelectionStats | None = None
    graphs: Callable[[], GraphStats] = GraphStats
    speculation: SpeculationStats | None = None


class Engine:
    """Continuous batching over one model on one device."""

    def __init__(
        self,
        runner: BatchRunner,
        scheduler: Scheduler,
        limits: EngineLimits,
        tokenizer: Decoder | None = None,
        *,
        watched: Watched | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`watched` is the runner's, read here; `clock` gives seconds, for timeouts."""
        self.limits = limits
        self.scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
        self._live: dict[int, _Live] = {}
        self._next_id = 0
        self._watched = watched or Watched()
        self._timeline = self._watched.timeline
        self._clock = clock
        self._steps = 0
        self._computed_tokens = 0
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def new_id(self) -> int:
        """A request id never given before."""
        self._next_id += 1
        return self._next_id - 1

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as plain integers. Raises `RequestError` for a request that cannot run."""
        vocab, longest = self.limits.vocab_size, self.limits.max_length
        prompt = _plain_ids(prompt_token_ids, vocab)
        if not prompt:
            raise RequestError("the prompt is empty: expected at least one token")
        if len(prompt) >= longest:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, and prompt and output together may have "
                f"{longest} (the model's context, or the cache if that is smaller): expected at "
                f"most {longest - 1}"
            )
        if params.n > 1:
            raise RequestError("n: a request has one completion; add each of params.completions()")
        self._check_tokens(params)
        self._grammars.check(params)
        return prompt

    def _check_tokens(self, params: SamplingParams) -> None:
        """What of `params` depends on the vocabulary and the tokenizer."""
        vocab = self.limits.vocab_size
        for name in ("top_k", "logprobs", "prompt_logprobs"):
            value = getattr(params, name) or 0
            if value > vocab:
                raise RequestError(f"{name}: expected at most the vocabulary {vocab}, got {value}")
        _plain_ids(params.stop_token_ids, vocab, what="stop_token_ids")
        _plain_ids([token_id for token_id, _ in params.bias], vocab, what="logit_bias")
        if params.stop and self._tokenizer is None:
            raise RequestError("stop: the model has no tokenizer, so there is no text to stop in")

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        urgency: Urgency | None = None,
    ) -> int:
        """Queue a request and return its id. Raises `RequestError` as `check` does."""
        ids = self.check(prompt_token_ids, params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(self.new_id(), ids, params, seed, self.limits.max_length, prompt)
        eos = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        request.end_token_ids = tuple(eos.union(params.stop_token_ids))
        request.grammar = self._grammars.start(params)
        urgency = urgency or Urgency()
        request.priority = urgency.priority
        if urgency.timeout is not None:
            request.deadline = self._clock() + urgency.timeout
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, ids, skip_special=params.skip_special_tokens)
        text = OutputText(detokenizer, params.stop_strings)
        self._live[request.request_id] = _Live(request, text)
        self.scheduler.add(request)
        return request.request_id

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now and free what it holds; None when it has already ended."""
        live = self._live.get(request_id)
        return None if live is None else self._finish(live, "abort")

    def step(self) -> list[RequestUpdate]:
        """Run one batch; what it added to each request that got a token or ended.

        Raises `KernelRefusedError` when no kernel takes the model: no request is at fault then,
        and the caller should abort its own.
        """
        self._timeline.begin()
        updates = self._expire()
        batch = self.scheduler.schedule()
        assert batch.chunks or not self.has_work, "work is waiting and nothing can run"
        self._timeline.end("schedule")
        results = self._run(batch) if batch.chunks else []
        self._timeline.end("sample")
        self.scheduler.advance(batch)
        for request, got in results:
            updates.append(self._accept(self._live[request.request_id], got))
        self._note(batch)
        return updates

    def stats(self) -> EngineStats:
        """Counters and occupancy. Waits for the device where selections are looked at."""
        scheduler, watched = self.scheduler, self._watched
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            preemptions=scheduler.num_preemptions,
            finished=dict(self._finished),
            seconds=dict(self._timeline.seconds),
            cache=CacheStats.of(scheduler.leases, scheduler.num_looked_up, scheduler.num_found),
            selection=watched.selection.read() if watched.selection else [],
            graphs=watched.graphs(),
            speculation=copy.deepcopy(watched.speculation),
        )

    def _expire(self) -> list[RequestUpdate]:
        """End every request that is out of time."""
        now = self._clock()
        late = [
            live
            for live in self._live.values()
            if live.request.deadline is not None and live.request.deadline <= now
        ]
        return [self._update(live, [], self._finish(live, "timeout")) for live in late]

    def _note(self, batch: Batch) -> None:
        """Count the step, and what it took."""
        scheduler, leases = self.scheduler, self.scheduler.leases
        self._steps += bool(batch.chunks)
        self._computed_tokens += batch.num_tokens
        self._timeline.end("output")
        counters = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "held pages": leases.num_pages - leases.available,
            "kept pages": leases.available - leases.num_free,
        }
        name = f"{len(batch.chunks)} requests, {batch.num_tokens} tokens"
        self._timeline.finish(name, counters)

    def _run(self, batch: Batch) -> list[tuple[Request, Sampled | RequestError]]:
        """Run a batch; when that fails, each of its requests alone, to find the one at fault.

        Running a chunk twice is harmless: it writes the same slots again.
        """
        sampling = [chunk.request for chunk in batch.chunks if chunk.samples]
        try:
            return list(zip(sampling, self._runner.run(batch), strict=True))
        except (KernelRefusedError, ParallelError):
            raise
        except _FAULTS as error:
            if len(batch.chunks) == 1:
                fault = RequestError(f"the forward pass failed: {type(error).__name__}: {error}")
                fault.__cause__ = error
                return [(batch.chunks[0].request, fault)]
        alone = (self._run(Batch((chunk,))) for chunk in batch.chunks)
        return [result for results in alone for result in results]

    def _accept(self, live: _Live, got: Sampled | RequestError) -> RequestUpdate:
        """Take in what a step gave a request, token by token, up to the one that ends it."""
        if isinstance(got, RequestError):
            return self._update(live, [], self._finish(live, "error", error=got))
        if isinstance(got, TokenLogprob):
            return self._take(live, [got])
        live.request.num_rounds += 1
        live.request.num_accepted += len(got) - 1
        return self._take(live, got)

    def _take(self, live: _Live, tokens: list[TokenLogprob]) -> RequestUpdate:
        request = live.request
        taken: list[TokenLogprob] = []
        output: RequestOutput | None = None
        for token in tokens:
            if taken:  # the one before this was a draft: it is in the cache already
                request.num_computed += 1
            if token.token_id < 0:
                fault = _no_token(token.token_id, request.num_tokens)
                output = self._finish(live, "error", error=fault)
                break
            request.token_ids.append(token.token_id)
            self.scheduler.share(request)
            if request.params.logprobs is not None:
                request.logprobs.append(token)
            taken.append(token)
            output = self._check_end(live, token.token_id)
            if output is not None:
                break
        return self._update(live, taken, output)

    def _check_end(self, live: _Live, token_id: int) -> RequestOutput | None:
        """The output, when the newest token ends the request."""
        request, params = live.request, live.request.params
        if token_id in params.stop_token_ids:
            return self._finish(live, "stop", stop_reason=token_id)
        if token_id in self.limits.eos_token_ids and not params.ignore_eos:
            return self._finish(live, "stop")
        matched = live.text.push(token_id, may_stop=request.num_output >= params.min_tokens)
        if matched is not None:
            return self._finish(live, "stop", stop_reason=matched)
        try:
            if request.grammar is not None and request.grammar.advance(token_id):
                return self._finish(live, "stop")
        except RequestError as error:
            return self._finish(live, "error", error=error)
        if request.num_output == params.max_tokens or request.num_tokens == request.max_length:
            return self._finish(live, "length")
        return None

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: RequestError | None = None,
    ) -> RequestOutput:
        request = live.request
        matched = live.text.finish()
        if matched is not None and reason == "length":
            reason, stop_reason = "stop", matched
        self.scheduler.remove(request)
        del self._live[request.request_id]
        self._finished[reason] += 1
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt],
            text=live.text.text,
            token_ids=request.output_token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if request.params.logprobs is None else request.logprobs,
            error=error,
            num_cached_tokens=request.num_cached or 0,
            num_rounds=request.num_rounds,
            num_accepted=request.num_accepted,
            prompt_logprobs=_prompt_logprobs(request),
        )

    def _update(
        self, live: _Live, new: list[TokenLogprob], output: RequestOutput | None
    ) -> RequestUpdate:
        return RequestUpdate(
            request_id=live.request.request_id,
            text=live.text.take(),
            token_ids=[token.token_id for token in new],
            logprobs=None if live.request.params.logprobs is None else new,
            output=output,
        )


def _no_token(token_id: int, num_tokens: int) -> RequestError:
    if token_id == NOTHING_ALLOWED:
        return RequestError(f"no token is allowed or possible after {num_tokens} tokens")
    return RequestError(f"the model gave NaN or infinite logits after {num_tokens} tokens")


def _prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    return None if request.params.prompt_logprobs is None else [None, *request.prompt_logprobs]


def _plain_ids(ids: Collection[object], vocab: int, what: str = "the prompt") -> list[int]:
    try:
        plain = [operator.index(item) for item in ids]  # type: ignore[arg-type]
    except TypeError as error:
        raise RequestError(f"{what}: expected token ids, whole numbers: {error}") from None
    unknown = [item for item in plain if not 0 <= item < vocab]
    if unknown:
        raise RequestError(
            f"{what} has unknown token id {unknown[0]}: the vocabulary has 0 to {vocab - 1}"
        )
    return plain
