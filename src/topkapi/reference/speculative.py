"""How many draft tokens of a chain are accepted, and which token follows them?

The definition of speculative acceptance: the tokens that come out are distributed as if the target
model had chosen each of them itself. Leviathan, Kalman and Matias 2023, "Fast Inference from
Transformers via Speculative Decoding", algorithm 1.

Here D is draft tokens of a request and V tokens of the vocabulary. Position j of a request's
target probabilities is what the target model gives after j accepted drafts, so there is one more
than there are drafts. A request with fewer than D drafts has `num_drafts[b]`; what stands after
them is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from topkapi.shapes import check


@dataclass(frozen=True)
class Acceptance:
    """What one round of speculation gives.

    `num_accepted [B]` int64 drafts are accepted; `tokens [B, D + 1]` int64 are they and the token
    after them, then -1. That token is itself -1 where its target probabilities are all zero.
    """

    num_accepted: torch.Tensor
    tokens: torch.Tensor


def accept_greedy(
    draft_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    num_drafts: torch.Tensor | None = None,
) -> Acceptance:
    """Accept drafts as long as they are what the target model would have chosen.

    `draft_tokens [B, D]` and `target_tokens [B, D + 1]` int64; `num_drafts [B]` int64, all D when
    None. Raises `ShapeError`. Never synchronises.
    """
    sizes: dict[str, int] = {}
    check("draft_tokens", draft_tokens, "B D", sizes)
    check("target_tokens", target_tokens, f"B {sizes['D'] + 1}", sizes)
    num_accepted = _leading(draft_tokens == target_tokens[:, :-1], num_drafts)
    following = target_tokens.gather(1, num_accepted[:, None]).squeeze(1)
    return Acceptance(num_accepted, _joined(draft_tokens, num_accepted, following))


def accept_sampled(
    draft_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    choose_uniforms: torch.Tensor,
    *,
    draft_probs: torch.Tensor | None = None,
    num_drafts: torch.Tensor | None = None,
) -> Acceptance:
    """Accept draft x with probability min(1, p(x) / q(x)); after a refusal choose from what p has
    more than q, normalised, and after the last draft from p itself.

    A greedy request is the special case of a target p that is 1 at one token.

    Args:
        draft_tokens: `[B, D]` int64.
        target_probs: p, `[B, D + 1, V]` float, rows of sum 1.
        accept_uniforms: `[B, D]` in [0, 1), one for each draft.
        choose_uniforms: `[B, D + 1]` in [0, 1), independent of the others: number j chooses the
            token after j accepted drafts.
        draft_probs: q, `[B, D, V]` float, what each draft was drawn from; None when every draft was
            certain (q is 1 at it).
        num_drafts: `[B]` int64, all D when None.

    Raises `ShapeError`. Never synchronises.
    """
    sizes: dict[str, int] = {}
    check("draft_tokens", draft_tokens, "B D", sizes)
    check("target_probs", target_probs, f"B {sizes['D'] + 1} V", sizes)
    check("accept_uniforms", accept_uniforms, "B D", sizes)
    check("choose_uniforms", choose_uniforms, f"B {sizes['D'] + 1}", sizes)
    target = target_probs.double()
    if draft_probs is None:
        # What stands after a request's last draft may be -1.
        certain = torch.zeros_like(target[:, :-1])
        draft = certain.scatter(2, draft_tokens.clamp_min(0)[:, :, None], 1.0)
    else:
        check("draft_probs", draft_probs, "B D V", sizes)
        draft = draft_probs.double()
    place = draft_tokens.clamp_min(0)[:, :, None]
    p, q = target[:, :-1].gather(2, place), draft.gather(2, place)
    accepted = accept_uniforms.double()[:, :, None] * q < p
    num_accepted = _leading(accepted.squeeze(2), num_drafts)
    rest = _rest(target, draft, num_accepted, num_drafts)
    following = _choose(rest, choose_uniforms.gather(1, num_accepted[:, None]))
    return Acceptance(num_accepted, _joined(draft_tokens, num_accepted, following))


def _leading(accepted: torch.Tensor, num_drafts: torch.Tensor | None) -> torch.Tensor:
    """How many of each row of `accepted [B, D]` hold before the first that does not: `[B]`."""
    if num_drafts is not None:
        place = torch.arange(accepted.shape[1], device=accepted.device)
        accepted = accepted & (place < num_drafts[:, None])
    return accepted.long().cumprod(dim=1).sum(dim=1)


def _rest(
    target: torch.Tensor,
    draft: torch.Tensor,
    num_accepted: torch.Tensor,
    num_drafts: torch.Tensor | None,
) -> torch.Tensor:
    """What the token after the accepted drafts is drawn from: `[B, V]`, of any sum.

    `max(p - q, 0)` where a draft was refused. Should rounding leave nothing of it, p.
    """
    batch, drafts, _ = draft.shape
    row = torch.arange(batch, device=target.device)
    p = target[row, num_accepted]
    if drafts == 0:
        return p
    last = drafts if num_drafts is None else num_drafts
    refused = (num_accepted < last)[:, None]
    q = draft[row, num_accepted.clamp_max(drafts - 1)]
    more = (p - q).clamp_min(0.0)
    return torch.where(refused & (more.sum(dim=1, keepdim=True) > 0), more, p)


def _choose(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token whose share of the running sum holds `uniform * total`: `[B]` int64, -1 for none.

    `weights [B, V]` fp64, `uniforms [B, 1]`. A token of weight 0 is never chosen.
    """
    running = weights.cumsum(dim=1)
    total = running[:, -1:]
    # Just below the total, the search stays within the last token that has any weight.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms.double() * total, below)
    chosen = torch.searchsorted(running, target, right=True)
    return torch.where(total > 0, chosen, -1).squeeze(1)


def _joined(
    draft_tokens: torch.Tensor, num_accepted: torch.Tensor, following: torch.Tensor
) -> torch.Tensor:
    """The accepted drafts, the token after them, then -1: `[B, D + 1]`."""
    batch, drafts = draft_tokens.shape
    place = torch.arange(drafts + 1, device=draft_tokens.device)
    tokens = torch.cat([draft_tokens, draft_tokens.new_zeros(batch, 1)], dim=1)
    tokens = tokens.masked_fill(place > num_accepted[:, None], -1)
    return torch.where(place == num_accepted[:, None], following[:, None], tokens)
