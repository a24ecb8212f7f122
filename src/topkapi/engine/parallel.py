"""How does one model run on several devices, as one engine?

`start_ranks` starts a process a rank and gives a `RemoteEngine`, which calls rank 0's engine over a
pipe; `join_torchrun` takes a place among processes that a launcher has started. Whatever happens to
a rank ends the run with a `ParallelError`, and no process outlives its engine.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import Store

from topkapi.device import resolve_device
from topkapi.engine.engine import Engine, EngineLimits
from topkapi.engine.launch import EngineOptions
from topkapi.engine.rank import Call, ParallelOptions, RankSpec, Ready, rank_engine
from topkapi.engine.ranks import (
    Failure,
    Message,
    RankGroup,
    make_store,
    rank_store,
    torchrun_place,
)
from topkapi.engine.request import RequestOutput, RequestUpdate, SamplingParams, Urgency
from topkapi.engine.stats import EngineStats
from topkapi.errors import ConfigError, ParallelError, TopkapiError
from topkapi.models.loading import find_tokenizer, read_config, resolve_model_path
from topkapi.models.parallel import check_divisible

_MAIN = "from topkapi.engine.rank import main; main()"
# How long ranks may take to leave when asked, and to say why one of them failed.
_LEAVE = 10.0
_GRACE = 3.0
# How much longer, once a failure is reported: a rank that is killed loses its connections, which
# others report, before its death can be seen.
_SETTLE = 0.3


def rank_spec(
    model: str | Path | Any,
    tokenizer: Any,
    device: str | torch.device,
    dtype: str | torch.dtype,
    config_overrides: Mapping[str, Any] | None,
    options: EngineOptions,
    parallel: ParallelOptions,
) -> RankSpec:
    """What the ranks of a checkpoint are told; see `LLM` for the arguments.

    Raises `ConfigError` for what does not go with several ranks, `CheckpointError` for the path.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(
            "tensor_parallel_size: a loaded model is whole already; pass the path of its checkpoint"
        )
    resolved = resolve_device(device)
    if resolved.index is not None:
        raise ConfigError(f"device: every rank takes a GPU of its own, so say cuda, not {device}")
    drafts = options.speculative_num_steps
    if drafts not in (0, "auto"):
        raise ConfigError(
            "speculative_num_steps: drafts are not split over ranks yet; use 0 (or auto, which "
            "means 0 then) with tensor_parallel_size"
        )
    if options.host_cache_tokens:
        raise ConfigError(
            "host_cache_tokens: pages in host memory are rank 0's alone; use 0 with "
            "tensor_parallel_size"
        )
    path = resolve_model_path(model)
    if tokenizer is None:
        tokenizer = find_tokenizer(path)
    options = replace(options, speculative_num_steps=0)
    return RankSpec(path, resolved.type, dtype, config_overrides, tokenizer, options, parallel)


def make_parallel_engine(spec: RankSpec) -> tuple[Engine | RemoteEngine, Callable[[], object]]:
    """The engine of a split model, and what ends it: over processes started here, or torchrun's.

    Checks first what can be checked without a process. Raises `ConfigError`, and whatever a rank
    raised while it loaded. Under torchrun only rank 0 returns; the others serve it, and then end by
    `SystemExit`.
    """
    size = spec.parallel.size
    check_divisible(read_config(spec.path, spec.config_overrides), size)
    place = torchrun_place(os.environ)
    if place is not None:
        if place[1] != size:
            raise ConfigError(
                f"tensor_parallel_size: {size} ranks were asked for, and the launcher started "
                f"{place[1]} (WORLD_SIZE)"
            )
        return join_torchrun(spec)
    if resolve_device(spec.device).type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size: {size} ranks need a GPU each, and there are "
            f"{torch.cuda.device_count()}; use a smaller size, or device='cpu'"
        )
    engine = RemoteEngine(spec)
    return engine, engine.close


def join_torchrun(spec: RankSpec) -> tuple[Engine, Callable[[], object]]:
    """Be the rank that the environment says; see `make_parallel_engine`."""
    group = RankGroup(spec.device, spec.parallel.timeout, None)
    with group.reporting():
        engine = rank_engine(spec, group)
    if engine is None:
        group.close()
        raise SystemExit(0)
    return engine, weakref.finalize(engine, _stop_followers, group)


def _stop_followers(group: RankGroup) -> None:
    if Failure.read(group.store) is None:
        group.send(Message("stop"))
        group.close()


