"""Which token comes next, for every row of a batch at once?

Randomness is one number in [0, 1) a row, hashed on the host from the request's seed and the place
of the token, so that a request's choice depends neither on the batch nor on a generator's state.
Probabilities become whole numbers before they are summed, so that a running sum is exact: the same
in any order of summation, on any device. Knows nothing about requests' text or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from topkapi.engine.penalties import Penalties
from topkapi.engine.request import SamplingRow
from topkapi.engine.token_mask import mask_

# In place of a token id: the row's logits held NaN or infinity, or nothing was allowed.
NOT_FINITE = -1
NOTHING_ALLOWED = -2

# Independent streams of uniforms: the choice of a token, and whether its draft is accepted.
CHOOSE = 0
ACCEPT = 1

# Whole-number weight of a row's most probable token: 2^40 keeps sums below 2^63 for any vocabulary
# up to 8 million tokens, and drops tokens 10^-12 times less probable than the best one.
_WEIGHT_ONE = float(2**40)
_MASK = 2**64 - 1


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling choices of R rows: tensors on the device, and what the host knows of them.

    `columns [5, R]` float64: temperature, top_k, top_p, min_p, uniform. Flags say which parts of
    the work some row needs; `num_logprobs` is None when no row asks.
    """

    columns: torch.Tensor
    samples: bool
    sorts: bool
    has_min_p: bool
    num_logprobs: int | None

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> SamplingBatch:
        """One copy to the device."""
        params = [row.request.params for row in rows]
        columns = np.array(
            [
                (p.temperature, p.top_k, p.top_p, p.min_p, uniform(row.request.seed, row.index))
                for p, row in zip(params, rows, strict=True)
            ],
            dtype=np.float64,
        ).T
        sampled = [item for item in params if item.temperature > 0]
        asked = [item.logprobs for item in params if item.logprobs is not None]
        return cls(
            columns=torch.from_numpy(np.ascontiguousarray(columns)).to(device, non_blocking=True),
            samples=bool(sampled),
            sorts=any(item.top_k or item.top_p < 1 for item in sampled),
            has_min_p=any(item.min_p > 0 for item in sampled),
            num_logprobs=max(asked) if asked else None,
        )


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities, on the device.

    `chosen [R]` fp32 of given tokens; `top_ids [R, n]` int64 and `top [R, n]` fp32 of the n best.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
        """From `logits [R, V]` (any float dtype) and `token_ids [R]` int64, negative for none."""
        log_probs = logits.float().log_softmax(dim=-1)
        chosen = log_probs.gather(-1, token_ids.clamp_min(0)[:, None]).squeeze(-1)
        top, top_ids = log_probs.topk(min(count, logits.shape[-1]), dim=-1)
        return cls(chosen, top_ids, top)


@dataclass(frozen=True)
class SampledTokens:
    """The chosen tokens, still on the device.

    `token_ids [R]` int64: `NOT_FINITE` where a row's logits held NaN or infinity,
    `NOTHING_ALLOWED` where no token was left. `logprobs` is None when no row asks.
    """

    token_ids: torch.Tensor
    logprobs: Logprobs | None = None


