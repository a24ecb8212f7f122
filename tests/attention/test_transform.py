"""Do the ways of addressing a selection agree, whatever the logits hold outside a row's range?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from attention.world import CONFIG, World
from topkapi.attention import ForwardMode, NSAIndexerMetadata
from topkapi.attention.transform import decode_slots, prefill_slots
from topkapi.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Case:
    """One batch and a k; logits come from few values, so that they tie."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    topk: int
    padded: int = 0
    page_size: int = 64


CASES = (
    Case("decode", (1, 1, 1), (63, 65, 1), 8),
    Case("prefill", (5, 1, 70), (69, 7, 70), 8),
    Case("k over every length", (3, 2), (5, 9), 20),
    Case("padding", (1, 2), (30, 64), 8, padded=3),
    Case("all padding", (), (), 8, padded=2),
    Case("pages of 16", (2, 4), (33, 17), 8, page_size=16),
)


def make(case: Case) -> tuple[World, NSAIndexerMetadata, torch.Tensor]:
    world = World(page_size=case.page_size)
    batch = world.batch(ForwardMode.EXTEND, case.q_lens, case.kv_lens)
    padding = torch.zeros(case.padded, dtype=torch.int64)
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, padding))
    world.backend.init_forward_metadata(batch)
    metadata = NSAIndexerMetadata(world.backend.metadata)
    draw = torch.Generator().manual_seed(len(case.name))
    shape = (metadata.attn_metadata.num_rows, max(case.kv_lens, default=1))
    return world, metadata, torch.randint(-2, 3, shape, generator=draw).float()


def garbage_outside(logits: torch.Tensor, lengths: torch.Tensor, value: float) -> torch.Tensor:
    outside = torch.arange(logits.shape[1]) >= lengths[:, None]
    return logits.masked_fill(outside, value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_fused_is_unfused_through_either_page_table(case: Case, value: float) -> None:
    world, fused, logits = make(case)
    logits = garbage_outside(logits, fused.get_seqlens_expanded(), value)
    slots = fused.topk_transform(logits, case.topk)
    unfused = NSAIndexerMetadata(fused.attn_metadata, "unfused")
    positions = unfused.topk_transform(logits, case.topk)
    assert slots.shape == positions.shape == (logits.shape[0], case.topk)
    for page_size in (1, case.page_size):
        assert torch.equal(unfused.map_positions(positions, page_size), slots)
    for row, length in enumerate(fused.get_seqlens_expanded().tolist()):
        ranked = sorted(range(length), key=lambda p: (-float(logits[row, p]), p))
        best = sorted(ranked[: case.topk])
        assert positions[row].tolist() == best + [-1] * (case.topk - len(best))
    for row in range(logits.shape[0] - case.padded):
        request = int(fused.context.request_of_row[row])
        table = world.table.req_to_token[world.rows[request]].tolist()
        want = [-1 if p < 0 else table[p] for p in positions[row].tolist()]
        assert slots[row].tolist() == want


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ragged_rows_start_where_their_request_does(case: Case) -> None:
    """Logits over the KV of all requests, one after another: a wrong start ranks a neighbour."""
    _, paged, logits = make(case)
    metadata = paged.attn_metadata
    first = [0, *accumulate(case.kv_lens)]
    wide = torch.full((logits.shape[0], first[-1] + 1), float("inf"))
    owner = metadata.buffers.request_of_row.tolist()
    starts = torch.tensor([first[owner[row]] if case.q_lens else 0 for row in range(len(owner))])
    for row, start in enumerate(starts.tolist()):
        n = int(metadata.nsa_seqlens_expanded[row])
        wide[row, start : start + n] = logits[row, :n]
    ragged = NSAIndexerMetadata(metadata, "ragged")
    places = ragged.topk_transform(wide, case.topk, starts=starts.int())
    positions = NSAIndexerMetadata(metadata, "unfused").topk_transform(logits, case.topk)
    want = torch.where(positions < 0, -1, positions + starts[:, None])
    assert torch.equal(places, want.int())


def test_decode_form_reads_its_own_row() -> None:
    table = torch.tensor([[5, 2], [7, 1], [3, 3]], dtype=torch.int32)
    positions = torch.tensor([[0, 5, -1], [-1, -1, -1], [7, 3, 4]], dtype=torch.int32)
    want = [[20, 9, -1], [-1, -1, -1], [15, 15, 12]]
    assert decode_slots(table, positions, page_size=4).tolist() == want
    owner = torch.tensor([0, 1, 2], dtype=torch.int32)
    assert prefill_slots(table, positions, owner, page_size=4).tolist() == want
    everyone = torch.tensor([2, 2, 0], dtype=torch.int32)
    assert prefill_slots(table, positions[:1].repeat(3, 1), everyone, 4)[:, 1].tolist() == [
        13,
        13,
        9,
    ]


def test_wrong_calls_teach() -> None:
    _, metadata, _ = make(CASES[5])
    with pytest.raises(ConfigError, match="page size is 16"):
        metadata.get_page_table_64()
    with pytest.raises(ConfigError, match="page size 1 or 16, got 64"):
        metadata.map_positions(torch.zeros(6, 8, dtype=torch.int32), 64)
    with pytest.raises(ShapeError, match="positions"):
        decode_slots(torch.zeros(2, 3).int(), torch.zeros(3, 1).int())


def test_getters_are_the_steps_fields() -> None:
    _, metadata, _ = make(CASES[1])
    step = metadata.attn_metadata
    assert metadata.get_seqlens_int32().tolist() == [69, 7, 70]
    assert metadata.get_seqlens_expanded() is step.nsa_seqlens_expanded
    assert metadata.get_page_table_64() is step.real_page_table
    assert metadata.get_page_table_1() is step.page_table_1
    assert step.topk == CONFIG.index_topk
