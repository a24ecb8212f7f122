"""Do the figures say what happened?"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from attention.world import CONFIG, World
from engine.conftest import make_llm
from topkapi.attention import ForwardMode
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams
from topkapi.engine.selection_stats import SelectionStats
from topkapi.engine.timeline import PHASES
from topkapi.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = [list(range(3, 90)), [3, 4, 5]]


def test_stats_count(llm: LLM) -> None:
    before = llm.stats()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    after = llm.stats()
    assert after.finished["length"] - before.finished.get("length", 0) == 2
    computed = after.computed_tokens - before.computed_tokens
    found = after.cache.found_tokens - before.cache.found_tokens
    assert computed + found == 90 + 2 * 4
    assert (after.running, after.waiting, after.selection) == (0, 0, [])
    spent = {name: after.seconds[name] - before.seconds[name] for name in PHASES}
    assert {name for name in PHASES if not spent[name]} == {"draft", "graph"}
    values = json.loads(json.dumps(after.to_json()))
    assert values["cache"]["hit_rate"] == after.cache.hit_rate
    assert values["cache"]["occupancy"] == 0


def test_a_trace_is_whole_after_every_step(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    llm = make_llm(checkpoint, trace=file)
    assert len(json.loads(file.read_text())) == 2
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    first = json.loads(file.read_text())
    list(stream)
    events = json.loads(file.read_text())
    assert events[: len(first)] == first
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    phases = [event for event in events if event["ph"] == "X" and event["tid"] == 2]
    assert [event["name"] for event in steps] == [
        "1 requests, 64 tokens",
        "1 requests, 23 tokens",
        *["1 requests, 1 tokens"] * 4,
    ]
    names = [event["name"] for event in phases[: len(phases) // 6]]
    # Two layers: what comes before, between and after their attention.
    layers = ["rest", "attention", "rest", "attention", "rest"]
    assert names[:7] == ["schedule", "metadata", *layers]
    assert {event["name"] for event in phases} == set(PHASES) - {"draft", "graph"}
    for before, after in pairwise(phases):
        assert before["ts"] + before["dur"] <= after["ts"] + 1
    counted = llm.stats().seconds
    for name in PHASES:
        total = sum(event["dur"] for event in phases if event["name"] == name) / 1e6
        assert total == pytest.approx(counted[name])
    held = [event["args"]["held pages"] for event in events if event["name"] == "held pages"]
    assert held[0] == 11
    assert held[-1] == 0


def test_a_trace_that_cannot_be_written_is_a_config_error(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace"):
        make_llm(checkpoint, trace=tmp_path / "missing" / "trace.json")


def test_two_engines_over_one_model_do_not_time_each_other(checkpoint: Path) -> None:
    first = make_llm(checkpoint)
    second = LLM(first.model, page_size=8, max_tokens_in_cache=200)
    first.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert set(second.stats().seconds.values()) == {0.0}


def _selected(positions: list[list[int]], length: int) -> SelectionStats:
    """Figures of decoding rows of `length` tokens, whose selections are given."""
    world = World(CONFIG)
    rows = len(positions)
    lens = [1] * rows, [length] * rows
    batch = world.batch(ForwardMode.DECODE, *lens)
    world.backend.init_forward_metadata(batch)
    stats = SelectionStats(world.backend, 1)
    table = world.table.req_to_token[torch.tensor(world.rows[:rows])].long()
    width = CONFIG.index_topk
    slots = torch.full((rows, width), -1, dtype=torch.int32)
    for row, chosen in enumerate(positions):
        slots[row, : len(chosen)] = table[row, torch.tensor(chosen)].int()
    world.backend.metadata.selection.slots = slots
    stats.look(0)
    return stats


def test_selection_figures_by_hand() -> None:
    # 8 of 80 tokens: one of them among the last 8, and pages of 64.
    [layer] = _selected([[0, 1, 2, 3, 40, 50, 60, 79]], 80).read()
    assert (layer.layer_id, layer.rows) == (0, 1)
    assert layer.recent_share == pytest.approx(1 / 8)
    # From the newest: 79, 60, 50, 40 | 3, 2, 1, 0.
    assert layer.back_p50 == pytest.approx(39 / 80)
    assert layer.back_p90 == pytest.approx(79 / 80)
    assert layer.page_share == pytest.approx(1.0)
    both = _selected([[0, 1, 2, 3, 40, 50, 60, 79], list(range(72, 80))], 80).read()
    assert both[0].rows == 2
    assert both[0].recent_share == pytest.approx((1 / 8 + 1) / 2)
    assert both[0].page_share == pytest.approx(0.75)


def test_selections_are_looked_at_every_nth_pass(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, selection_stats_every=2, enable_prefix_cache=False)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm.generate(PROMPTS, params, use_tqdm=False)
    layers = llm.stats().selection
    assert [layer.layer_id for layer in layers] == [0, 1]
    for layer in layers:
        # Passes 0, 2, ..., the first of them a chunk of 61 tokens; the short prompt never chooses.
        assert layer.rows == 5
        assert 0 < layer.recent_share < 1
        assert 0 <= layer.back_p50 <= layer.back_p90 <= 1
        assert 0 < layer.page_share <= 1
    with pytest.raises(ConfigError, match="selection_stats_every"):
        make_llm(checkpoint, selection_stats_every=-1)
