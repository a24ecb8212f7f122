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

from topkapi.engine.request import SamplingParams

# Whole-number weight of a row's most probable token: 2^40 keeps sums below 2^63 for any vocabulary
# up to 8 million tokens, and drops tokens 10^-12 times less probable than the best one.
_WEIGHT_ONE = float(2**40)
_MASK = 2**64 - 1


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling choices of B rows: tensors on the device, and what the host knows of them.

    `columns [5, B]` float64: temperature, top_k, top_p, min_p, uniform. Flags say which parts of
    the work some row needs; `num_logprobs` is None when no row asks.
    """

    columns: torch.Tensor
    samples: bool
    sorts: bool
    has_min_p: bool
    num_logprobs: int | None

    @classmethod
    def build(
        cls, rows: Sequence[tuple[SamplingParams, int, int]], device: torch.device
    ) -> SamplingBatch:
        """From each row's `(params, seed, index of the token to be chosen)`. One copy to device."""
        columns = np.array(
            [
                (p.temperature, p.top_k, p.top_p, p.min_p, uniform(seed, index))
                for p, seed, index in rows
            ],
            dtype=np.float64,
        ).T
        sampled = [params for params, _, _ in rows if params.temperature > 0]
        asked = [params.logprobs for params, _, _ in rows if params.logprobs is not None]
        return cls(
            columns=torch.from_numpy(np.ascontiguousarray(columns)).to(device),
            samples=bool(sampled),
            sorts=any(params.top_k or params.top_p < 1 for params in sampled),
            has_min_p=any(params.min_p > 0 for params in sampled),
            num_logprobs=max(asked) if asked else None,
        )


@dataclass(frozen=True)
class SampledTokens:
    """The chosen tokens, still on the device.

    `token_ids [B]` int64, -1 where a row's logits held NaN. With `n = num_logprobs`:
    `logprobs [B]` fp32 of the chosen ones, `top_ids [B, n]` int64 and `top_logprobs [B, n]` fp32.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), the same for the same `(seed, index)`.

    SplitMix64 (Steele, Lea and Flood 2014): the mix of a counter that starts at the mixed seed.
    """
    return (_mix(_mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    """Choose one token for each row of `logits [B, V]` (any float dtype). Never synchronises."""
    logits = logits.float()
    best = logits.amax(dim=-1, keepdim=True)
    token_ids = logits.argmax(dim=-1)
    if batch.samples:
        sampled = _draw(_weights(logits - best, batch), batch.columns[4])
        token_ids = torch.where(batch.columns[0] > 0, sampled, token_ids)
    token_ids = torch.where(best.squeeze(-1).isnan(), -1, token_ids)
    if batch.num_logprobs is None:
        return SampledTokens(token_ids)
    log_probs = logits.log_softmax(dim=-1)
    chosen = log_probs.gather(-1, token_ids.clamp_min(0)[:, None]).squeeze(-1)
    count = min(batch.num_logprobs, logits.shape[-1])
    top_logprobs, top_ids = log_probs.topk(count, dim=-1)
    return SampledTokens(token_ids, chosen, top_ids, top_logprobs)


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
