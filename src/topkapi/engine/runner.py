"""How a scheduled batch becomes one forward pass, and its logits the next tokens.

Lays the chunks flat (no padding), writes new pages into the request-to-token table, runs the
decoder, computes logits at the last row of the chunks that sample, and samples. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.logprobs import chosen_to_host, note_prompt_logprobs
from topkapi.engine.request import Sampled, SamplingRow
from topkapi.engine.sampler import Sampler
from topkapi.engine.scheduler import Batch, Chunk
from topkapi.engine.step_plan import StepPlan
from topkapi.engine.timeline import Timeline
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import compute_logits, run_decoder
from topkapi.models.row_invariant import prepare


class Runner:
    """One model on one device, over one set of pools."""

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
        if backend.options.deterministic:
            prepare(model)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sequence[Sampled]:
        """The next token of every chunk that samples, in order; id -1 where logits held NaN.

        The host waits once, for the sampled tokens (and once more when log-probabilities are
        asked for); not at all when no chunk samples. Log-probabilities of prompts are noted in
        their requests.
        """
        hidden = self.forward(StepPlan.of(batch.chunks))
        note_prompt_logprobs(batch.chunks, hidden, lambda rows: compute_logits(self._model, rows))
        self._timeline.end("rest")
        rows = [SamplingRow(chunk.request) for chunk in batch.chunks if chunk.samples]
        if not rows:
            return []
        last_rows = self._to_device(_last_rows(batch.chunks))
        logits = compute_logits(self._model, hidden[last_rows])
        self._timeline.end("rest")
        counts = [row.request.params.logprobs for row in rows]
        return chosen_to_host(self._sampler.sample(logits, rows), counts)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Run the decoder and cache the new tokens: hidden states `[T, hidden]`. Never syncs."""
        self._map_pages(plan)
        return self._decode(plan, plan.mode, self._to_device(plan.token_ids))

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