class RankProcess(Protocol):
    """The part of `subprocess.Popen` that is needed of a rank."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


# Starts one rank: its environment, its end of its lifeline, rank 0's end of the calls, the port.
StartRank = Callable[[Mapping[str, str], Connection, Connection | None, int], RankProcess]


def start_process(
    environment: Mapping[str, str], lifeline: Connection, calls: Connection | None, port: int
) -> RankProcess:
    """A fresh interpreter: nothing of this process is copied, and scripts need no main guard."""
    inherited = [end.fileno() for end in (lifeline, calls) if end is not None]
    arguments = [lifeline.fileno(), -1 if calls is None else calls.fileno(), port]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _MAIN, *map(str, arguments)],
        pass_fds=inherited,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


class RemoteEngine:
    """Rank 0's engine, called from the process that started the ranks.

    It has those methods of `Engine` that `LLM` needs, with the same meaning and errors. Once a rank
    has failed every call but `abort` raises that `ParallelError` again.
    """

    def __init__(self, spec: RankSpec, start: StartRank = start_process) -> None:
        """Start the ranks and wait until they have loaded. Raises what a rank raised."""
        self._store = make_store()
        self._ranks = _Ranks(spec, self._store.port, start)
        self._end = weakref.finalize(self, self._ranks.end)
        self._error: TopkapiError | None = None
        self._number = 0
        self._has_work = False
        self._broken_checkpoint = True
        ready = self._receive()
        assert isinstance(ready, Ready), "rank 0 says first that it is ready"
        self._broken_checkpoint = False
        self.limits: EngineLimits = ready.limits

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._has_work

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, rank 0 first."""
        return [process.pid for process in self._ranks.processes]

    def new_id(self) -> int:
        """As `Engine.new_id`."""
        return int(self._call("new_id"))

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """As `Engine.check`."""
        ids: list[int] = self._call("check", list(prompt_token_ids), params)
        return ids

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        urgency: Urgency | None = None,
    ) -> int:
        """As `Engine.add`."""
        return int(self._call("add", list(prompt_token_ids), params, prompt, urgency))

    def abort(self, request_id: int) -> RequestOutput | None:
        """As `Engine.abort`; None when the ranks have ended, and every request with them."""
        if self._error is not None:
            return None
        output: RequestOutput | None = self._call("abort", request_id)
        return output

    def step(self) -> list[RequestUpdate]:
        """As `Engine.step`. Raises `ParallelError` when a rank failed."""
        updates: list[RequestUpdate] = self._call("step")
        return updates

    def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        stats: EngineStats = self._call("stats")
        return stats

    def close(self) -> None:
        """End all ranks; harmless when they have ended."""
        if self._error is None:
            self._error = ParallelError("the engine has been closed: make a new LLM")
        self._end()

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._error is not None:
            raise self._error
        self._number += 1
        try:
            self._ranks.calls.send(Call(self._number, method, arguments))
        except OSError:
            raise self._failed() from None
        answer = self._receive()
        # An interrupt may have left an earlier call without its reader.
        while answer.number < self._number:
            answer = self._receive()
        self._has_work = answer.has_work
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _receive(self) -> Any:
        """The next thing rank 0 says; raises when any rank has ended instead."""
        ranks = self._ranks
        if ranks.calls in wait([ranks.calls, *ranks.lifelines]):
            try:
                return ranks.calls.recv()
            except (EOFError, OSError):
                pass
        raise self._failed()

    def _failed(self) -> TopkapiError:
        """End all ranks, and say why the first of them failed."""
        error: TopkapiError
        failure, killed = self._ranks.diagnose(rank_store(self._store))
        if killed is not None:
            rank, name = killed
            error = ParallelError(
                f"rank {rank} was killed by {name}; unless somebody did that, memory has run out",
                rank=rank,
            )
        elif failure is not None:
            error = failure.user_error() if self._broken_checkpoint else failure.error()
        else:
            error = ParallelError("a rank ended without a word; its output may say why")
        self._error = error
        self._end()
        return error


class _Ranks:
    """The processes, and this end of their pipes."""

    def __init__(self, spec: RankSpec, port: int, start: StartRank) -> None:
        """Start every rank and tell it its spec. Raises `ConfigError` where a tokenizer cannot be
        sent.
        """
        try:
            pickled = pickle.dumps(spec)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(f"tokenizer: cannot be sent to another process: {error}") from error
        self.processes: list[RankProcess] = []
        self.lifelines: list[Connection] = []
        self.calls, far = Pipe()
        for rank in range(spec.parallel.size):
            near, lifeline = Pipe()
            environment = _environment(rank, spec, os.environ)
            calls = far if rank == 0 else None
            self.processes.append(start(environment, lifeline, calls, port))
            if calls is not None:
                calls.close()
            lifeline.close()
            self.lifelines.append(near)
        for near in self.lifelines:
            # One that has died already is found by the first wait.
            with suppress(OSError):
                near.send_bytes(pickled)

    def diagnose(self, store: Store) -> tuple[Failure | None, tuple[int, str] | None]:
        """The first report of a failure, and the rank that a signal killed with the signal's name.

        An abort is how a rank that lost another may end, so a report goes before it.
        """
        end = time.monotonic() + _GRACE
        failure = None
        while time.monotonic() < end:
            for rank, process in enumerate(self.processes):
                code = process.poll()
                if code is not None and code < 0 and code != -signal.SIGABRT:
                    return failure, (rank, signal.Signals(-code).name)
            if failure is None and (failure := Failure.read(store)) is not None:
                end = min(end, time.monotonic() + _SETTLE)
            time.sleep(0.02)
        aborted = [r for r, p in enumerate(self.processes) if p.poll() == -signal.SIGABRT]
        if failure is None and aborted:
            return None, (aborted[0], "SIGABRT")
        return failure, None

    def end(self) -> None:
        """Ask the ranks to leave, and kill those that do not."""
        alive = all(process.poll() is None for process in self.processes)
        if alive:
            try:
                self.calls.send(None)
            except OSError:
                alive = False
        end = time.monotonic() + (_LEAVE if alive else 0.0)
        for process in self.processes:
            try:
                process.wait(max(end - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in (self.calls, *self.lifelines):
            connection.close()


def _environment(rank: int, spec: RankSpec, own: Mapping[str, str]) -> dict[str, str]:
    """What a rank's process sees: its place, this process's modules, and its share of the cores."""
    size = spec.parallel.size
    environment = {
        **own,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if sys.platform == "linux":
        # All ranks are here: gloo, which also carries the plans of GPUs, need not find a network.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if resolve_device(spec.device).type != "cuda":
        environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // size, 1)))
    return environment
