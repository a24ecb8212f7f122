"""Which tokens may a row choose at all? Grammar and minimum length, as one bitmask for the batch.

Masks are made on the host, one bit a token, sent in one copy and applied in one go. Rows that may
choose anything have none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from topkapi.engine.grammar import Bitmask, Grammar
from topkapi.engine.request import SamplingRow


def mask_(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set what `rows` may not choose to -inf in `logits [R, V]`. Never synchronises."""
    places = [place for place, row in enumerate(rows) if row.request.grammar or row.must_go_on]
    if not places:
        return
    bitmask = allowed_tokens([rows[place] for place in places], logits.shape[1])
    words = torch.from_numpy(bitmask).to(logits.device, non_blocking=True)
    index = torch.tensor(places).to(logits.device, non_blocking=True)
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> bit) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[index] = logits[index].masked_fill(~allowed, float("-inf"))


def allowed_tokens(rows: Sequence[SamplingRow], vocab_size: int) -> Bitmask:
    """`[len(rows), ceil(vocab_size / 32)]` int32: bit i of word w is token 32 w + i.

    Where nothing but the request's end is allowed, its minimum length gives way.
    """
    bitmask = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)
    if vocab_size % 32:
        bitmask[:, -1] = (1 << vocab_size % 32) - 1
    _constrain(bitmask, rows)
    for words, row in zip(bitmask.view(np.uint32), rows, strict=True):
        if not row.must_go_on:
            continue
        ids = np.array(row.request.end_token_ids, dtype=np.int64)
        before = words.copy()
        np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
        if not words.any():
            words[:] = before
    return bitmask


def _constrain(bitmask: Bitmask, rows: Sequence[SamplingRow]) -> None:
    """Write the masks of rows with a grammar; ids that its tokenizer lacks are not allowed."""
    plain: list[int] = []
    grammars: list[Grammar] = []
    for place, row in enumerate(rows):
        grammar = row.request.grammar
        if grammar is None:
            continue
        if not row.drafts:
            plain.append(place)
            grammars.append(grammar)
            continue
        filled = np.zeros(grammar.num_words, dtype=np.int32)
        # A draft that is not allowed is refused, and what would follow it never asked for.
        if grammar.mask_after(row.drafts, filled):
            _put(bitmask, [place], filled[None])
    if grammars:
        filled = np.zeros((len(grammars), grammars[0].num_words), dtype=np.int32)
        Grammar.fill(grammars, filled)
        _put(bitmask, plain, filled)


def _put(bitmask: Bitmask, places: Sequence[int], filled: Bitmask) -> None:
    width = min(bitmask.shape[1], filled.shape[1])
    bitmask[places] = 0
    bitmask[places, :width] = filled[:, :width]
