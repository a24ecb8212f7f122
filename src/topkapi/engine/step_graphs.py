"""How is a decode or a verifying step laid into the static inputs of a captured one?

Captured are the slots of the new tokens, all decoder layers, the last norm, and the logits and best
token of every row. Outside stay one copy of whole numbers to the device, the step's metadata (the
backend's own replay call) and sampling. Requests that only fill up the size have context length 0:
they see nothing, select nothing, and write to the dummy slot 0. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from topkapi.attention.layer_forward import LayerForward
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.graphs import Graphs, Outputs, PaddedSizes, Recorder, Recording
from topkapi.engine.sampler import best_tokens
from topkapi.engine.step_plan import StepPlan
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import compute_logits, run_decoder


class StepInputs:
    """Static inputs of R rows of B requests, in one vector, so that a step is one copy.

    Attributes:
        tokens, positions: `[R]` int64.
        table_rows: `[R]` int64, each row's request's row of the request-to-token table; -1 is
            padding.
        request_rows, seq_lens: `[B]` int64, the same by request, and what the backend takes for
            lengths: 0 is padding.
    """

    def __init__(
        self, requests: int, rows: int, device: torch.device, extra: Sequence[int] = ()
    ) -> None:
        """All of it padding. `extra` are the lengths of more vectors."""
        sizes = [rows, rows, rows, requests, requests, *extra]
        self.vector = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = torch.split(self.vector, sizes)
        self.tokens, self.positions, self.table_rows, self.request_rows, self.seq_lens = parts[:5]
        self.extra = parts[5:]
        self.table_rows.fill_(-1)

    def fill(
        self,
        plan: StepPlan,
        seq_lens: Sequence[int],
        extra: Sequence[Sequence[int]] = (),
    ) -> None:
        """Every element, from host numbers, without waiting for the device. `extra` are the other
        vectors' numbers.
        """
        rows, requests = len(self.tokens), len(self.seq_lens)
        positions: list[int] = []
        table_rows: list[int] = []
        for row, q, end in zip(plan.rows, plan.q_lens, plan.kv_lens, strict=True):
            positions += range(end - q, end)
            table_rows += [row] * q
        numbers = [
            *_padded(plan.token_ids, rows),
            *_padded(positions, rows),
            *_padded(table_rows, rows, -1),
            *_padded(plan.rows, requests),
            *_padded(seq_lens, requests),
        ]
        for values, part in zip(extra, self.extra, strict=True):
            numbers += _padded(values, len(part))
        self.vector.copy_(torch.tensor(numbers, dtype=torch.int64), non_blocking=True)

    def slots(self, table: torch.Tensor) -> torch.Tensor:
        """`[R]` int64, where the new tokens are written; 0 for padding. Capture-safe."""
        found = table[self.table_rows.clamp_min(0), self.positions].long()
        return torch.where(self.table_rows < 0, 0, found)

    def batch(
        self,
        mode: ForwardMode,
        rows: ReqToTokenPool,
        pool: NSATokenToKVPool,
        spec: SpecInfo | None,
    ) -> ForwardBatch:
        """What the layers read of a batch. Capture-safe."""
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.seq_lens),
            seq_lens=self.seq_lens,
            req_pool_indices=self.request_rows,
            out_cache_loc=self.slots(rows.req_to_token),
            positions=self.positions,
            req_to_token_pool=rows,
            token_to_kv_pool=pool,
            spec_info=spec,
        )


@dataclass(frozen=True)
class StepOutput:
    """What a forward pass over T tokens gives: hidden states `[T, hidden]`, and where it was
    replayed also logits `[T, V]` and their `best_tokens` `[T]`.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    best: torch.Tensor | None = None


@dataclass(frozen=True)
class _ModelStep:
    """A captured step of `size` requests with `width` rows each."""

    inputs: StepInputs
    backend: NativeSparseAttnBackend
    mode: ForwardMode
    spec: SpecInfo
    recording: Recording

    @property
    def nbytes(self) -> int:
        return self.inputs.vector.nbytes + self.backend.cuda_graph_bytes()

    def start(self, plan: StepPlan, drafts: torch.Tensor | None) -> None:
        """Fill inputs and metadata. Never synchronises."""
        width = self.spec.draft_token_num
        inputs, size = self.inputs, len(self.inputs.seq_lens)
        verifies = self.mode.is_target_verify()
        inputs.fill(plan, [n - width if verifies else n for n in plan.kv_lens])
        if drafts is not None:
            inputs.tokens.view(size, width)[: len(drafts), 1:] = drafts
        self.backend.init_forward_metadata_replay_cuda_graph(
            size, inputs.request_rows, inputs.seq_lens, 0, None, self.mode, self.spec, None
        )


