"""`topkapi bench serve`: one engine under traffic, and what each of its features is worth there.

The same requests go to variants of one engine, in this process: as it is, without the prefix cache,
without CUDA graphs, with speculation. Requests are added when their time has come, whether or not
earlier ones are done (an open loop). Decoding is greedy and goes on past the end token, so that
every variant has the same work; tokens that differ from the first variant's are counted.

Times are seconds from a request's planned arrival, so waiting counts. A step that gives a request
several tokens spreads the time since its last one evenly over them. Nothing is dropped: a request
that fails, is refused or runs out of time is counted under its reason.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from topkapi.bench.random_model import random_model
from topkapi.bench.record import environment, quantiles
from topkapi.bench.traffic import (
    PlannedRequest,
    TokenSource,
    Traffic,
    plan,
    random_tokens,
    windows_of,
)
from topkapi.config import BackendOptions, DsaConfig
from topkapi.demo.documents import make_document
from topkapi.device import resolve_device
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams, Urgency
from topkapi.engine.stats import EngineStats
from topkapi.errors import ConfigError, RequestError, TopkapiError
from topkapi.models.loading import read_config, resolve_model_path

PERCENTILES = (50, 90, 99)
LATENCIES = ("first_token", "between_tokens", "whole")
_CURVE = tuple(range(0, 101, 2))
# Far from any seed a user gives, so that warming up leaves no prefix behind that is asked for.
_WARM_UP_SEED = 7_654_321
_TEXT_TOKENS = 16384
_DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}

BASE = "engine"
NO_PREFIX_CACHE = "no prefix cache"
NO_GRAPHS = "no CUDA graphs"
SPECULATION = "speculation"
# What each feature is worth: the variant that has it, and the one that has not.
FEATURES = {
    "prefix cache": (BASE, NO_PREFIX_CACHE),
    "CUDA graphs": (BASE, NO_GRAPHS),
    "speculation": (SPECULATION, BASE),
}


@dataclass(frozen=True)
class ServeCase:
    """Everything one run is made of: the model, the engine's options, the traffic, the clock's
    conditions.

    `model` is `demo`, `random` (`random_model`) or a local path. `engine` are keyword arguments of
    `LLM`. `warm_up` requests run before the clock starts; `timeout` is in seconds a request.
    """

    model: str
    traffic: Traffic
    engine: Mapping[str, Any] = field(default_factory=dict)
    warm_up: int = 2
    timeout: float | None = None


@dataclass
class Served:
    """One request as it went. `token_times` are seconds after the start, one a token."""

    planned: PlannedRequest
    tokens: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    ended: float | None = None
    reason: str = "unfinished"
    error: str = ""
    output: RequestOutput | None = None

    @property
    def completed(self) -> bool:
        return self.reason in ("stop", "length")

    def add(self, token_ids: Sequence[int], now: float) -> None:
        """Tokens that came together now; the first one of all is never spread."""
        self.tokens += token_ids
        if not self.token_times and token_ids:
            self.token_times.append(now)
            token_ids = token_ids[1:]
        before, count = self.token_times[-1] if self.token_times else now, len(token_ids)
        self.token_times += [before + (now - before) * (i + 1) / count for i in range(count)]

    def end(self, output: RequestOutput, now: float) -> None:
        self.ended, self.output, self.reason = now, output, output.finish_reason
        self.error = str(output.error or "")

    def latencies(self) -> dict[str, list[float]]:
        """Seconds of each of `LATENCIES`: one, one a further token, one."""
        times, arrival = self.token_times, self.planned.arrival
        return {
            "first_token": [times[0] - arrival],
            "between_tokens": [after - before for before, after in pairwise(times)],
            "whole": [(self.ended or times[-1]) - arrival],
        }


def serve(
    llm: LLM,
    planned: Sequence[PlannedRequest],
    *,
    timeout: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Served], float]:
    """Send all requests and run until nothing is left: how each went, and the seconds it took."""
    engine, served = llm.engine, [Served(item) for item in planned]
    under_way: dict[int, Served] = {}
    waiting = list(reversed(served))
    start = clock()
    while waiting or engine.has_work:
        now = clock() - start
        while waiting and waiting[-1].planned.arrival <= now:
            _send(llm, waiting.pop(), under_way, timeout, now)
        if not engine.has_work:
            if waiting:
                sleep(max(0.0, waiting[-1].planned.arrival - (clock() - start)))
            continue
        updates = engine.step()
        now = clock() - start
        for update in updates:
            request = under_way[update.request_id]
            request.add(update.token_ids, now)
            if update.output is not None:
                request.end(update.output, now)
    return served, clock() - start


def _send(
    llm: LLM, request: Served, under_way: dict[int, Served], timeout: float | None, now: float
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=request.planned.max_tokens, ignore_eos=True)
    try:
        number = llm.engine.add(request.planned.prompt, params, None, Urgency(timeout=timeout))
    except RequestError as error:
        request.ended, request.reason, request.error = now, "refused", str(error)
        return
    under_way[number] = request


def report(
    served: Sequence[Served], seconds: float, before: EngineStats, after: EngineStats
) -> dict[str, Any]:
    """A run's figures. Latencies are of completed requests; every request is in `reasons`."""
    good = [request for request in served if request.completed]
    figures: dict[str, Any] = {
        "requests": len(served),
        "completed": len(good),
        "reasons": dict(Counter(request.reason for request in served)),
        "errors": sorted({request.error for request in served if request.error})[:3],
        "seconds": seconds,
        "output_tokens": sum(len(request.tokens) for request in served),
        "prompt_tokens": sum(len(request.planned.prompt) for request in served),
        "output_tokens_per_second": sum(len(request.tokens) for request in good) / seconds,
        "requests_per_second": len(good) / seconds,
        "preemptions": after.preemptions - before.preemptions,
        "steps": after.steps - before.steps,
    }
    looked_up = after.cache.looked_up_tokens - before.cache.looked_up_tokens
    found = after.cache.found_tokens - before.cache.found_tokens
    figures["prefix_hit_rate"] = found / max(looked_up, 1)
    for name in LATENCIES:
        values = [value for request in good for value in request.latencies()[name]]
        figures[name] = quantiles(values, PERCENTILES)
        figures[f"{name}_curve"] = list(quantiles(values, _CURVE).values())
    rounds = sum(request.output.num_rounds for request in good if request.output)
    accepted = sum(request.output.num_accepted for request in good if request.output)
    figures["acceptance_length"] = 1 + accepted / rounds if rounds else None
    return figures


