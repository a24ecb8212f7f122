"""How does a step guess several tokens, check them in one forward pass, and keep what is right?

Per step: the MTP layer catches up and drafts (`draft.Drafter`), the model runs over each request's
last token and its drafts (TARGET_VERIFY, or MIXED beside chunks of prompts), and of every request
the drafts up to the first wrong one come out, and one token after them. Two rules decide, both
defined in `reference.speculative`:

- Greedy requests, and those with a seed: a draft is right when it is the token that the request
  would have chosen at its place. The tokens are the same as without drafts.
- Sampling without a seed: by rejection. The tokens have the same distribution as without drafts,
  and more drafts are accepted.

What a refused draft left in the cache lies past the request's computed tokens, and is overwritten
before any row sees so far. Knows nothing about pages, stops or text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardMode
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.config import DsaConfig
from topkapi.engine.draft import Drafter
from topkapi.engine.draft_length import DraftLength
from topkapi.engine.graphs import Graphs, PaddedSizes, Recorder
from topkapi.engine.logprobs import chosen_to_host, note_prompt_logprobs
from topkapi.engine.request import Request, Sampled, SamplingRow
from topkapi.engine.runner import Runner
from topkapi.engine.sampler import ACCEPT, Logprobs, SampledTokens, uniform
from topkapi.engine.scheduler import Batch, Chunk
from topkapi.engine.speculation_stats import MAX_DRAFTS, SpeculationStats
from topkapi.engine.step_graphs import StepOutput
from topkapi.engine.step_plan import StepPlan
from topkapi.engine.timeline import Timeline
from topkapi.errors import ConfigError, UnsupportedModelError
from topkapi.models.decoder import compute_logits
from topkapi.models.mtp import MtpLayer, load_mtp
from topkapi.reference.speculative import accept_greedy, accept_sampled

# The stream of uniforms that chooses the token after the accepted drafts.
_AFTER = 2


@dataclass(frozen=True)
class Speculation:
    """A draft layer, and how many drafts to make with it."""

    mtp: MtpLayer
    length: DraftLength
    hidden_dtype: torch.dtype

    @property
    def cache_layers(self) -> range:
        """Layer ids that the pool must hold: the model's and the draft layer's."""
        return range(self.mtp.layer_id + 1)

    @property
    def page_hidden(self) -> tuple[int, torch.dtype]:
        """What the pool must keep with every page."""
        return self.mtp.hidden_size, self.hidden_dtype


def check_num_steps(num_steps: int | str) -> None:
    """Raise `ConfigError` unless it is 0 to 4 or `auto`."""
    whole = isinstance(num_steps, int) and not isinstance(num_steps, bool)
    if num_steps != "auto" and not (whole and 0 <= int(num_steps) <= MAX_DRAFTS):
        raise ConfigError(
            f"speculative_num_steps: expected 0 to {MAX_DRAFTS} or auto, got {num_steps!r}"
        )


def prepare_speculation(
    model: Any, config: DsaConfig, num_steps: int | Literal["auto"]
) -> Speculation | None:
    """Load the model's draft layer; None when there is nothing to draft.

    `auto` takes a model without such a layer, a number of steps does not: `UnsupportedModelError`.
    """
    if num_steps == 0:
        return None
    try:
        mtp = load_mtp(model, config)
    except UnsupportedModelError:
        if num_steps == "auto":
            return None
        raise
    adapts = num_steps == "auto"
    length = DraftLength(MAX_DRAFTS if adapts else int(num_steps), adapts=adapts)
    return Speculation(mtp, length, next(model.parameters()).dtype)


@dataclass(frozen=True)
class DraftRow(SamplingRow):
    """A draft's row of logits: the request's temperature and filters alone, and its uniform for
    output token number `place`.
    """

    place: int = 0

    @property
    def index(self) -> int:
        return self.place

    @property
    def changes_logits(self) -> bool:
        """Penalties and grammars are the verifying rows' work: a draft is but a guess."""
        return False


@dataclass(frozen=True)
class _Drafts:
    """`tokens [D, k]` int64 of D requests, each step's logits `[D, V]` (perhaps none where all
    are greedy), and the tokens on the host where some request's choice depends on them.
    """

    tokens: torch.Tensor
    logits: Sequence[torch.Tensor]
    host: Sequence[Sequence[int]] | None