class ModelGraphs:
    """Decode steps, and verifying steps by how many drafts each request has."""

    def __init__(
        self,
        model: Any,
        backend: NativeSparseAttnBackend,
        rows: ReqToTokenPool,
        pool: NSATokenToKVPool,
        *,
        recorder: Recorder,
        sizes: PaddedSizes,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Captures nothing yet. The pools must not grow any more."""
        self.graphs: Graphs[_ModelStep] = Graphs("a step of the model", recorder, quiet)
        self._model = model
        self._backend = backend
        self._rows = rows
        self._pool = pool
        self._sizes = sizes

    def warm_up(self) -> None:
        """Capture decode steps of all sizes, the largest first."""
        for size in reversed(self._sizes.sizes):
            self._find(size, 1, verifies=False)

    def takes(self, plan: StepPlan, drafts: torch.Tensor | None) -> bool:
        """Whether a plan is of the kind that is captured: all of its requests have one token each,
        or one and `drafts [B, k]`.
        """
        fits = self._sizes.holding(len(plan.rows)) is not None
        return fits and not self.graphs.off and set(plan.q_lens) == {_width(drafts)}

    def start(self, plan: StepPlan, drafts: torch.Tensor | None) -> ReplayedStep | None:
        """Ready the captured step of a plan that `takes` holds for; None where it cannot be
        captured and must be run eagerly. `drafts [B, k]` are int64.

        Pages must be mapped. Never synchronises, but to capture.
        """
        size = self._sizes.holding(len(plan.rows))
        assert size is not None, "the plan is one that is taken"
        step = self._find(size, _width(drafts), verifies=drafts is not None)
        if step is None:
            return None
        self.graphs.num_replays += 1
        step.start(plan, drafts)
        return ReplayedStep(step.recording, len(plan.token_ids))

    def _find(self, size: int, width: int, *, verifies: bool) -> _ModelStep | None:
        mode = ForwardMode.TARGET_VERIFY if verifies else ForwardMode.DECODE
        return self.graphs.find(
            (mode, width, size), lambda recorder: self._capture(recorder, mode, width, size)
        )

    def _capture(self, recorder: Recorder, mode: ForwardMode, width: int, size: int) -> _ModelStep:
        device = self._rows.req_to_token.device
        # Of its own: a backend keeps one set of buffers for a mode and size, whatever the width.
        backend = own_backend(self._backend, self._rows, self._pool)
        inputs, spec = StepInputs(size, size * width, device), SpecInfo(width)
        backend.init_cuda_graph_state(size, size * width)
        backend.init_forward_metadata_capture_cuda_graph(
            size, size * width, inputs.request_rows, inputs.seq_lens, None, mode, spec
        )

        def run() -> Outputs:
            step = DsaStep(backend, inputs.batch(mode, self._rows, self._pool, spec))
            hidden = run_decoder(self._model, inputs.tokens, inputs.positions, step)
            logits = compute_logits(self._model, hidden)
            return hidden, logits, best_tokens(logits)

        return _ModelStep(inputs, backend, mode, spec, recorder.record(run))


@dataclass(frozen=True)
class ReplayedStep:
    """A captured step, ready to be replayed for `num_rows` true rows."""

    recording: Recording
    num_rows: int

    def replay(self) -> StepOutput:
        """All rows, true until the next replay."""
        self.recording.replay()
        return StepOutput(*(out[: self.num_rows] for out in self.recording.outputs))


def _width(drafts: torch.Tensor | None) -> int:
    """Rows of each request."""
    return 1 if drafts is None else 1 + drafts.shape[1]


def own_backend(
    backend: LayerForward, rows: ReqToTokenPool, pool: NSATokenToKVPool
) -> NativeSparseAttnBackend:
    """A backend of the same model and options that shares no state with `backend`."""
    return NativeSparseAttnBackend(
        backend.config,
        req_to_token_pool=rows,
        token_to_kv_pool=pool,
        device=backend.device,
        options=backend.options,
    )


def _padded(values: Sequence[int], size: int, filler: int = 0) -> list[int]:
    return [*values, *(filler,) * (size - len(values))]