def variants(case: ServeCase) -> dict[str, dict[str, Any]]:
    """Names and engine options of the variants that this model and device have, the engine as it is
    first. `speculative_num_steps` is for the one that speculates, `auto` where it is 0. Each writes
    a trace of its own.
    """
    options = dict(case.engine)
    steps = options.pop("speculative_num_steps", 0) or "auto"
    found = {BASE: {**options, "speculative_num_steps": 0}}
    if options.get("enable_prefix_cache", True):
        changes = {"enable_prefix_cache": False, "host_cache_tokens": 0}
        found[NO_PREFIX_CACHE] = {**found[BASE], **changes}
    on_gpu = resolve_device(options.get("device", "auto")).type == "cuda"
    if on_gpu and options.get("cuda_graphs", True):
        found[NO_GRAPHS] = {**found[BASE], "cuda_graphs": False}
    if _has_draft_layer(case):
        found[SPECULATION] = {**options, "speculative_num_steps": steps}
    if options.get("trace"):
        for name, given in found.items():
            file = Path(options["trace"])
            given["trace"] = file.with_stem(f"{file.stem}-{name.replace(' ', '-')}")
    return found


def _has_draft_layer(case: ServeCase) -> bool:
    if case.model == "random" or case.engine.get("tensor_parallel_size", 1) > 1:
        return False
    path = resolve_model_path(case.model)
    return DsaConfig.from_hf(read_config(path)).num_nextn_predict_layers > 0


def measure(
    case: ServeCase, names: Sequence[str] | None = None, *, repeats: int = 1
) -> Iterator[dict[str, Any]]:
    """Rows as they are measured, the variants in turn inside every repeat, each in a fresh engine.

    A variant that dies is a row with `failed`. Raises `ConfigError` for a variant there is not.
    """
    options = variants(case)
    unknown = [name for name in names or () if name not in options]
    if unknown:
        raise ConfigError(f"variants: expected some of {', '.join(options)}, got {unknown[0]!r}")
    facts = environment(resolve_device(case.engine.get("device", "auto")))
    first: list[Served] | None = None
    for repeat in range(repeats):
        for name in names or options:
            traffic = case.traffic
            row: dict[str, Any] = {"bench": "serve", "variant": name, "repeat": repeat}
            row |= {"model": case.model, "mix": traffic.mix, "rate": str(traffic.rate)}
            row |= {"prefixes": traffic.prefixes, "prefix_tokens": traffic.prefix_tokens}
            row |= {"length_scale": traffic.length_scale, "seed": traffic.seed}
            row |= {"options": changed_options(options[name]), **facts}
            try:
                served, figures = _run(case, options[name])
            except (TopkapiError, RuntimeError) as error:
                yield {**row, "failed": f"{type(error).__name__}: {error}"[:300]}
                continue
            first = served if first is None else first
            yield {**row, **figures, **compare(served, first)}


