"""Contexts of a batch from query and kv lengths, paged in a shuffled order or contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch

from topkapi.context import Context

Addressing = Literal["table", "starts"]


def make_context(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    padded_rows: int = 0,
    addressing: Addressing = "table",
    page_size: int = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Context, int]:
    """A `Context` and the number of slots (a multiple of `page_size`) that its cache needs.

    Slot 0's page is never used by a request. Paged requests own shuffled pages, and the table is
    wider than any context, with an out-of-range slot in every entry that must not be read.
    """
    requests = len(q_lens)
    lengths = [n - q + j + 1 for q, n in zip(q_lens, kv_lens, strict=True) for j in range(q)]
    owners = [b for b, q in enumerate(q_lens) for _ in range(q)]
    lengths += [0] * padded_rows
    owners += [0] * padded_rows
    pages = [-(-n // page_size) for n in kv_lens]
    num_slots = (1 + sum(pages)) * page_size
    first_page = [1, *accumulate(pages, initial=1)][1:]
    table = table_rows = starts = None
    if addressing == "table":
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(sum(pages), generator=generator) + 1
        table = torch.full((requests + 2, max(kv_lens, default=0) + 5), 2**31 - 1).int()
        table_rows = torch.arange(requests).flip(0) + 1
        for b, n in enumerate(kv_lens):
            own = order[first_page[b] - 1 : first_page[b] - 1 + pages[b]]
            slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()[:n]
            table[table_rows[b], :n] = slots.int()
        table, table_rows = table.to(device), table_rows.to(device)
    else:
        starts = torch.tensor([page * page_size for page in first_page[:requests]]).long()
        starts = starts.to(device)
    context = Context(
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        request_of_row=torch.tensor(owners, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device),
        max_length=max(lengths, default=0),
        max_seq_len_q=max(q_lens, default=0),
        table=table,
        table_rows=table_rows,
        starts=starts,
        page_size=page_size if addressing == "table" else 1,
    )
    return context, num_slots
