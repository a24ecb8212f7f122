"""Do the tables of docs/backend.md show what the backend makes?"""

from __future__ import annotations

from attention.drawn_tables import BEGIN, DOCUMENT, DRAWINGS, END, all_drawn
from topkapi.attention import ForwardMode


def test_the_drawn_batches_are_the_backends() -> None:
    text = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    assert text.strip() == all_drawn().strip(), "run python tests/attention/drawn_tables.py"


def test_every_mode_is_drawn() -> None:
    assert {drawing.mode for drawing in DRAWINGS} == set(ForwardMode)