def changed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the engine and of its backend that are not the defaults, as plain values."""
    parameters, backend = signature(LLM.__init__).parameters, BackendOptions()
    given = dict(options)
    chosen = given.pop("backend_options", None) or backend
    changed = {name: value for name, value in given.items() if value != parameters[name].default}
    changed |= {
        name: value for name, value in asdict(chosen).items() if value != getattr(backend, name)
    }
    return {name: str(v) if isinstance(v, Path) else v for name, v in changed.items()}


def compare(served: Sequence[Served], first: Sequence[Served]) -> dict[str, Any]:
    """How many requests were completed here and there, whose tokens differ, and how many tokens
    each of those has in common (`parted_after`, ascending).
    """
    pairs = [(a, b) for a, b in zip(served, first, strict=True) if a.completed and b.completed]
    parted = sorted(_in_common(a.tokens, b.tokens) for a, b in pairs if a.tokens != b.tokens)
    return {"compared": len(pairs), "differ": len(parted), "parted_after": parted}


def _in_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def _run(case: ServeCase, options: Mapping[str, Any]) -> tuple[list[Served], dict[str, Any]]:
    with make_llm(case.model, options) as llm:
        tokens = token_source(llm, case.traffic.seed)
        planned = plan(case.traffic, tokens, llm.max_length)
        if case.warm_up:
            serve(llm, warm_up_plan(case, tokens, llm.max_length))
        before = llm.stats()
        served, seconds = serve(llm, planned, timeout=case.timeout)
        after = llm.stats()
        figures = report(served, seconds, before, after)
        figures["graphs"] = {"off": after.graphs.off, "replays": after.graphs.num_replays}
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return served, figures


def warm_up_plan(case: ServeCase, tokens: TokenSource, longest: int) -> list[PlannedRequest]:
    """Other requests of the same traffic, all at once."""
    other = replace(
        case.traffic,
        requests=case.warm_up,
        rate=float("inf"),
        seed=case.traffic.seed + _WARM_UP_SEED,
    )
    return plan(other, tokens, longest)


def make_llm(model: str, options: Mapping[str, Any]) -> LLM:
    """The engine over a named model; `random` is made on the device it runs on."""
    if model != "random":
        return LLM(model, **options)
    given = dict(options)
    device = resolve_device(given.pop("device", "auto"))
    dtype = given.pop("dtype", "auto")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype: the random model is auto, bf16 or fp32, got {dtype!r}")
    changes = given.pop("config_overrides", None) or {}
    return LLM(random_model(device, _DTYPES[dtype], **changes), **given)


def token_source(llm: LLM, seed: int) -> TokenSource:
    """Running text where the model has a tokenizer, so that drafts have something to guess; random
    tokens where not.
    """
    ends = llm.engine.limits.eos_token_ids
    if llm.tokenizer is None:
        return random_tokens(llm.engine.limits.vocab_size, frozenset(ends))

    def ids(text: str) -> list[int]:
        found: list[int] = llm.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return found

    document = make_document(
        seed, num_tokens=_TEXT_TOKENS, count_tokens=lambda text: len(ids(text)), num_facts=0
    )
    return windows_of(ids(document.text))


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each feature is worth: above 1 is better with it. Medians over the repeats' own ratios.

    A line has `feature`, `repeats`, the requests compared and how many `differ`, and for each
    figure the ratio (None where one of the two has no value).
    """
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if "failed" not in row:
            by_name.setdefault(row["variant"], {})[row["repeat"]] = row
    lines = []
    for feature, (name, other) in FEATURES.items():
        shared = by_name.get(name, {}).keys() & by_name.get(other, {}).keys()
        pairs = [(by_name[name][at], by_name[other][at]) for at in sorted(shared)]
        if not pairs:
            continue
        line: dict[str, Any] = {"feature": feature, "repeats": len(pairs)}
        line["compared"] = sum(min(a["compared"], b["compared"]) for a, b in pairs)
        # Of the two, the first variant measured differs from itself in nothing.
        line["differ"] = sum(a["differ"] + b["differ"] for a, b in pairs)
        for figure in LATENCIES:
            for percentile in ("p50", "p90", "p99"):
                values = [_ratio(b[figure], a[figure], percentile) for a, b in pairs]
                line[f"{figure}_{percentile}"] = _median(values)
        for rate in ("output_tokens_per_second", "requests_per_second"):
            line[rate] = _median([_ratio(a, b, rate) for a, b in pairs])
        lines.append(line)
    return lines


def _ratio(above: Mapping[str, float], below: Mapping[str, float], name: str) -> float | None:
    return above[name] / below[name] if above.get(name) and below.get(name) else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
