"""How do the ranks of one split model reach each other?

Rank 0 leads: it sends every other rank what to run next, as whole numbers. Plans go over gloo on
the host, tensors over the group of the device (NCCL, or gloo on the CPU). The first rank that fails
leaves a report in the store, which all can read. Starts no processes, knows no requests.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,
    _set_pg_timeout,
)

from topkapi import errors
from topkapi.device import resolve_device
from topkapi.engine.step_plan import StepPlan
from topkapi.errors import ConfigError, ParallelError, SelectionMismatchError, TopkapiError
from topkapi.models.parallel import make_mesh

# A message is this many numbers, and a second one for what does not fit: most decode steps do.
_FIRST = 1024
_HEADER = 3
# An idle rank waits for its next plan this long; when rank 0 dies, it hears of that at once.
_IDLE = timedelta(days=3650)
# Seconds that ranks may take to start, at least: a first import from a slow disk takes minutes.
_MEETING = 600.0
_FAILURE = "failure"

Kind = Literal["stop", "step", "logits"]
_KINDS: tuple[Kind, ...] = ("stop", "step", "logits")


@dataclass(frozen=True)
class Message:
    """What rank 0 wants done: `numbers` is a plan's for `step`, a row count for `logits`.

    `verify` asks for a comparison of the selection at the end of the step.
    """

    kind: Kind
    numbers: Sequence[int] = ()
    verify: bool = False

    @property
    def plan(self) -> StepPlan:
        """The plan of a `step`."""
        return StepPlan.from_ints(self.numbers)


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. `kind` is the name of the exception's class."""

    rank: int
    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """What is to be said of an exception; a mismatch names the rank that is off itself."""
        at_fault = error.rank if isinstance(error, ParallelError) else None
        return cls(
            rank if at_fault is None else at_fault,
            type(error).__name__,
            str(error),
            "".join(traceback.format_exception(error)),
        )

    @classmethod
    def read(cls, store: Store) -> Failure | None:
        """The first failure that any rank has reported, None while there is none."""
        return cls(**json.loads(store.get(_FAILURE))) if store.check([_FAILURE]) else None

    def error(self) -> ParallelError:
        """The failure as a caller catches it: a mismatch keeps its type."""
        mismatch = self.kind == SelectionMismatchError.__name__
        kind = SelectionMismatchError if mismatch else ParallelError
        text = f"rank {self.rank} failed: {self.kind}: {self.message}\n\n{self.traceback}"
        return kind(text, rank=self.rank, traceback=self.traceback)

    def user_error(self) -> TopkapiError:
        """As `error`, but what the user can cause (a broken checkpoint) has the type it would have
        in one process.
        """
        error = self.error()
        own = getattr(errors, self.kind, None)
        if not (isinstance(own, type) and issubclass(own, TopkapiError)) or issubclass(
            own, ParallelError
        ):
            return error
        raised: TopkapiError = own(self.message)
        raised.__cause__ = error
        return raised


def rank_store(store: Store) -> Store:
    """The part of a store that ranks use among themselves."""
    return PrefixStore("topkapi", store)


def connect_store(port: int) -> Store:
    """The store of `make_store` in another process of this machine."""
    meeting = timedelta(seconds=_MEETING)
    store: Store = TCPStore("127.0.0.1", port, is_master=False, timeout=meeting)
    return store


