"""Draws a batch of each mode with its metadata, for docs/backend.md.

`python tests/attention/drawn_tables.py` rewrites the tables there; a test holds them to it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from attention.world import CONFIG
from topkapi.attention import ForwardBatch, ForwardMode, NativeSparseAttnBackend
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool

DOCUMENT = Path(__file__).parents[2] / "docs" / "backend.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
PAGE_SIZE, TOPK = 4, 4


@dataclass(frozen=True)
class Drawing:
    """A batch worth drawing: new tokens and kv lengths of its requests."""

    title: str
    mode: ForwardMode
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    padding: int = 0


DRAWINGS = (
    Drawing("EXTEND without prefix", ForwardMode.EXTEND, (3, 2), (3, 2)),
    Drawing("EXTEND with prefix", ForwardMode.EXTEND, (2, 3), (7, 3)),
    Drawing("MIXED: a chunk, and a request that decodes", ForwardMode.MIXED, (3, 1), (6, 9)),
    Drawing("DECODE, padded to 3 rows", ForwardMode.DECODE, (1, 1), (5, 9), padding=1),
    Drawing("IDLE", ForwardMode.IDLE, (), ()),
    Drawing("TARGET_VERIFY of 3 draft tokens", ForwardMode.TARGET_VERIFY, (3, 3), (8, 5)),
    Drawing("DRAFT_EXTEND after accepting 1 and 3", ForwardMode.DRAFT_EXTEND, (1, 3), (6, 5)),
    Drawing("DRAFT_EXTEND_V2 of 3 tokens", ForwardMode.DRAFT_EXTEND_V2, (3, 3), (8, 5)),
)


def drawn(drawing: Drawing) -> str:
    """One batch and its metadata as text."""
    table = ReqToTokenPool(4, 12)
    rows = table.alloc(len(drawing.q_lens))
    for row in rows:
        # Request row r owns pages 3 - r, 6 - r, 9 - r: slots do not follow positions.
        pages = torch.tensor([3 - row, 6 - row, 9 - row])
        slots = pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
        table.req_to_token[row] = slots.flatten().int()
    config = replace(CONFIG, index_topk=TOPK)
    pool = NSATokenToKVPool(config, 10, page_size=PAGE_SIZE)
    backend = NativeSparseAttnBackend(config, req_to_token_pool=table, token_to_kv_pool=pool)
    batch = ForwardBatch.from_lengths(
        drawing.mode, drawing.q_lens, drawing.kv_lens, rows, table, pool
    )
    padding = torch.zeros(drawing.padding, dtype=torch.int64)
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, padding))
    backend.init_forward_metadata(batch)
    return "\n".join([f"**{drawing.title}**", "", "```text", *_lines(backend, batch), "```", ""])


def _lines(backend: NativeSparseAttnBackend, batch: ForwardBatch) -> list[str]:
    step = backend.metadata
    fields = [
        ("seq_lens (given)", batch.seq_lens),
        ("cache_seqlens_int32", step.cache_seqlens_int32),
        ("cu_seqlens_q", step.cu_seqlens_q),
        ("cu_seqlens_k", step.cu_seqlens_k),
        ("nsa_cu_seqlens_k", step.nsa_cu_seqlens_k),
        ("page_table_1", step.page_table_1),
        ("real_page_table", step.real_page_table),
    ]
    lines = [f"{name:<22}{value.tolist()}" for name, value in fields]
    lines += ["", "row   request   position   sees   selects   writes slot"]
    position = batch.positions.tolist()
    for row in range(step.num_rows):
        live = row < len(position)
        cells = (
            row,
            int(step.buffers.request_of_row[row]) if live else "-",
            position[row] if live else "-",
            int(step.nsa_seqlens_expanded[row]),
            int(step.nsa_cache_seqlens_int32[row]),
            int(batch.out_cache_loc[row]),
        )
        lines.append("{:<6}{:<10}{:<11}{:<7}{:<10}{}".format(*cells))
    return lines


def all_drawn() -> str:
    """Every table, as it stands between the marks of the document."""
    return "\n".join(drawn(drawing) for drawing in DRAWINGS)


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(before + BEGIN + "\n" + all_drawn() + "\n" + END + after)
