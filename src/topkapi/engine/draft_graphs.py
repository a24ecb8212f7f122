"""How is a round of drafting laid into captured steps?

The MTP layer catches up (DRAFT_EXTEND), its last row of each request gives the first draft, and a
row a further draft follows, each taking the token and the hidden state of the one before. Where all
requests are greedy all of it, choosing included, is one graph for each number of drafts and padded
size. Else there is a graph for each draft, and a sampler chooses between them. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from topkapi.attention.multi_step import NativeSparseAttnMultiStepBackend
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.graphs import Graphs, Outputs, PaddedSizes, Recorder, Recording
from topkapi.engine.sampler import best_tokens
from topkapi.engine.step_graphs import StepInputs, own_backend
from topkapi.engine.step_plan import StepPlan
from topkapi.models.attention import DsaStep
from topkapi.models.experts import prepare_capturable
from topkapi.models.mtp import MtpLayer

# Chooses draft tokens [D] int64 from logits [D, V]; told which draft of the step it is, from 0.
Choose = Callable[[torch.Tensor, int], torch.Tensor]


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
    """A captured round: of one recording, which gives the drafts, or of one a draft, which give
    hidden states and logits, and take the drafts chosen before from `chosen [k - 1, B]`.
    """

    inputs: DraftInputs
    backend: NativeSparseAttnBackend
    chain: NativeSparseAttnMultiStepBackend | None
    chosen: torch.Tensor
    recordings: Sequence[Recording]

    @property
    def nbytes(self) -> int:
        chain = 0 if self.chain is None else self.chain.cuda_graph_bytes()
        own = self.inputs.vector.nbytes + self.chosen.nbytes
        return own + self.backend.cuda_graph_bytes() + chain

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

    def run(self, count: int, choose: Choose | None) -> torch.Tensor:
        """`[count, k]` int64 drafts of the first `count` requests.

        Drafts, and what `choose` is given, are copies: they are read once more after the drafts are
        verified, by a graph that may have been captured before, and so compute over the outputs.
        """
        if choose is None:
            [whole] = self.recordings
            whole.replay()
            return whole.outputs[0][:count].clone()
        drafts = []
        for place, recording in enumerate(self.recordings):
            recording.replay()
            drafts.append(choose(recording.outputs[1][:count].clone(), place))
            if place < len(self.chosen):
                self.chosen[place, :count] = drafts[-1]
        return torch.stack(drafts, dim=1)


class DraftGraphs:
    """Rounds of drafting, by number of drafts."""

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
        # Also where the model is deterministic: what is drafted changes nothing that is promised.
        prepare_capturable(mtp.layer)

    def propose(
        self, plan: StepPlan, num_drafts: int, choose: Choose | None
    ) -> torch.Tensor | None:
        """`[D, num_drafts]` int64 drafts after catching up by `plan`; None where they must be
        made eagerly. Without `choose` the best token each time.

        Never synchronises, but to capture.
        """
        size = self._sizes.holding(len(plan.rows))
        if size is None or len(plan.token_ids) > size * self._rows_per_request:
            return None
        whole = choose is None
        found = self.graphs.find(
            (num_drafts, size, whole),
            lambda recorder: self._capture(recorder, num_drafts, size, whole=whole),
        )
        if found is None:
            return None
        self.graphs.num_replays += 1
        found.start(plan)
        return found.run(len(plan.rows), choose)

    def _capture(
        self, recorder: Recorder, num_drafts: int, size: int, *, whole: bool
    ) -> _DraftRound:
        device, rows = self._waiting.device, size * self._rows_per_request
        inputs = DraftInputs(size, rows, device)
        backend = own_backend(self._backend, self._table, self._pool)
        spec, mode = SpecInfo(0, inputs.counts), ForwardMode.DRAFT_EXTEND
        backend.init_cuda_graph_state(size, rows)
        backend.init_forward_metadata_capture_cuda_graph(
            size, rows, inputs.request_rows, inputs.seq_lens, None, mode, spec
        )
        chain = None
        if num_drafts > 1:
            chain = NativeSparseAttnMultiStepBackend(backend, 1, num_drafts - 1)
            chain.init_cuda_graph_state(size, size)
            chain.init_forward_metadata_capture_cuda_graph(
                size, size, inputs.request_rows, inputs.seq_lens, None, ForwardMode.DECODE, None
            )
        chosen = torch.zeros(num_drafts - 1, size, dtype=torch.int64, device=device)
        found = _DraftRound(inputs, backend, chain, chosen, recordings=())
        record = self._record_whole if whole else self._record_steps
        return replace(found, recordings=record(recorder, found))

    def _record_whole(self, recorder: Recorder, of: _DraftRound) -> list[Recording]:
        def run() -> Outputs:
            hidden, logits = self._catch_up(of)
            # A guess from NaN is as good as any: verifying refuses it.
            drafts = [best_tokens(logits).clamp_min(0)]
            for place in range(len(of.chosen)):
                hidden, logits = self._next_row(of, place, drafts[-1], hidden)
                drafts.append(best_tokens(logits).clamp_min(0))
            return (torch.stack(drafts, dim=1),)

        return [recorder.record(run)]

    def _record_steps(self, recorder: Recorder, of: _DraftRound) -> list[Recording]:
        recordings = [recorder.record(partial(self._catch_up, of))]
        for place, tokens in enumerate(of.chosen):
            hidden = recordings[-1].outputs[0]
            run = partial(self._next_row, of, place, tokens, hidden)
            recordings.append(recorder.record(run))
        return recordings

    def _catch_up(self, of: _DraftRound) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's last row of each request, `[B, hidden]`, and its logits `[B, V]`."""
        inputs, spec = of.inputs, SpecInfo(0, of.inputs.counts)
        batch = inputs.batch(ForwardMode.DRAFT_EXTEND, self._table, self._pool, spec)
        hidden = self._waiting[inputs.table_rows.clamp_min(0), inputs.places]
        step = DsaStep(of.backend, batch)
        hidden = self._mtp.run(inputs.tokens, hidden, inputs.positions, step)[inputs.ends]
        return hidden, self._mtp.logits(hidden)

    def _next_row(
        self, of: _DraftRound, place: int, tokens: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of one row a request, `place` positions after those that caught up, which takes
        `tokens [B]` and `hidden [B, hidden]`.
        """
        assert of.chain is not None, "further drafts have a chain"
        inputs = of.inputs
        positions = inputs.seq_lens + place
        slots = self._table.req_to_token[inputs.request_rows, positions].long()
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(positions),
            seq_lens=inputs.seq_lens,
            req_pool_indices=inputs.request_rows,
            out_cache_loc=torch.where(inputs.seq_lens > 0, slots, 0),
            positions=positions,
            req_to_token_pool=self._table,
            token_to_kv_pool=self._pool,
        )
        step = DsaStep(of.chain.attn_backends[place], batch)
        hidden = self._mtp.run(tokens, hidden, positions, step)
        return hidden, self._mtp.logits(hidden)
