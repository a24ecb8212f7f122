"""What one forward pass computes, in whole numbers alone.

A `StepPlan` is all that a rank must know to run the same step as every other rank: no requests, no
sampling, no tensors. It travels as one vector of int64, so nothing is unpickled from the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topkapi.attention.forward_batch import ForwardMode
from topkapi.engine.scheduler import Chunk


@dataclass(frozen=True)
class StepPlan:
    """One step over B requests and T new tokens.

    Attributes:
        token_ids: the T new tokens, request after request.
        q_lens, kv_lens, rows: per request, its new tokens, its tokens with them, and its row of the
            request-to-token table.
        new_pages: `(row, place, page)` of every page that no finished step has mapped.
    """

    token_ids: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    rows: tuple[int, ...]
    new_pages: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> StepPlan:
        """The step that computes `chunks`."""
        return cls(
            token_ids=tuple(
                token
                for chunk in chunks
                for token in (
                    *chunk.request.token_ids[chunk.start : chunk.start + chunk.length],
                    *(0,) * chunk.num_drafts,
                )
            ),
            q_lens=tuple(chunk.num_rows for chunk in chunks),
            kv_lens=tuple(chunk.start + chunk.num_rows for chunk in chunks),
            rows=tuple(_row(chunk) for chunk in chunks),
            new_pages=tuple(
                (_row(chunk), chunk.first_new_page + place, page)
                for chunk in chunks
                for place, page in enumerate(chunk.new_pages)
            ),
        )

    @property
    def mode(self) -> ForwardMode:
        """One new token each is a decode, whether it continues a prompt or an answer."""
        single = [length == 1 for length in self.q_lens]
        if all(single):
            return ForwardMode.DECODE
        return ForwardMode.MIXED if any(single) else ForwardMode.EXTEND

    def to_ints(self) -> list[int]:
        """Three counts, then every field in order."""
        pages = [number for page in self.new_pages for number in page]
        counts = [len(self.token_ids), len(self.rows), len(self.new_pages)]
        return [*counts, *self.token_ids, *self.q_lens, *self.kv_lens, *self.rows, *pages]

    @classmethod
    def from_ints(cls, numbers: Sequence[int]) -> StepPlan:
        """Undo `to_ints`; numbers past the plan's own are not read."""
        tokens, requests, pages = numbers[:3]
        fields: list[tuple[int, ...]] = []
        start = 3
        for count in (tokens, requests, requests, requests, 3 * pages):
            fields.append(tuple(numbers[start : start + count]))
            start += count
        flat = fields[4]
        triples = tuple(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        return cls(fields[0], fields[1], fields[2], fields[3], triples)


def _row(chunk: Chunk) -> int:
    assert chunk.request.row is not None, "a scheduled request has a row"
    return chunk.request.row
