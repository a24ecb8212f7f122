"""How do the tokens a request has already seen change the logits of its next one?

Counts stay on the device from step to step: only tokens that are new since the last step are sent,
each once, whether a step before failed, was preempted or accepted several tokens. Knows nothing
about probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from topkapi.engine.request import Request, SamplingRow


@dataclass(eq=False)
class _Noted:
    """Where a request's counts are, and how many of its tokens are in them."""

    slot: int
    num_tokens: int = 0


class Penalties:
    """Repetition, frequency and presence penalties of a changing set of requests.

    Keeps 5 bytes a vocabulary entry for every request that asks for penalties, as long as the
    request itself is alive.
    """

    def __init__(self) -> None:
        self._noted: WeakKeyDictionary[Request, _Noted] = WeakKeyDictionary()
        self._counts = torch.empty(0, 0, dtype=torch.int32)  # [slots, V] of the output
        self._in_prompt = torch.empty(0, 0, dtype=torch.bool)  # [slots, V]

    def apply_(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Change `logits [R, V]` fp32 in place where `rows` ask for it. Never synchronises."""
        places = [place for place, row in enumerate(rows) if row.request.params.penalises]
        if not places:
            return
        device = logits.device
        self._note(list(dict.fromkeys(rows[place].request for place in places)), logits)
        slots = [self._noted[rows[place].request].slot for place in places]
        index = torch.tensor([places, slots]).to(device, non_blocking=True)
        counts = self._counts[index[1]]
        drafts = [(i, token) for i, place in enumerate(places) for token in rows[place].drafts]
        if drafts:
            _count(counts, torch.tensor(drafts).to(device, non_blocking=True).T)
        seen = self._in_prompt[index[1]] | (counts > 0)
        params = [rows[place].request.params for place in places]
        strengths = torch.tensor(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        ).to(device, non_blocking=True)
        logits[index[0]] = _penalised(logits[index[0]], counts, seen, strengths)

    def _note(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        """Bring the counts of `requests` up to date with their tokens."""
        self._place([request for request in requests if request not in self._noted], logits)
        prompt: list[tuple[int, int]] = []
        output: list[tuple[int, int]] = []
        for request in requests:
            noted = self._noted[request]
            border = max(noted.num_tokens, request.num_prompt)
            prompt += [(noted.slot, t) for t in request.token_ids[noted.num_tokens : border]]
            output += [(noted.slot, t) for t in request.token_ids[border:]]
        if prompt:
            slot, token = torch.tensor(prompt).to(logits.device, non_blocking=True).T
            seen = torch.ones_like(token, dtype=torch.bool)
            self._in_prompt.index_put_((slot, token), seen)
        if output:
            _count(self._counts, torch.tensor(output).to(logits.device, non_blocking=True).T)
        # Last, so that a step that failed here counts again and not twice.
        for request in requests:
            self._noted[request].num_tokens = request.num_tokens

    def _place(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        """Give each new request an empty slot."""
        if not requests:
            return
        taken = {noted.slot for noted in self._noted.values()}
        free = [slot for slot in range(len(taken) + len(requests)) if slot not in taken]
        slots = free[: len(requests)]
        self._grow(max(slots) + 1, logits)
        index = torch.tensor(slots).to(logits.device, non_blocking=True)
        # Not `[index] = 0`: a number that is assigned is copied to the device, and waited for.
        self._counts.index_fill_(0, index, 0)
        self._in_prompt.index_fill_(0, index, False)
        for request, slot in zip(requests, slots, strict=True):
            self._noted[request] = _Noted(slot)

    def _grow(self, num_slots: int, logits: torch.Tensor) -> None:
        old = self._counts.shape[0]
        if num_slots <= old:
            return
        shape = (max(num_slots, 2 * old), logits.shape[1])
        counts = torch.zeros(shape, dtype=torch.int32, device=logits.device)
        in_prompt = torch.zeros(shape, dtype=torch.bool, device=logits.device)
        if old:
            counts[:old], in_prompt[:old] = self._counts, self._in_prompt
        self._counts, self._in_prompt = counts, in_prompt


def _count(counts: torch.Tensor, pairs: torch.Tensor) -> None:
    """Add one to `counts [N, V]` at every `pairs [2, M]` (row, token), as often as it is there.

    By `scatter_add_`: an accumulating `index_put_` may check its indices on the host.
    """
    ones = torch.ones(pairs.shape[1], dtype=counts.dtype, device=counts.device)
    counts.view(-1).scatter_add_(0, pairs[0] * counts.shape[1] + pairs[1], ones)


def _penalised(
    logits: torch.Tensor, counts: torch.Tensor, seen: torch.Tensor, strengths: torch.Tensor
) -> torch.Tensor:
    """`logits [P, V]` after penalties; `strengths [P, 3]` are repetition, frequency, presence.

    Repetition as in Keskar et al. 2019 (CTRL) with the sign rule of Transformers; the other two as
    the OpenAI interface defines them.
    """
    repetition, frequency, presence = strengths.T[:, :, None].unbind()
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    logits = logits - frequency * counts
    return logits - presence * (counts > 0)
