"""Which cached tokens each query row may see.

`Context` is the one typed value that carries a batch's lengths and addresses from the metadata
builder down to the kernels. It knows nothing about forward modes, layers or caches' contents.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Context:
    """The visible context of R query rows that belong to B requests.

    Rows of one request are contiguous: request b owns rows `cu_seqlens_q[b]:cu_seqlens_q[b+1]`.
    Rows past `cu_seqlens_q[B]` are padding: their length is 0 and they see nothing.
    Row r sees positions `0 <= p < lengths[r]` of its request, and position p lives in slot

        table[table_rows[request_of_row[r]], p]      when `table` is given (paged)
        starts[request_of_row[r]] + p                otherwise (contiguous)

    Attributes:
        lengths: `[R]` int32, tokens row r may see, itself included; 0 for an inert row.
        request_of_row: `[R]` int32 in `0..B-1`; any valid value for an inert row.
        cu_seqlens_q: `[B+1]` int32.
        max_length: host bound on every entry of `lengths`; kernels size grids by it, no sync.
        max_seq_len_q: host bound on the rows of one request.
        table: `[requests, max_context]` int32 request-to-token table, or None.
        table_rows: `[B]` int64, each request's row of `table`.
        starts: `[B]` int64, slot of each request's position 0 when there is no table.
        page_size: the table is made of whole pages of this many tokens: position p lies at offset
            `p % page_size` of a page that begins at a multiple of it. 1 promises nothing.
    """

    lengths: torch.Tensor
    request_of_row: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_length: int
    max_seq_len_q: int
    table: torch.Tensor | None = None
    table_rows: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    page_size: int = 1

    @property
    def num_rows(self) -> int:
        """R, padding included."""
        return self.lengths.shape[0]

    @property
    def num_requests(self) -> int:
        """B."""
        return self.cu_seqlens_q.shape[0] - 1

    def contiguous(self) -> Context:
        """The same, its tensors as kernels read them: one value of a vector, and of a row of
        `table`, after the other. Itself where nothing has to be copied.
        """
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        copies: dict[str, Any] = {
            name: value.contiguous()
            for name, value in tensors.items()
            if isinstance(value, torch.Tensor) and value.shape[-1] > 1 and value.stride(-1) != 1
        }
        return replace(self, **copies) if copies else self

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Map `positions [R, N]` (any int, -1 = none) to slots `[R, N]` int32, -1 kept.

        Plain torch on the tensors' own device; safe inside capture. Positions are trusted to be
        inside the row's context.
        """
        if self.num_requests == 0:
            return torch.full_like(positions, -1, dtype=torch.int32)
        request = self.request_of_row.long()[:, None]
        if self.table is None:
            assert self.starts is not None, "a Context has a table or starts"
            slots = self.starts[request] + positions
        else:
            assert self.table_rows is not None, "a table comes with table_rows"
            safe = positions.clamp_min(0).long()
            slots = self.table[self.table_rows[request], safe]
        return torch.where(positions < 0, -1, slots).to(torch.int32)
