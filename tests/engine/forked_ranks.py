"""Ranks as forks of the test's own process: a start takes no import, and a patch reaches them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from topkapi.engine.rank import run_rank


class Forked:
    """A forked process, with what is needed of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _End:
    """A block that ends the process, however it ends itself."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        code = int(error.code or 0) if isinstance(error, SystemExit) else int(error is not None)
        if code:
            traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
        os._exit(code)


def fork(run: Callable[[], Any], environment: Mapping[str, str]) -> Forked:
    """Run a function in a copy of this process; its status is 1 when it raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    with _End():
        os.environ.update(environment)
        # Threads were not copied: torch's pool, and those that a store would wait for at its end.
        torch.set_num_threads(1)
        gc.freeze()
        run()
    raise AssertionError("the copy has ended")


def start_forked(
    environment: Mapping[str, str], lifeline: Connection, calls: Connection | None, port: int
) -> Forked:
    """As `topkapi.engine.parallel.start_process`."""
    return fork(lambda: run_rank(lifeline, calls, port), environment)
