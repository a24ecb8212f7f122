"""How a scheduled batch becomes one forward pass, and its logits the next tokens.

Lays the chunks flat (no padding), writes new pages into the request-to-token table, runs the
decoder, computes logits at the last row of the chunks that sample, and samples. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.logprobs import chosen_to_host, note_prompt_logprobs
from topkapi.engine.request import SamplingRow, TokenLogprob
from topkapi.engine.sampler import Sampler
from topkapi.engine.scheduler import Batch, Chunk
from topkapi.engine.timeline import Timeline
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import compute_logits, run_decoder


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

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[TokenLogprob]:
        """The next token of every chunk that samples, in order; id -1 where logits held NaN.

        The host waits once, for the sampled tokens (and once more when log-probabilities are
        asked for); not at all when no chunk samples. Log-probabilities of prompts are noted in
        their requests.
        """
        self._map_pages(batch.chunks)
        forward_batch = self._forward_batch(batch.chunks)
        self._backend.init_forward_metadata(forward_batch)
        self._timeline.end("metadata")
        hidden = run_decoder(
            self._model,
            self._to_device(_new_token_ids(batch.chunks)),
            forward_batch.positions,
            DsaStep(self._backend, forward_batch),
        )
        note_prompt_logprobs(batch.chunks, hidden, partial(compute_logits, self._model))
        self._timeline.end("rest")
        rows = [SamplingRow(chunk.request) for chunk in batch.chunks if chunk.samples]
        if not rows:
            return []
        last_rows = self._to_device(_last_rows(batch.chunks))
        logits = compute_logits(self._model, hidden[last_rows])
        self._timeline.end("rest")
        counts = [row.request.params.logprobs for row in rows]
        return chosen_to_host(self._sampler.sample(logits, rows), counts)

    def _map_pages(self, chunks: Sequence[Chunk]) -> None:
        """Write the slots of pages allocated for this step into the requests' table rows."""
        new = [
            (chunk.request.row, chunk.first_new_page + place, page)
            for chunk in chunks
            for place, page in enumerate(chunk.new_pages)
        ]
        if not new:
            return
        row, place, page = self._to_device(new).T
        size = self._pool.page_size
        table = self._rows.req_to_token
        slots = page[:, None] * size + torch.arange(size, device=self._device)
        table.view(table.shape[0], -1, size)[row, place] = slots.to(table.dtype)

    def _forward_batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        return ForwardBatch.from_lengths(
            _mode(chunks),
            q_lens=[chunk.length for chunk in chunks],
            kv_lens=[chunk.start + chunk.length for chunk in chunks],
            req_pool_indices=[_row(chunk) for chunk in chunks],
            req_to_token_pool=self._rows,
            token_to_kv_pool=self._pool,
        )

    def _to_device(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def _mode(chunks: Sequence[Chunk]) -> ForwardMode:
    """One new token each is a decode, whether it continues a prompt or an answer."""
    single = [chunk.length == 1 for chunk in chunks]
    if all(single):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if any(single) else ForwardMode.EXTEND


def _row(chunk: Chunk) -> int:
    assert chunk.request.row is not None, "a scheduled request has a row"
    return chunk.request.row


def _new_token_ids(chunks: Sequence[Chunk]) -> list[int]:
    return [
        token
        for chunk in chunks
        for token in chunk.request.token_ids[chunk.start : chunk.start + chunk.length]
    ]


def _last_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Row of the last new token of every chunk that samples."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + chunk.length)
    return [
        end - 1 for chunk, (_, end) in zip(chunks, pairwise(ends), strict=True) if chunk.samples
    ]
