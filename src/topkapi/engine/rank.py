"""What does one rank of a split model do, from loading its share to the end?

`rank_engine` is the same in a process that `engine.parallel` started and in one of torchrun's:
rank 0 comes back with an engine, every other rank follows it until it stops. `main` is the process
that `engine.parallel` starts: it serves rank 0's engine over a pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from topkapi.engine.engine import Engine, EngineLimits
from topkapi.engine.launch import EngineOptions, eos_token_ids, make_engine
from topkapi.engine.parallel_runner import Place
from topkapi.engine.ranks import FailureReport, Message, RankGroup, connect_store, rank_store
from topkapi.errors import ConfigError, RequestError
from topkapi.models.decoder import install
from topkapi.models.loading import load_model
from topkapi.models.parallel import ModelSplit

# The methods of an engine that may be called from another process.
SERVED = frozenset({"abort", "add", "check", "new_id", "stats", "step"})


@dataclass(frozen=True)
class ParallelOptions:
    """How a model is split.

    Attributes:
        size: ranks, each a process with a device of its own.
        verify_selection: every so many steps the ranks compare what they selected; 0 never does.
        timeout: seconds a rank waits for the others inside a step before the run ends.
    """

    size: int
    verify_selection: int = 64
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"tensor_parallel_size: expected at least 1, got {self.size}")
        if self.verify_selection < 0:
            raise ConfigError(
                f"verify_selection: expected a number of steps, or 0, got {self.verify_selection}"
            )
        if not self.timeout > 0:
            raise ConfigError(f"parallel_timeout: expected seconds above 0, got {self.timeout}")


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank is told when it starts; the same for all of them."""

    path: Path
    device: str
    dtype: str | torch.dtype
    config_overrides: Mapping[str, Any] | None
    tokenizer: Any
    engine: EngineOptions
    parallel: ParallelOptions


@dataclass(frozen=True)
class Call:
    """One call of an engine's method, numbered so that its answer is known."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What a call came to; `error` is one request's, and the engine goes on."""

    number: int
    value: Any = None
    error: RequestError | None = None
    has_work: bool = False


@dataclass(frozen=True)
class Ready:
    """Rank 0 is ready to be called."""

    limits: EngineLimits


def rank_engine(spec: RankSpec, group: RankGroup) -> Engine | None:
    """Load this rank's share and its caches. Rank 0 gets the engine; the others return None when
    rank 0 has stopped. Raises as loading and `make_engine` do.
    """
    if group.rank > 0:
        logging.disable_progress_bar()
    split = ModelSplit(group.mesh)
    model = load_model(
        spec.path,
        spec.dtype,
        group.device,
        config_overrides=spec.config_overrides,
        split=split,
    )
    config = install(model)
    leads = group.rank == 0
    options = spec.engine if leads else replace(spec.engine, trace=None)
    if group.device.type != "cuda":
        # The ranks share the memory of one machine.
        options = replace(options, memory_fraction=options.memory_fraction / group.size)
    tokenizer = spec.tokenizer if leads else None
    place = Place(group, spec.parallel.verify_selection)
    eos = eos_token_ids(model, tokenizer)
    engine = make_engine(model, config, tokenizer, eos, options, place)
    if leads:
        return engine
    assert place.runner is not None, "an engine has a runner"
    place.runner.follow()
    return None


def serve(engine: Engine, calls: Connection) -> None:
    """Answer calls until the other end says so, or is gone. What is one request's fault is its
    answer; anything else ends the serving by its exception.
    """
    calls.send(Ready(engine.limits))
    while True:
        try:
            call = calls.recv()
        except EOFError:
            return
        if call is None:
            return
        calls.send(_answer(engine, call))


def _answer(engine: Engine, call: Call) -> Answer:
    assert call.method in SERVED, f"{call.method} is not served"
    try:
        value = getattr(engine, call.method)(*call.arguments)
    except RequestError as error:
        return Answer(call.number, error=error, has_work=engine.has_work)
    return Answer(call.number, value, has_work=engine.has_work)


def main() -> None:
    """A rank's process: `lifeline` and `calls` are inherited file descriptors (`calls` is -1 but
    on rank 0), `port` is where the store is.
    """
    lifeline, calls, port = (int(argument) for argument in sys.argv[1:4])
    run_rank(Connection(lifeline), Connection(calls) if calls >= 0 else None, port)


def run_rank(lifeline: Connection, calls: Connection | None, port: int) -> None:
    """Be the rank that the environment names, until told to stop; then end the process.

    Its status is 0 only then. An orderly end of the interpreter would take longer, and may hang
    where the group has lost a rank.
    """
    # An interrupt at the terminal is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec: RankSpec = lifeline.recv()
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    store = connect_store(port)
    with _ProcessEnd(), FailureReport(rank_store(store), int(os.environ["RANK"])):
        group = RankGroup(spec.device, spec.parallel.timeout, store)
        engine = rank_engine(spec, group)
        if engine is not None:
            assert calls is not None, "rank 0 is called"
            serve(engine, calls)
            group.send(Message("stop"))
        group.close()


class _ProcessEnd:
    """A block that ends the process, with status 1 where it ends by an exception."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if kind is None else 1)


def _end_with(lifeline: Connection) -> None:
    """End this process when the one that started it is gone."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
