"""What must stay at one address between the capture of a graph and its replays?

One set of narrow buffers for each (mode, batch size): nothing as wide as a context, and nothing two
graphs share. Filling them is `build_metadata`'s work, as in an eager step; on a machine without
graphs the same calls simply run. Knows sizes and keys, no lengths.
"""

from __future__ import annotations

import torch

from topkapi.attention.forward_batch import ForwardMode
from topkapi.attention.step_metadata import StepBuffers, allocate_steps, nbytes_of
from topkapi.errors import ConfigError

# What an engine fills `seq_lens` with for requests that do not exist: one readable token each.
SEQ_LEN_FILL_VALUE = 1


class GraphState:
    """The static buffers of every captured graph of one backend: `num_steps` sets a graph."""

    def __init__(self, max_bs: int, max_num_tokens: int, num_steps: int = 1) -> None:
        """Limits only: buffers appear as graphs are captured."""
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self.num_steps = num_steps
        self._buffers: dict[tuple[ForwardMode, int], list[StepBuffers]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers: about 16 a request and 12 a row of each captured graph."""
        return sum(nbytes_of(steps) for steps in self._buffers.values())

    def add(
        self, mode: ForwardMode, bs: int, num_tokens: int, device: torch.device
    ) -> list[StepBuffers]:
        """New buffers of `bs` requests and `num_tokens` rows, kept for replays.

        A graph captured before for this key must not be replayed any more. Raises `ConfigError`
        above the limits.
        """
        if not 0 < bs <= self.max_bs or not bs <= num_tokens <= self.max_num_tokens:
            raise ConfigError(
                f"graph capture: expected at most {self.max_bs} requests and {self.max_num_tokens} "
                f"tokens (init_cuda_graph_state), got {bs} and {num_tokens}"
            )
        steps = allocate_steps(self.num_steps, bs, num_tokens, device)
        self._buffers[_key(mode, bs)] = steps
        return steps

    def of(self, mode: ForwardMode, bs: int) -> list[StepBuffers]:
        """The buffers of a captured graph. Raises `ConfigError` when none was captured."""
        if _key(mode, bs) not in self._buffers:
            known = ", ".join(sorted(f"{key.name} x {size}" for key, size in self._buffers))
            raise ConfigError(
                f"graph replay: nothing was captured for {mode.name} x {bs}; "
                f"captured are: {known or 'none'}"
            )
        return self._buffers[_key(mode, bs)]


def _key(mode: ForwardMode, bs: int) -> tuple[ForwardMode, int]:
    """An idle rank replays the decode graph of its peers, all of its rows inert."""
    return (ForwardMode.DECODE if mode.is_idle() else mode), bs
