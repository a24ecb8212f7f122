"""How do log-probabilities get from the device to a request: of chosen tokens, and of its prompt?

Prompt rows are scored block by block, so that memory stays bounded however long a chunk is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from topkapi.engine.request import Request, TokenLogprob
from topkapi.engine.sampler import Logprobs, SampledTokens
from topkapi.engine.scheduler import Chunk

# Prompt rows scored at once: three fp32 numbers a vocabulary entry and row are alive.
_BLOCK_ROWS = 128


def chosen_to_host(sampled: SampledTokens, counts: Sequence[int | None]) -> list[TokenLogprob]:
    """One entry a row; `counts` is how many best tokens each row wants, None for no logprob.

    The host waits for the device.
    """
    token_ids = sampled.token_ids.tolist()
    if sampled.logprobs is None:
        return [TokenLogprob(token_id, 0.0, {}) for token_id in token_ids]
    return _to_host(token_ids, sampled.logprobs, [count or 0 for count in counts])


def note_prompt_logprobs(
    chunks: Sequence[Chunk],
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Give requests that want them the log-probabilities of prompt tokens this step has scored.

    `hidden [T, hidden]` are the flattened rows of `chunks`; `logits_of` maps rows of it to logits
    `[n, V]`. Running a chunk again adds nothing. The host waits once a block, and not at all when
    no request asks.
    """
    for chunk, first_row in _with_first_rows(chunks):
        request = chunk.request
        count = request.params.prompt_logprobs
        if count is None:
            continue
        position = len(request.prompt_logprobs)
        end = min(chunk.start + chunk.length, request.num_prompt - 1)
        assert end <= position or chunk.start <= position, "no prompt token is left out"
        while position < end:
            stop = min(position + _BLOCK_ROWS, end)
            rows = hidden[first_row + position - chunk.start : first_row + stop - chunk.start]
            request.prompt_logprobs += _score(rows, request, position, logits_of, count)
            position = stop


def _score(
    rows: torch.Tensor,
    request: Request,
    position: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    count: int,
) -> list[TokenLogprob]:
    """Of the tokens after those at `position` and on, whose hidden states are `rows`."""
    targets = request.token_ids[position + 1 : position + 1 + rows.shape[0]]
    on_device = torch.tensor(targets).to(rows.device, non_blocking=True)
    scored = Logprobs.of(logits_of(rows), on_device, count)
    return _to_host(targets, scored, [count] * len(targets))


def _with_first_rows(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, int]]:
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + chunk.num_rows)
    for chunk, (start, _) in zip(chunks, pairwise(ends), strict=True):
        yield chunk, start


def _to_host(
    token_ids: Sequence[int], logprobs: Logprobs, counts: Sequence[int]
) -> list[TokenLogprob]:
    chosen, ids, top = logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist()
    return [
        TokenLogprob(token_ids[i], chosen[i], dict(zip(ids[i][:n], top[i][:n], strict=True)))
        for i, n in enumerate(counts)
    ]