def make_store() -> TCPStore:
    """A store on a free port of this machine, alive as long as it is held."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class RankGroup:
    """This process's place among the ranks. All methods but `close` are collective.

    Attributes:
        rank, size: this rank, and how many there are.
        device: where this rank's share of the model and its cache are.
        mesh: all ranks, for Transformers' sharding.
        store: what ranks leave for each other.
    """

    def __init__(self, device: str | torch.device, timeout: float, store: Store | None) -> None:
        """Join, as `RANK`, `LOCAL_RANK` and `WORLD_SIZE` say; a process group that exists is used.

        Without `store` the environment says where the ranks meet (`MASTER_ADDR`). `timeout` in
        seconds bounds every wait for the others inside a step. Raises `ConfigError` when there is
        no GPU for this rank.
        """
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = _local_device(device)
        self._owns = not dist.is_initialized()
        if self._owns:
            cuda = self.device.type == "cuda"
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=max(timeout, _MEETING)),
                device_id=self.device if cuda else None,
            )
        elif dist.get_world_size() != self.size:
            raise ConfigError(
                f"the process group has {dist.get_world_size()} ranks, WORLD_SIZE is {self.size}"
            )
        shared = _get_default_store() if store is None else store
        self.store = rank_store(shared)
        self._control = dist.new_group(backend="gloo", timeout=_IDLE)
        self.mesh: DeviceMesh = make_mesh(self.device, self.size)
        if self._owns:
            # All have met: from now on nobody starts, and waits are for what others compute.
            _set_pg_timeout(timedelta(seconds=timeout))

    def send(self, message: Message) -> None:
        """Rank 0 alone: tell all others what comes next."""
        header = [_KINDS.index(message.kind), len(message.numbers), int(message.verify)]
        numbers = torch.tensor([*header, *message.numbers], dtype=torch.int64)
        first = torch.zeros(_FIRST, dtype=torch.int64)
        first[: numbers.shape[0]] = numbers[:_FIRST]
        dist.broadcast(first, 0, group=self._control)
        if numbers.shape[0] > _FIRST:
            dist.broadcast(numbers[_FIRST:].contiguous(), 0, group=self._control)

    def receive(self) -> Message:
        """The other ranks: wait for what rank 0 sends."""
        first = torch.empty(_FIRST, dtype=torch.int64)
        dist.broadcast(first, 0, group=self._control)
        kind, length, verify, *numbers = first.tolist()
        rest = length + _HEADER - _FIRST
        if rest > 0:
            tail = torch.empty(rest, dtype=torch.int64)
            dist.broadcast(tail, 0, group=self._control)
            numbers += tail.tolist()
        return Message(_KINDS[kind], numbers[:length], bool(verify))

    def share(self, tensor: torch.Tensor) -> None:
        """Give every rank rank 0's values of a contiguous tensor on the device, in place."""
        dist.broadcast(tensor, 0)

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers: how large a cache is that fits everywhere."""
        agreed = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._control)
        return int(agreed)

    def compare(self, checksum: torch.Tensor) -> None:
        """Raise `SelectionMismatchError` on every rank unless all have the same `[]` int64."""
        found = [torch.empty_like(checksum.reshape(1)) for _ in range(self.size)]
        dist.all_gather(found, checksum.reshape(1))
        values = torch.cat(found).tolist()
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            raise SelectionMismatchError(
                f"rank {odd[0]} selected other tokens than rank 0 in the same step; ranks must run "
                "the same kernels on the same kind of device",
                rank=odd[0],
            )

    def reporting(self) -> FailureReport:
        """A block whose exception the other ranks shall be able to read."""
        return FailureReport(self.store, self.rank)

    def failure(self, error: BaseException) -> ParallelError:
        """The error of the rank that failed first, where it could say so; else this rank's own."""
        with suppress(RuntimeError):
            if (first := Failure.read(self.store)) is not None:
                return first.error()
        return Failure.of(self.rank, error).error()

    def close(self) -> None:
        """Leave the process group, if it was made here."""
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()


class FailureReport:
    """A block whose exception is left in the store for the other ranks, unless one was first."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or error is None or issubclass(kind, SystemExit):
            return
        failure = Failure.of(self._rank, error)
        # A store that died with rank 0 takes no reports, and nobody is left to read them.
        with suppress(RuntimeError):
            self._store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))


def torchrun_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """`(rank, world size)` where a launcher such as torchrun started this process, else None."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def _local_device(device: str | torch.device) -> torch.device:
    resolved = resolve_device(device)
    if resolved.type != "cuda":
        return resolved
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size: rank {local} of this machine needs a GPU of its own, and there "
            f"are {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
