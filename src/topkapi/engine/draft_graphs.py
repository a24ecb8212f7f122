"""How is a whole round of greedy drafting laid into one captured step?

The MTP layer catches up (DRAFT_EXTEND), its last row of each request gives the first draft, and a
row a further draft follows, each taking the token and the hidden state of the one before: all of
it, choosing included, is one graph for each number of drafts and padded size. Drafts that are drawn
at random need numbers from the host in between, and are not captured. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from topkapi.attention.multi_step import NativeSparseAttnMultiStepBackend
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.graphs import Graphs, Outputs, PaddedSizes, Recorder, Recording
from topkapi.engine.step_graphs import StepInputs, own_backend
from topkapi.engine.step_plan import StepPlan
from topkapi.models.attention import DsaStep
from topkapi.models.experts import prepare_capturable
from topkapi.models.mtp import MtpLayer


class DraftInputs(StepInputs):
    """Static inputs of rows that catch up.

    Attributes:
        places: `[R]` int64, where each row's hidden state waits among its request's.
        counts: `[B]` int64, rows of each request. ends: `[B]` int64, its last row.
    """

    def __init__(self, requests: int, rows: int, device: torch.device) -> None:
        super().__init__(requests, rows, device, extra=(rows, requests, requests))
        self.places, self.counts, self.ends = self.extra

    def fill_catching_up(self, plan: StepPlan) -> None:
        """Every element, without waiting for the device."""
        places = [place for count in plan.q_lens for place in range(count)]
        ends = [end - 1 for end in accumulate(plan.q_lens)]
        self.fill(plan, plan.kv_lens, (places, plan.q_lens, ends))


@dataclass(frozen=True)
class _DraftRound:
    """A captured round."""

    inputs: DraftInputs
    backend: NativeSparseAttnBackend
    chain: NativeSparseAttnMultiStepBackend | None
    recording: Recording

    @property
    def nbytes(self) -> int:
        chain = 0 if self.chain is None else self.chain.cuda_graph_bytes()
        return self.inputs.vector.nbytes + self.backend.cuda_graph_bytes() + chain

    def start(self, plan: StepPlan) -> None:
        """Fill inputs and metadata. Never synchronises."""
        inputs, size = self.inputs, len(self.inputs.seq_lens)
        inputs.fill_catching_up(plan)
        rows, lens, spec = inputs.request_rows, inputs.seq_lens, SpecInfo(0, inputs.counts)
        self.backend.init_forward_metadata_replay_cuda_graph(
            size, rows, lens, 0, None, ForwardMode.DRAFT_EXTEND, spec, None
        )
        if self.chain is not None:
            self.chain.init_forward_metadata_replay_cuda_graph(
                size, rows, lens, 0, None, ForwardMode.DECODE, None, None
            )


class DraftGraphs:
    """Rounds of greedy drafting, by number of drafts."""

    def __init__(
        self,
        mtp: MtpLayer,
        backend: NativeSparseAttnBackend,
        table: ReqToTokenPool,
        pool: NSATokenToKVPool,
        waiting: torch.Tensor,
        *,
        rows_per_request: int,
        recorder: Recorder,
        sizes: PaddedSizes,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`table` and `pool` are the layer's, `waiting [requests, n, hidden]` are the hidden states
        that its rows take; none of them may move. A round may catch up by `rows_per_request` rows
        on average. Captures nothing yet.
        """
        self.graphs: Graphs[_DraftRound] = Graphs("a round of drafting", recorder, quiet)
        self._mtp = mtp
        self._backend = backend
        self._table = table
        self._pool = pool
        self._waiting = waiting
        self._rows_per_request = rows_per_request
        self._sizes = sizes
        if not backend.options.deterministic:
            prepare_capturable(mtp.layer)

    def propose(self, plan: StepPlan, num_drafts: int) -> torch.Tensor | None:
        """`[D, num_drafts]` int64 greedy drafts after catching up by `plan`, true until the next
        replay; None where they must be made eagerly. Never synchronises, but to capture.
        """
        size = self._sizes.holding(len(plan.rows))
        if size is None or len(plan.token_ids) > size * self._rows_per_request:
            return None
        found = self.graphs.find(
            (num_drafts, size), lambda recorder: self._capture(recorder, num_drafts, size)
        )
        if found is None:
            return None
        found.start(plan)
        found.recording.replay()
        return found.recording.outputs[0][: len(plan.rows)]

    def _capture(self, recorder: Recorder, num_drafts: int, size: int) -> _DraftRound:
        device, rows = self._waiting.device, size * self._rows_per_request
        inputs = DraftInputs(size, rows, device)
        backend = own_backend(self._backend, self._table, self._pool)
        spec = SpecInfo(0, inputs.counts)
        backend.init_cuda_graph_state(size, rows)
        backend.init_forward_metadata_capture_cuda_graph(
            size,
            rows,
            inputs.request_rows,
            inputs.seq_lens,
            None,
            ForwardMode.DRAFT_EXTEND,
            spec,
        )
        chain = None
        if num_drafts > 1:
            chain = NativeSparseAttnMultiStepBackend(backend, 1, num_drafts - 1)
            chain.init_cuda_graph_state(size, size)
            chain.init_forward_metadata_capture_cuda_graph(
                size, size, inputs.request_rows, inputs.seq_lens, None, ForwardMode.DECODE, None
            )

        def run() -> Outputs:
            hidden = self._catch_up(inputs, backend, spec)
            drafts = [_best(self._mtp.logits(hidden))]
            for place, step in enumerate(chain.attn_backends if chain else ()):
                now = self._next_row(inputs, place)
                hidden = self._mtp.run(drafts[-1], hidden, now.positions, DsaStep(step, now))
                drafts.append(_best(self._mtp.logits(hidden)))
            return (torch.stack(drafts, dim=1),)

        return _DraftRound(inputs, backend, chain, recorder.record(run))

    def _catch_up(
        self, inputs: DraftInputs, backend: NativeSparseAttnBackend, spec: SpecInfo
    ) -> torch.Tensor:
        """The layer's last row of each request: `[B, hidden]`."""
        batch = inputs.batch(ForwardMode.DRAFT_EXTEND, self._table, self._pool, spec)
        hidden = self._waiting[inputs.table_rows.clamp_min(0), inputs.places]
        step = DsaStep(backend, batch)
        return self._mtp.run(inputs.tokens, hidden, inputs.positions, step)[inputs.ends]

    def _next_row(self, inputs: DraftInputs, place: int) -> ForwardBatch:
        """One row a request, `place` positions after those that caught up."""
        positions = inputs.seq_lens + place
        slots = self._table.req_to_token[inputs.request_rows, positions].long()
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(positions),
            seq_lens=inputs.seq_lens,
            req_pool_indices=inputs.request_rows,
            out_cache_loc=torch.where(inputs.seq_lens > 0, slots, 0),
            positions=positions,
            req_to_token_pool=self._table,
            token_to_kv_pool=self._pool,
        )


def _best(logits: torch.Tensor) -> torch.Tensor:
    """`[B]` int64, what a sampler takes of `logits [B, V]` at temperature 0; token 0 where it takes
    none.
    """
    logits = logits.float()
    return torch.where(logits.amax(dim=-1).isfinite(), logits.argmax(dim=-1), 0)