class SpeculativeRunner(Runner):
    """A runner that drafts with the model's MTP layer.

    Attributes:
        length: how many drafts a step.
        stats: what came of them.
    """

    def __init__(
        self,
        model: Any,
        backend: NativeSparseAttnBackend,
        rows: ReqToTokenPool,
        pool: NSATokenToKVPool,
        speculation: Speculation,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(model, backend, rows, pool, timeline)
        self.length = speculation.length
        self.stats = SpeculationStats()
        self._drafter = Drafter(speculation.mtp, backend, rows, pool, self.length.most)

    def wanted_drafts(self, request: Request, batch_size: int) -> int:
        """Drafts that a decoding request should have in a step of about `batch_size` requests."""
        limit = request.params.max_tokens
        if limit is not None and limit - request.num_output < 2:
            return 0  # its next token is its last
        return self.length.drafts(batch_size)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sequence[Sampled]:
        """The next token of every chunk that samples, in order, a list of them for one with drafts;
        id below 0 where there is none. See the engine's `BatchRunner`.

        The host waits once, for the tokens; and once more for drafts that penalties or a grammar
        must know. A run that raises has stored nothing that a second one would trip over.
        """
        began = self._now()
        chunks = batch.chunks
        plan = StepPlan.of(chunks)
        self._map_pages(plan)
        self._drafter.begin(chunks)
        drafts = self._propose([chunk for chunk in chunks if chunk.num_drafts])
        self._timeline.end("draft")
        same = drafts is not None and all(chunk.num_drafts for chunk in chunks)
        output = self._compute(
            plan,
            drafts.tokens if drafts is not None and same else None,
            lambda: self._verify(plan, chunks, drafts),
        )
        hidden = output.hidden
        note_prompt_logprobs(chunks, hidden, lambda rows: compute_logits(self._model, rows))
        self._timeline.end("rest")
        self._drafter.fill(chunks, hidden)
        self._timeline.end("draft")
        results, accepted = self._choose(chunks, drafts, output)
        self._drafter.note(chunks, hidden, accepted)
        self._count(chunks, accepted, self._now() - began)
        return results

    def _now(self) -> float:
        """Seconds on a clock that stands still while a step is captured."""
        return time.perf_counter() - sum(kind.capture_seconds for kind in self._kinds())

    def use_graphs(
        self,
        recorder: Recorder,
        sizes: PaddedSizes,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Replay decoding and verifying steps, and rounds of drafting, from now on."""
        super().use_graphs(recorder, sizes, quiet)
        self._drafter.use_graphs(recorder, sizes, quiet)

    def _kinds(self) -> list[Graphs[Any]]:
        drafting = self._drafter.graphs
        return [*super()._kinds(), *([] if drafting is None else [drafting.graphs])]

    def _propose(self, chunks: Sequence[Chunk]) -> _Drafts | None:
        if not chunks:
            return None
        logits: list[torch.Tensor] = []

        def choose(step_logits: torch.Tensor, place: int) -> torch.Tensor:
            logits.append(step_logits)
            # A guess from NaN is as good as any: verifying refuses it.
            return self._sampler.sample(
                step_logits, _draft_rows(chunks, place)
            ).token_ids.clamp_min(0)

        greedy = all(chunk.request.params.temperature == 0 for chunk in chunks)
        count = chunks[0].num_drafts
        tokens = self._drafter.replay(chunks, count, None if greedy else choose)
        if tokens is None:
            tokens = self._drafter.propose(chunks, count, choose)
        asked = any(_reads_drafts(chunk.request) for chunk in chunks)
        return _Drafts(tokens, logits, tokens.tolist() if asked else None)

    def _verify(
        self, plan: StepPlan, chunks: Sequence[Chunk], drafts: _Drafts | None
    ) -> torch.Tensor:
        """Hidden states `[T, hidden]` of all rows, drafts in their places."""
        token_ids = self._to_device(plan.token_ids)
        mode = plan.mode
        if drafts is not None:
            ends = list(accumulate(chunk.num_rows for chunk in chunks))
            places = [
                range(end - chunk.num_drafts, end)
                for chunk, end in zip(chunks, ends, strict=True)
                if chunk.num_drafts
            ]
            token_ids[self._to_device(places).flatten()] = drafts.tokens.flatten()
            alone = all(chunk.num_drafts for chunk in chunks)
            mode = ForwardMode.TARGET_VERIFY if alone else ForwardMode.MIXED
        return self._decode(plan, mode, token_ids)

    def _choose(
        self, chunks: Sequence[Chunk], drafts: _Drafts | None, output: StepOutput
    ) -> tuple[list[Sampled], list[int]]:
        """Every sampling chunk's tokens, and how many drafts each chunk that had some accepted."""
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return [], []
        rows = _sampling_rows(sampling, drafts)
        logits, best = self._logits(output, _logit_rows(chunks))
        sampled = self._sampler.sample(logits, rows, best)
        accepted: list[int] = []
        if drafts is not None:
            sampled, counts = self._accept(sampling, rows, logits, sampled, drafts)
            tokens = chosen_to_host(sampled, [row.request.params.logprobs for row in rows])
            accepted = counts.tolist()
        else:
            tokens = chosen_to_host(sampled, [row.request.params.logprobs for row in rows])
        results: list[Sampled] = []
        kept, first = iter(accepted), 0
        for chunk in sampling:
            if chunk.num_drafts:
                results.append(tokens[first : first + next(kept) + 1])
            else:
                results.append(tokens[first])
            first += chunk.num_drafts + 1
        return results, accepted

    def _accept(
        self,
        sampling: Sequence[Chunk],
        rows: Sequence[SamplingRow],
        logits: torch.Tensor,
        sampled: SampledTokens,
        drafts: _Drafts,
    ) -> tuple[SampledTokens, torch.Tensor]:
        """The tokens of all rows after acceptance, and the drafts accepted `[D]` int64."""
        drafting = [chunk for chunk in sampling if chunk.num_drafts]
        firsts = [0, *accumulate(chunk.num_drafts + 1 for chunk in sampling)]
        first_rows = [f for chunk, f in zip(sampling, firsts, strict=False) if chunk.num_drafts]
        steps = drafts.tokens.shape[1]
        row_of = self._to_device(first_rows)[:, None] + torch.arange(steps + 1, device=self._device)
        chosen = sampled.token_ids[row_of]
        accepted = accept_greedy(drafts.tokens, chosen).num_accepted
        free = [i for i, chunk in enumerate(drafting) if _by_rejection(chunk.request)]
        if not free:
            return sampled, accepted
        places = self._to_device(free)
        at = row_of[places]
        probabilities = self._sampler.probabilities(
            logits[at.flatten()], [rows[first_rows[i] + j] for i in free for j in range(steps + 1)]
        ).view(len(free), steps + 1, -1)
        requests = [drafting[i].request for i in free]
        counts, tokens = self._reject(requests, places, drafts, probabilities, chosen[places])
        accepted = accepted.index_copy(0, places, counts)
        token_ids = sampled.token_ids.index_copy(0, at.flatten(), tokens.flatten())
        logprobs = sampled.logprobs
        if logprobs is not None:
            logprobs = Logprobs.of(logits, token_ids, logprobs.top.shape[1])
        return SampledTokens(token_ids, logprobs), accepted

    def _reject(
        self,
        requests: Sequence[Request],
        places: torch.Tensor,
        drafts: _Drafts,
        probabilities: torch.Tensor,
        chosen: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept by rejection: counts `[F]`, and tokens `[F, k + 1]`, `chosen` past the last.

        `probabilities [F, k + 1, V]` are the model's. What drafts were drawn from is computed again
        here, for these F requests alone.
        """
        steps = drafts.tokens.shape[1]
        tokens = drafts.tokens[places]
        given = torch.stack(
            [
                self._sampler.probabilities(
                    step_logits[places],
                    [DraftRow(r, place=r.num_output + place) for r in requests],
                )
                for place, step_logits in enumerate(drafts.logits)
            ],
            dim=1,
        )
        # A draft from NaN logits was token 0 for certain.
        certain = torch.zeros_like(given).scatter_(2, tokens[:, :, None], 1.0)
        given = torch.where(given.sum(dim=2, keepdim=True) > 0, given, certain)
        result = accept_sampled(
            tokens,
            probabilities,
            self._uniforms(requests, steps, ACCEPT),
            self._uniforms(requests, steps + 1, _AFTER),
            draft_probs=given,
        )
        # Where there is no token to choose, `chosen` says why.
        return result.num_accepted, torch.where(result.tokens < 0, chosen, result.tokens)

    def _uniforms(self, requests: Sequence[Request], count: int, stream: int) -> torch.Tensor:
        values = [
            [uniform(request.seed, request.num_output + place, stream) for place in range(count)]
            for request in requests
        ]
        return torch.tensor(values, dtype=torch.float64).to(self._device, non_blocking=True)

    def _count(self, chunks: Sequence[Chunk], accepted: Sequence[int], seconds: float) -> None:
        most = max((chunk.num_drafts for chunk in chunks), default=0)
        self.stats.note(most, accepted)
        decodes = all(chunk.length == 1 and chunk.start for chunk in chunks)
        if decodes and all(chunk.num_drafts == most for chunk in chunks):
            self.length.note(len(chunks), most, len(chunks) + sum(accepted), seconds)


def _by_rejection(request: Request) -> bool:
    return request.params.temperature > 0 and request.params.seed is None


def _reads_drafts(request: Request) -> bool:
    """Whether what a request may choose depends on the tokens before, drafts among them."""
    return request.params.penalises or request.grammar is not None


def _draft_rows(chunks: Sequence[Chunk], place: int) -> list[SamplingRow]:
    return [DraftRow(c.request, place=c.request.num_output + place) for c in chunks]


def _logit_rows(chunks: Sequence[Chunk]) -> list[int]:
    """The last row of each chunk that samples, and those of its drafts."""
    ends = accumulate(chunk.num_rows for chunk in chunks)
    return [
        row
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.samples
        for row in range(end - 1 - chunk.num_drafts, end)
    ]


def _sampling_rows(sampling: Sequence[Chunk], drafts: _Drafts | None) -> list[SamplingRow]:
    """One row a sampling chunk, and one more for each of its drafts."""
    rows: list[SamplingRow] = []
    number = 0
    for chunk in sampling:
        following: Sequence[int] = ()
        if chunk.num_drafts:
            assert drafts is not None, "chunks with drafts have been drafted for"
            # Where nobody reads them, only their number counts.
            following = [0] * chunk.num_drafts if drafts.host is None else drafts.host[number]
            number += 1
        rows += [
            SamplingRow(chunk.request, tuple(following[:place]))
            for place in range(chunk.num_drafts + 1)
        ]
    return rows
