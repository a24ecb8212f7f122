"""How does the MTP layer keep up with the requests, and what does it guess next for each?

The layer's row p joins the model's hidden state of position p with token p + 1. It is cached in the
slot of position p + 1: a page so holds what its own tokens (and those before) give, whoever shares
it. That is the request-to-token table read one column further, nothing else. What a request goes on
from after a page that others computed is the hidden state of its last token, kept with the page
(`pool.page_hidden`).

A hidden state whose row is not yet computed waits (`_Waiting`), the token it is joined to still
unknown for the newest: rows of prompts are computed after the model has run over them, those of a
request that is being drafted for just before its drafts, and those of one that is not when enough
have come together. Knows nothing about acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode
from topkapi.attention.layer_forward import LayerForward
from topkapi.attention.multi_step import NativeSparseAttnMultiStepBackend
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.draft_graphs import Choose, DraftGraphs
from topkapi.engine.graphs import PaddedSizes, Recorder
from topkapi.engine.scheduler import Chunk
from topkapi.engine.step_plan import StepPlan
from topkapi.models.attention import DsaStep
from topkapi.models.mtp import MtpLayer

# Hidden states of a request that may wait, at least: the layer then runs once for so many tokens.
_CAPACITY = 16


@dataclass(frozen=True)
class _Waiting:
    """Hidden states of positions `first - 1` and on, `count` of them, of one request."""

    request_id: int
    first: int
    count: int

    @property
    def newest(self) -> int:
        """The position whose token the newest of them is to be joined to."""
        return self.first + self.count - 1


class Drafter:
    """The MTP layer over the engine's own pools, under its own layer id.

    Attributes:
        graphs: captured rounds, once `use_graphs` was called.
    """

    graphs: DraftGraphs | None = None

    def __init__(
        self,
        mtp: MtpLayer,
        backend: NativeSparseAttnBackend,
        rows: ReqToTokenPool,
        pool: NSATokenToKVPool,
        max_drafts: int,
    ) -> None:
        """`backend` is the model's; the layer gets one of its own. Allocates
        `[requests, 16, hidden]` for the hidden states that wait.
        """
        assert pool.page_hidden is not None, "speculation needs the hidden state after each page"
        self._mtp = mtp
        self._pool = pool
        self._device = rows.req_to_token.device
        # The table one column further. It never grows here, so a view stays true.
        self._table = ReqToTokenPool(1, 1, self._device)
        self._table.req_to_token = rows.req_to_token[:, 1:]
        self._backend = NativeSparseAttnBackend(
            backend.config,
            req_to_token_pool=self._table,
            token_to_kv_pool=pool,
            device=self._device,
            options=backend.options,
        )
        self._chains = {
            steps: NativeSparseAttnMultiStepBackend(self._backend, 1, steps)
            for steps in range(1, max_drafts)
        }
        self._max_drafts = max_drafts
        self._capacity = max(_CAPACITY, max_drafts + 1)
        shape = (rows.size, self._capacity, mtp.hidden_size)
        self._hidden = torch.zeros(shape, dtype=pool.page_hidden.dtype, device=self._device)
        self._waiting: dict[int, _Waiting] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the hidden states that may wait."""
        return self._hidden.nbytes

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Find where each request stands: a new one starts, or goes on after a shared prefix."""
        pages: list[tuple[int, int]] = []
        for chunk in chunks:
            row, request_id = _row(chunk), chunk.request.request_id
            known = self._waiting.get(row)
            if known and (known.request_id, known.newest) == (request_id, chunk.start):
                continue
            if chunk.start == 0:
                self._waiting[row] = _Waiting(request_id, 1, 0)
                continue
            self._waiting[row] = _Waiting(request_id, chunk.start, 1)
            pages.append((row, _page(chunk, chunk.start - 1, self._pool.page_size)))
        if pages:
            assert self._pool.page_hidden is not None, "checked when this was made"
            row_of, page = self._to_device(pages).T
            self._hidden[row_of, 0] = self._pool.page_hidden[page]

    def use_graphs(
        self,
        recorder: Recorder,
        sizes: PaddedSizes,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Replay rounds of drafting from now on."""
        self.graphs = DraftGraphs(
            self._mtp,
            self._backend,
            self._table,
            self._pool,
            self._hidden,
            rows_per_request=self._max_drafts + 1,
            recorder=recorder,
            sizes=sizes,
            quiet=quiet,
        )

    def replay(
        self, chunks: Sequence[Chunk], num_drafts: int, choose: Choose | None
    ) -> torch.Tensor | None:
        """As `propose`, replayed; None where nothing is captured. Without `choose` the best token
        each time.
        """
        if self.graphs is None or self.graphs.graphs.off:
            return None
        counts = [self._waiting[_row(chunk)].count for chunk in chunks]
        plan = StepPlan(
            token_ids=tuple(
                token
                for chunk, count in zip(chunks, counts, strict=True)
                for token in chunk.request.token_ids[chunk.start + 1 - count : chunk.start + 1]
            ),
            q_lens=tuple(counts),
            kv_lens=tuple(chunk.start for chunk in chunks),
            rows=tuple(_row(chunk) for chunk in chunks),
            new_pages=(),
        )
        return self.graphs.propose(plan, num_drafts, choose)

    def propose(self, chunks: Sequence[Chunk], num_drafts: int, choose: Choose) -> torch.Tensor:
        """`num_drafts` tokens to follow each chunk's last one: `[D, num_drafts]` int64.

        First the rows that wait (DRAFT_EXTEND), whose last one gives the first draft; then a row a
        draft, each taking the layer's own output for a hidden state. Never synchronises.
        """
        counts = [self._waiting[_row(chunk)].count for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        hidden = self._catch_up(chunks, counts, starts, ForwardMode.DRAFT_EXTEND)
        ends = torch.tensor(counts).cumsum(0) - 1
        hidden = hidden[ends.to(self._device, non_blocking=True)]
        drafts = [choose(self._mtp.logits(hidden), 0)]
        if num_drafts > 1:
            batch = self._batch(ForwardMode.DECODE, [1] * len(chunks), starts, chunks, ahead=1)
            assert batch.seq_lens_cpu is not None, "made from host lengths"
            chain = self._chains[num_drafts - 1]
            chain.init_forward_metadata(
                replace(batch, seq_lens=batch.seq_lens - 1, seq_lens_cpu=batch.seq_lens_cpu - 1)
            )
            table, rows = self._table.req_to_token, batch.req_pool_indices
            for place, step in enumerate(chain.attn_backends):
                positions = batch.positions + place
                slots = table[rows, positions].long()
                now = replace(batch, positions=positions, out_cache_loc=slots)
                hidden = self._run(drafts[-1], hidden, now, step)
                drafts.append(choose(self._mtp.logits(hidden), place + 1))
        return torch.stack(drafts, dim=1)

    def fill(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> None:
        """Compute rows of the layer that must not wait longer: prompts', and a full store's.

        `hidden [T, hidden]` are the model's, of all rows of `chunks` in order; those of chunks with
        drafts are passed over. Run before `note`. Never synchronises.
        """
        filled, counts, ends, parts = [], [], [], []
        first_row = 0
        for chunk in chunks:
            start, first_row = first_row, first_row + chunk.num_rows
            count = self._waiting[_row(chunk)].count
            if self._keeps(chunk, count):
                continue
            pairs = count + chunk.length - 1
            if pairs:
                filled.append(chunk)
                counts.append(pairs)
                ends.append(chunk.start + chunk.length - 1)
                parts += [self._hidden[_row(chunk), :count], hidden[start : first_row - 1]]
        if filled:
            self._catch_up(filled, counts, ends, ForwardMode.EXTEND, torch.cat(parts))

    def note(self, chunks: Sequence[Chunk], hidden: torch.Tensor, accepted: Sequence[int]) -> None:
        """Store the hidden states that the next rows of the layer take; a step is over by this.

        `accepted` has one entry a chunk with drafts. Each request is told how many of its computed
        tokens the layer has still to follow.
        """
        stored: list[tuple[int, int, int]] = []
        last: list[tuple[int, int]] = []
        kept = iter(accepted)
        first_row, size = 0, self._pool.page_size
        for chunk in chunks:
            row, known = _row(chunk), self._waiting[_row(chunk)]
            if chunk.num_drafts:
                now = _Waiting(known.request_id, chunk.start + 1, next(kept) + 1)
                taken, place = range(now.count), 0
            elif self._keeps(chunk, known.count):
                now = replace(known, count=known.count + 1)
                taken, place = range(1), known.count
            else:
                now = _Waiting(known.request_id, chunk.start + chunk.length, 1)
                taken, place = range(chunk.length - 1, chunk.length), 0
            stored += [(row, place + i, first_row + j) for i, j in enumerate(taken)]
            last += [
                (_page(chunk, position, size), first_row + position - chunk.start)
                for position in range(chunk.start, now.newest)
                if position % size == size - 1
            ]
            self._waiting[row] = now
            chunk.request.num_unfollowed = now.count - 1
            first_row += chunk.num_rows
        self._store(stored, last, hidden)

    def _store(
        self,
        stored: Sequence[tuple[int, int, int]],
        last: Sequence[tuple[int, int]],
        hidden: torch.Tensor,
    ) -> None:
        row, place, source = self._to_device(stored).T
        self._hidden[row, place] = hidden[source]
        if last:
            assert self._pool.page_hidden is not None, "checked when this was made"
            page, source = self._to_device(last).T
            self._pool.page_hidden[page] = hidden[source]

    def _keeps(self, chunk: Chunk, count: int) -> bool:
        """Whether a chunk's hidden states are stored and its rows of the layer computed later."""
        alone = chunk.length == 1 and chunk.samples and count < self._capacity
        return bool(chunk.num_drafts) or (alone and count > 0)

    def _catch_up(
        self,
        chunks: Sequence[Chunk],
        counts: Sequence[int],
        ends: Sequence[int],
        mode: ForwardMode,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the next `counts` rows of the layer for each request, up to position `ends` of it.

        `hidden [sum(counts), hidden]`: by default what is stored, all of it.
        """
        tokens: list[int] = []
        for chunk, count, end in zip(chunks, counts, ends, strict=True):
            tokens += chunk.request.token_ids[end + 1 - count : end + 1]
        if hidden is None:
            places = [
                (_row(c), i) for c, count in zip(chunks, counts, strict=True) for i in range(count)
            ]
            row, place = self._to_device(places).T
            hidden = self._hidden[row, place]
        batch = self._batch(mode, counts, ends, chunks)
        self._backend.init_forward_metadata(batch)
        return self._run(self._to_device(tokens), hidden, batch, self._backend)

    def _batch(
        self,
        mode: ForwardMode,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        chunks: Sequence[Chunk],
        ahead: int = 0,
    ) -> ForwardBatch:
        return ForwardBatch.from_lengths(
            mode,
            q_lens=list(q_lens),
            kv_lens=[length + ahead for length in kv_lens],
            req_pool_indices=[_row(chunk) for chunk in chunks],
            req_to_token_pool=self._table,
            token_to_kv_pool=self._pool,
        )

    def _run(
        self, tokens: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, step: LayerForward
    ) -> torch.Tensor:
        return self._mtp.run(tokens, hidden, batch.positions, DsaStep(step, batch))

    def _to_device(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def _row(chunk: Chunk) -> int:
    assert chunk.request.row is not None, "a scheduled request has a row"
    return chunk.request.row


def _page(chunk: Chunk, position: int, page_size: int) -> int:
    assert chunk.request.lease is not None, "a scheduled request holds pages"
    return chunk.request.lease.pages[position // page_size]
