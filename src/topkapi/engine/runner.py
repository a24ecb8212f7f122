"""How a scheduled batch becomes one forward pass, and its logits the next tokens.

Lays the chunks flat (no padding), writes new pages into the request-to-token table, runs the
decoder (or replays a captured step, see `step_graphs`), computes logits at the last row of the
chunks that sample, and samples. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.graphs import Graphs, GraphStats, PaddedSizes, Recorder, total
from topkapi.engine.logprobs import chosen_to_host, note_prompt_logprobs
from topkapi.engine.request import Sampled, SamplingRow
from topkapi.engine.sampler import Sampler
from topkapi.engine.scheduler import Batch, Chunk
from topkapi.engine.step_graphs import ModelGraphs, StepOutput
from topkapi.engine.step_plan import StepPlan
from topkapi.engine.timeline import Timeline
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import compute_logits, run_decoder
from topkapi.models.experts import prepare_capturable
from topkapi.models.row_invariant import prepare


class Runner:
    """One model on one device, over one set of pools.

    Attributes:
        next_pass_is_watched: whether the next forward pass must run module by module, for somebody
            who looks at the modules; asked once before each that could be replayed.
    """

    next_pass_is_watched: Callable[[], bool] | None = None

    def __init__(
        self,
        model: Any,
        backend: NativeSparseAttnBackend,
        rows: ReqToTokenPool,
        pool: NSATokenToKVPool,
        timeline: Timeline | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._rows = rows
        self._pool = pool
        self._sampler = Sampler()
        self._device = rows.req_to_token.device
        self._timeline = timeline or Timeline()
        self._graphs: ModelGraphs | None = None
        if backend.options.deterministic:
            prepare(model)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sequence[Sampled]:
        """The next token of every chunk that samples, in order; id -1 where logits held NaN.

        The host waits once, for the sampled tokens (and once more when log-probabilities are
        asked for); not at all when no chunk samples. Log-probabilities of prompts are noted in
        their requests.
        """
        plan = StepPlan.of(batch.chunks)
        output = self._compute(plan, None, lambda: self.forward(plan))
        note_prompt_logprobs(
            batch.chunks, output.hidden, lambda rows: compute_logits(self._model, rows)
        )
        self._timeline.end("rest")
        rows = [SamplingRow(chunk.request) for chunk in batch.chunks if chunk.samples]
        if not rows:
            return []
        logits, best = self._logits(output, _last_rows(batch.chunks))
        self._timeline.end("rest")
        counts = [row.request.params.logprobs for row in rows]
        return chosen_to_host(self._sampler.sample(logits, rows, best), counts)

    def use_graphs(
        self,
        recorder: Recorder,
        sizes: PaddedSizes,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Replay decode steps from now on. `quiet()` holds off whoever watches the modules."""
        if not self._backend.options.deterministic:
            prepare_capturable(self._model)
        self._graphs = ModelGraphs(
            self._model,
            self._backend,
            self._rows,
            self._pool,
            recorder=recorder,
            sizes=sizes,
            quiet=quiet,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the decode steps of all sizes now, rather than when they are met."""
        if self._graphs is not None:
            self._graphs.warm_up()

    def graph_stats(self) -> GraphStats | None:
        """None where nothing is to be captured. Memory is asked of the device; no wait."""
        kinds = self._kinds()
        return total([kind.stats() for kind in kinds]) if kinds else None

    def _kinds(self) -> list[Graphs[Any]]:
        """What is captured, by kind of step."""
        return [] if self._graphs is None else [self._graphs.graphs]

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Run the decoder and cache the new tokens: hidden states `[T, hidden]`. Never syncs."""
        self._map_pages(plan)
        return self._decode(plan, plan.mode, self._to_device(plan.token_ids))

    def _compute(
        self, plan: StepPlan, drafts: torch.Tensor | None, run: Callable[[], torch.Tensor]
    ) -> StepOutput:
        """The hidden states that `run` gives, or the captured step where there is one. `drafts
        [B, k]` where every request has k of them.
        """
        graphs, watched = self._graphs, self.next_pass_is_watched
        if graphs is None or not graphs.takes(plan, drafts) or (watched and watched()):
            return StepOutput(run())
        self._map_pages(plan)
        step = graphs.start(plan, drafts)
        if step is None:
            return StepOutput(run())
        self._timeline.end("metadata")
        output = step.replay()
        self._timeline.end("graph")
        return output

    def _logits(
        self, output: StepOutput, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[len(rows), V]` of these rows, and their best tokens where they are known."""
        logits, best = output.logits, output.best
        if logits is None or best is None:
            return compute_logits(self._model, output.hidden[self._to_device(rows)]), None
        if len(rows) == len(logits):
            return logits, best
        at = self._to_device(rows)
        return logits[at], best[at]

    def _decode(self, plan: StepPlan, mode: ForwardMode, token_ids: torch.Tensor) -> torch.Tensor:
        """The decoder over `token_ids [T]`, whose pages are mapped."""
        forward_batch = ForwardBatch.from_lengths(
            mode,
            q_lens=list(plan.q_lens),
            kv_lens=list(plan.kv_lens),
            req_pool_indices=list(plan.rows),
            req_to_token_pool=self._rows,
            token_to_kv_pool=self._pool,
        )
        self._backend.init_forward_metadata(forward_batch)
        self._timeline.end("metadata")
        return run_decoder(
            self._model,
            token_ids,
            forward_batch.positions,
            DsaStep(self._backend, forward_batch),
        )

    def _map_pages(self, plan: StepPlan) -> None:
        """Write the slots of pages allocated for this step into the requests' table rows."""
        if not plan.new_pages:
            return
        row, place, page = self._to_device(plan.new_pages).T
        size = self._pool.page_size
        table = self._rows.req_to_token
        slots = page[:, None] * size + torch.arange(size, device=self._device)
        table.view(table.shape[0], -1, size)[row, place] = slots.to(table.dtype)

    def _to_device(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def _last_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Row of the last new token of every chunk that samples."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + chunk.length)
    return [
        end - 1 for chunk, (_, end) in zip(chunks, pairwise(ends), strict=True) if chunk.samples
    ]
