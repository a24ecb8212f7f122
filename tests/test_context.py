"""Positions to slots, through a table and through starts."""

from __future__ import annotations

import torch

from cases import make_context


def test_slots_through_a_table() -> None:
    context, num_slots = make_context((2, 0, 1), (70, 5, 3), padded_rows=1)
    assert context.num_rows == 4
    assert context.num_requests == 3
    assert context.lengths.tolist() == [69, 70, 3, 0]
    assert context.table is not None
    assert context.table_rows is not None
    positions = torch.tensor([[0, 68, -1], [69, -1, 1], [2, 1, 0], [-1, -1, -1]])
    slots = context.slots(positions)
    assert slots.dtype == torch.int32
    first = context.table[context.table_rows[0]]
    third = context.table[context.table_rows[2]]
    assert slots[0].tolist() == [int(first[0]), int(first[68]), -1]
    assert slots[1].tolist() == [int(first[69]), -1, int(first[1])]
    assert slots[2].tolist() == third[[2, 1, 0]].tolist()
    assert slots[3].tolist() == [-1, -1, -1]
    assert bool((slots < num_slots).all())


def test_slots_through_starts() -> None:
    context, _ = make_context((1, 1), (70, 3), addressing="starts")
    assert context.starts is not None
    assert context.starts.tolist() == [64, 192]
    slots = context.slots(torch.tensor([[69, -1], [0, 2]], dtype=torch.int32))
    assert slots.tolist() == [[133, -1], [192, 194]]


def test_an_empty_batch() -> None:
    context, _ = make_context((), ())
    assert context.num_rows == context.num_requests == context.max_length == 0
    assert context.slots(torch.zeros(0, 4, dtype=torch.int32)).shape == (0, 4)
