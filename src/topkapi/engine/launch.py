"""How a loaded model becomes an engine: how large the cache is, and what each part is given.

The one place of the engine that sizes memory. Knows nothing about prompts or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.cache import (
    HostTier,
    NSATokenToKVPool,
    PageAllocator,
    PageLeases,
    PrefixTree,
    ReqToTokenPool,
)
from topkapi.config import BackendOptions, DsaConfig
from topkapi.device import free_memory
from topkapi.engine.cuda_recorder import CudaRecorder
from topkapi.engine.engine import Engine, EngineLimits, Watched
from topkapi.engine.graphs import GraphStats, PaddedSizes
from topkapi.engine.parallel_runner import CheckedBackend, Place
from topkapi.engine.runner import Runner
from topkapi.engine.scheduler import Scheduler, SchedulerLimits
from topkapi.engine.selection_stats import SelectionStats
from topkapi.engine.speculative import (
    Speculation,
    SpeculativeRunner,
    check_num_steps,
    prepare_speculation,
)
from topkapi.engine.timeline import Timeline
from topkapi.errors import ConfigError
from topkapi.models.compiled import compile_rest
from topkapi.models.decoder import attention_modules

_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Without a GPU the cache shares the machine with everything else, and its memory is touched when it
# is made: this much by default, and more only where one request of full length needs it.
_HOST_CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class EngineOptions:
    """What a user may choose about the engine; see `LLM` for what each means."""

    kv_cache_dtype: str = "auto"
    max_tokens_in_cache: int | None = None
    max_context_len: int | None = None
    max_batch_tokens: int = 2048
    max_running_requests: int = 64
    page_size: int = 64
    memory_fraction: float = 0.8
    speculative_num_steps: int | Literal["auto"] = 0
    enable_prefix_cache: bool = True
    host_cache_tokens: int = 0
    trace: Path | None = None
    selection_stats_every: int = 0
    cuda_graphs: bool = True
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    compile: bool = False
    backend: BackendOptions = field(default_factory=BackendOptions)

    def __post_init__(self) -> None:
        for name in ("max_tokens_in_cache", "max_context_len"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise ConfigError(f"{name}: expected None or at least 2, got {value}")
        for name, least in (
            ("page_size", 1),
            ("host_cache_tokens", 0),
            ("selection_stats_every", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.host_cache_tokens and not self.enable_prefix_cache:
            raise ConfigError("host_cache_tokens: needs enable_prefix_cache, whose pages it keeps")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction: expected (0, 1], got {self.memory_fraction}")
        check_num_steps(self.speculative_num_steps)
        SchedulerLimits(self.max_batch_tokens, self.max_running_requests)
        PaddedSizes(self.max_running_requests, self.cuda_graph_batch_sizes)
        if self.compile and self.backend.deterministic:
            raise ConfigError("compile: what is compiled cannot be deterministic; choose one")

    @property
    def scheduling(self) -> SchedulerLimits:
        return SchedulerLimits(self.max_batch_tokens, self.max_running_requests)


def make_engine(
    model: Any,
    config: DsaConfig,
    tokenizer: Any,
    eos: frozenset[int],
    options: EngineOptions,
    place: Place | None = None,
) -> Engine:
    """Allocate the cache and put scheduler, runner and engine together.

    `place` is where this process stands among the ranks of a split model; all of them must call.
    Raises `ConfigError` when not one page of cache fits, or for a cache format unknown.
    """
    if options.compile:
        compile_rest(model)
    parameter = next(model.parameters())
    device = parameter.device
    context = min(config.max_position_embeddings, options.max_context_len or 2**62)
    cache_format = _cache_format(options.kv_cache_dtype, parameter.dtype)
    speculation = prepare_speculation(model, config, options.speculative_num_steps)
    agree = int if place is None else place.group.smallest
    pool = _make_pool(config, cache_format, device, context, options, speculation, agree)
    pages = PageAllocator(pool.num_pages, options.page_size)
    max_length = min(context, pages.available * options.page_size)
    rows = ReqToTokenPool(
        options.max_running_requests, pages.pages_for(max_length) * options.page_size, device
    )
    backend = (NativeSparseAttnBackend if place is None else CheckedBackend)(
        config,
        req_to_token_pool=rows,
        token_to_kv_pool=pool,
        device=device,
        options=options.backend,
    )
    limits = EngineLimits(int(model.config.vocab_size), max_length, eos)
    timeline = Timeline(device, options.trace)
    selection = SelectionStats(backend, options.selection_stats_every)
    for watcher in (timeline, selection):
        watcher.watch(attention_modules(model, config))
    scheduler = Scheduler(options.scheduling, _make_leases(pages, pool, options), rows)
    runner: Runner
    drafts = None
    if place is not None:
        runner = place.make_runner(model, backend, rows, pool, timeline)
    elif speculation is None:
        runner = Runner(model, backend, rows, pool, timeline)
    else:
        runner = SpeculativeRunner(model, backend, rows, pool, speculation, timeline)
        scheduler.wanted_drafts, drafts = runner.wanted_drafts, runner.stats
    off = "the model is split over several ranks" if place else _no_graphs(options, device)
    graphs = _start_graphs(runner, options, off, device, timeline, selection)
    watched = Watched(timeline, selection, graphs, drafts)
    return Engine(runner, scheduler, limits, tokenizer, watched=watched)


def _no_graphs(options: EngineOptions, device: torch.device) -> str:
    """Why no steps are captured; empty where they are."""
    if not options.cuda_graphs:
        return "cuda_graphs=False"
    return "" if device.type == "cuda" else f"the device is {device.type}"


def _start_graphs(
    runner: Runner,
    options: EngineOptions,
    off: str,
    device: torch.device,
    timeline: Timeline,
    selection: SelectionStats,
) -> Callable[[], GraphStats]:
    """Capture from now on, and the sizes that the user named at once; nothing if it is `off` for a
    reason. Returns what says how it goes.
    """

    @contextmanager
    def quiet() -> Iterator[None]:
        with timeline.paused(), selection.paused():
            yield

    if not off:
        sizes = PaddedSizes(options.max_running_requests, options.cuda_graph_batch_sizes)
        runner.use_graphs(CudaRecorder(device), sizes, quiet)
        runner.next_pass_is_watched = selection.next_pass_is_watched
        if options.cuda_graph_batch_sizes:
            runner.warm_up()
    return lambda: runner.graph_stats() or GraphStats(off=off)


def _make_leases(
    pages: PageAllocator, pool: NSATokenToKVPool, options: EngineOptions
) -> PageLeases:
    if not options.enable_prefix_cache:
        return PageLeases(pages)
    places = pages.pages_for(options.host_cache_tokens)
    host = HostTier(pool, places) if places else None
    return PageLeases(pages, PrefixTree(options.page_size, host))


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every end token that the generation config, the config or the tokenizer names."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        if eos is not None:
            found.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(found)


def _cache_format(wanted: str, model_dtype: torch.dtype) -> str:
    if wanted != "auto":
        return wanted
    return _FORMATS.get(model_dtype, "bf16")


def _make_pool(
    config: DsaConfig,
    cache_format: str,
    device: torch.device,
    context: int,
    options: EngineOptions,
    speculation: Speculation | None,
    agree: Callable[[int], int],
) -> NSATokenToKVPool:
    """A pool of as many pages as asked for, or as the memory at hand allows (page 0 is extra).

    `agree` turns the pages that fit here into those to have: the smallest number of all ranks.
    """
    size = options.page_size
    pool = NSATokenToKVPool(
        config,
        1,
        page_size=size,
        kv_cache_dtype=cache_format,
        device=device,
        layers=None if speculation is None else speculation.cache_layers,
        page_hidden=None if speculation is None else speculation.page_hidden,
    )
    page_bytes = pool.bytes_per_token() * size
    pages = -(-(options.max_tokens_in_cache or context * options.max_running_requests) // size)
    if options.max_tokens_in_cache is None:
        pages = min(pages, int(_free_bytes(device) * options.memory_fraction) // page_bytes - 1)
        if device.type != "cuda":
            pages = min(pages, max(_HOST_CACHE_BYTES // page_bytes, -(-context // size)))
    pages = agree(pages)
    if pages < 1:
        raise ConfigError(
            f"no memory for the cache: one page of {size} tokens takes {page_bytes} bytes on "
            f"{device}; free memory, or set max_tokens_in_cache or kv_cache_dtype='fp8'"
        )
    pool.grow(pages + 1)
    return pool


def _free_bytes(device: torch.device) -> int:
    """Memory free on a device, weights being there already; a guess where it cannot be asked."""
    free = free_memory(device)
    return 2 * _HOST_CACHE_BYTES if free is None else free
