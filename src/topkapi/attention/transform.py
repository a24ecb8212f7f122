"""Where does a selected position live, read through a page table? Knows tables only.

Page size 1 tables hold slots, others hold page numbers. -1 positions stay -1; nothing here
synchronises, so all of it may be captured.
"""

from __future__ import annotations

import torch

from topkapi.shapes import INTS, check


def decode_slots(
    page_table: torch.Tensor, positions: torch.Tensor, page_size: int = 1
) -> torch.Tensor:
    """Slots of `positions [R, K]` when row r reads row r of `page_table [R, pages]`.

    Returns `[R, K]` int32: `page_table[r, p // page_size] * page_size + p % page_size`.
    Raises `ShapeError` when the row counts differ.
    """
    sizes: dict[str, int] = {}
    check("page_table", page_table, "R *", sizes, dtypes=INTS)
    check("positions", positions, "R K", sizes, dtypes=INTS)
    safe = positions.clamp_min(0).long()
    if page_table.shape[1] == 0:
        return torch.full_like(positions, -1, dtype=torch.int32)
    slots = page_table.gather(1, safe // page_size) * page_size + safe % page_size
    return torch.where(positions < 0, -1, slots).to(torch.int32)


def prefill_slots(
    page_table: torch.Tensor,
    positions: torch.Tensor,
    request_of_row: torch.Tensor,
    page_size: int = 1,
) -> torch.Tensor:
    """Slots of `positions [R, K]` when row r reads row `request_of_row[r]` of
    `page_table [B, pages]`. Returns `[R, K]` int32; never expands the table to R rows.
    """
    sizes: dict[str, int] = {}
    check("page_table", page_table, "B *", sizes, dtypes=INTS)
    check("positions", positions, "R K", sizes, dtypes=INTS)
    check("request_of_row", request_of_row, "R", sizes, dtypes=INTS)
    if page_table.numel() == 0:
        return torch.full_like(positions, -1, dtype=torch.int32)
    safe = positions.clamp_min(0).long()
    pages = page_table[request_of_row.long()[:, None], safe // page_size]
    slots = pages * page_size + safe % page_size
    return torch.where(positions < 0, -1, slots).to(torch.int32)