class Sampler:
    """Chooses tokens for requests that come and go; keeps their token counts on the device."""

    def __init__(self) -> None:
        self._penalties = Penalties()

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        best: torch.Tensor | None = None,
    ) -> SampledTokens:
        """Choose one token for each row of `logits [R, V]` (any float dtype). Never synchronises.

        Log-probabilities are the model's own, before anything below changes them. `best [R]` are
        the logits' `best_tokens`, where they are known: greedy rows may need nothing else.
        """
        if best is not None and not any(_reads_logits(row) for row in rows):
            return SampledTokens(best)
        batch = SamplingBatch.build(rows, logits.device)
        adjusted = self._adjust(logits, rows)
        highest = adjusted.amax(dim=-1, keepdim=True)
        token_ids = adjusted.argmax(dim=-1)
        if batch.samples:
            sampled = _draw(_weights(adjusted - highest, batch), batch.columns[4])
            token_ids = torch.where(batch.columns[0] > 0, sampled, token_ids)
        token_ids = _if_any(token_ids, highest.squeeze(-1))
        if batch.num_logprobs is None:
            return SampledTokens(token_ids)
        return SampledTokens(token_ids, Logprobs.of(logits, token_ids, batch.num_logprobs))

    def probabilities(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """What `sample` draws from: `[R, V]` fp32, each row's sum 1. Never synchronises.

        After penalties, bias, allowed tokens, temperature, top_k, top_p and min_p; all on one token
        for greedy rows. All zeros where `sample` would give no token. Speculation verifies drafts
        against these.
        """
        batch = SamplingBatch.build(rows, logits.device)
        adjusted = self._adjust(logits, rows)
        best = adjusted.amax(dim=-1, keepdim=True)
        chosen = adjusted.argmax(dim=-1, keepdim=True)
        probabilities = torch.zeros_like(adjusted).scatter_(-1, chosen, 1.0)
        if batch.samples:
            weights = _weights(adjusted - best, batch)
            shares = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1)
            probabilities = torch.where(batch.columns[0][:, None] > 0, shares, probabilities)
        return probabilities.masked_fill(~best.isfinite(), 0.0)

    def _adjust(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Logits `[R, V]` fp32 after penalties, bias and masks; the given ones stay as they are."""
        adjusted = logits.float()
        if not any(row.changes_logits for row in rows):
            return adjusted
        if adjusted is logits:
            adjusted = logits.clone()
        self._penalties.apply_(adjusted, rows)
        _bias_(adjusted, rows)
        mask_(adjusted, rows)
        return adjusted


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """`[R]` int64, what a greedy row of `logits [R, V]` is given when nothing changes it. No sync;
    capture-safe.
    """
    logits = logits.float()
    return _if_any(logits.argmax(dim=-1), logits.amax(dim=-1))


def _if_any(token_ids: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """`token_ids [R]`, or why there is none, as the highest logit `[R]` says."""
    token_ids = torch.where(highest.isneginf(), NOTHING_ALLOWED, token_ids)
    return torch.where(highest.isnan() | highest.isposinf(), NOT_FINITE, token_ids)


def _reads_logits(row: SamplingRow) -> bool:
    """Whether a row needs more than the token with the highest logit."""
    params = row.request.params
    return params.temperature > 0 or params.logprobs is not None or row.changes_logits


def _bias_(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Add every row's `logit_bias` to `logits [R, V]` in place."""
    found = [(i, *pair) for i, row in enumerate(rows) for pair in row.request.params.bias]
    if not found:
        return
    # fp64 holds every row and token id. No pair occurs twice, so nothing has to accumulate.
    found_there = torch.tensor(found, dtype=torch.float64).to(logits.device, non_blocking=True)
    row, token, bias = found_there.T
    at = row.long(), token.long()
    logits[at] = logits[at] + bias.to(logits.dtype)


def uniform(seed: int, index: int, stream: int = CHOOSE) -> float:
    """A number in [0, 1), the same for the same `(seed, index, stream)`.

    SplitMix64 (Steele, Lea and Flood 2014): the mix of a counter that starts at the mixed seed.
    """
    start = _mix(seed) + stream * 0xD6E8FEB86659FD93
    return (_mix(start + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _weights(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Whole-number weights `[B, V]` int64 of the tokens that temperature and filters keep.

    `logits` have each row's maximum subtracted, so that no temperature overflows. Greedy rows pass
    through with temperature 1.
    """
    temperature, top_k, top_p, min_p, _ = batch.columns
    temperature = torch.where(temperature > 0, temperature.clamp_min(1e-6), 1.0).float()
    relative = (logits / temperature[:, None]).exp()
    weights = (relative * _WEIGHT_ONE).nan_to_num(0.0).long()
    if batch.sorts:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(weights.shape[-1], device=weights.device)
        limit = torch.where(top_k > 0, top_k, weights.shape[-1])
        ordered = ordered.masked_fill(rank >= limit[:, None], 0)
        total = ordered.sum(dim=-1, keepdim=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= top_p[:, None] * total, 0)
        weights = torch.zeros_like(weights).scatter_(-1, order, ordered)
    if batch.has_min_p:
        weights = weights.masked_fill(weights < min_p[:, None] * _WEIGHT_ONE, 0)
    return weights


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token whose share of the running sum holds `uniform * total`: `[B]` int64.

    A token of weight 0 spans nothing and is never chosen.
    """
    running = weights.cumsum(dim=-1)
    total = running[:, -1]
    target = torch.minimum((uniforms * total).long(), total - 1)
    token_ids = torch.searchsorted(running, target[:, None], right=True).squeeze(-1)
    return token_ids.clamp_max(weights.shape[-1] - 1)
