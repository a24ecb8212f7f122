"""Do the scripts in benchmarks/ that need a large GPU still run, at sizes that a CPU can?"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from topkapi.bench.random_model import random_config
from topkapi.config import DsaConfig

CPU = torch.device("cpu")


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("script", ["decode_step_h200"], indirect=True)
def test_the_decode_step_is_split(script: Any) -> None:
    sides = {"topkapi", "transformers-eager"}
    rows = script.with_ratios(list(script.measure(CPU, [(3, 130)], sides, 2, **script.TINY)))
    theirs, ours = rows
    assert (theirs["side"], ours["side"]) == ("transformers-eager", "topkapi")
    for row in rows:
        assert (row["batch"], row["context"]) == (3, 130)
        assert all(math.isfinite(value) for value in row["us"].values())
        assert min(row["us"][part] for part in ("step", "attention", "indexer")) > 0
    assert theirs["us"]["indexer"] < theirs["us"]["attention"] < theirs["us"]["step"]
    parts = ours["us"]
    whole = parts["indexer"] + parts["sparse_mla"] + parts["projections"] + parts["rest"]
    assert whole == pytest.approx(parts["step"])
    assert theirs["ratio"]["step"] == theirs["us"]["step"] / parts["step"]
    script.show(theirs)


@pytest.mark.parametrize("script", ["layer_vs_dense_h200"], indirect=True)
def test_sparse_and_dense_layers_are_timed(script: Any) -> None:
    tiny = importlib.import_module("decode_step_h200").TINY
    config = DsaConfig.from_hf(random_config(**{**tiny, "num_hidden_layers": 1}))
    rows = list(script.measure(CPU, config, [(2, 1), (1, 70)], 150, 2))
    assert [row["side"] for row in rows] == ["dense math rows", "topkapi fp32"] * 2
    assert [row["phase"] for row in rows] == ["decode", "decode", "prefill", "prefill"]
    assert all(row["us"] > 0 for row in rows)
    assert rows[1]["ratio"] == rows[0]["us"] / rows[1]["us"]
    assert "refused" in rows[0]["piece_us"]["flash rows"]


@pytest.mark.parametrize("script", ["random_cache"], indirect=True)
def test_random_caches_are_full(script: Any) -> None:
    tiny = importlib.import_module("decode_step_h200").TINY
    config = DsaConfig.from_hf(random_config(**tiny))
    for cache_format in ("fp32", "fp8"):
        table, pool = script.random_cache(config, 3, 130, cache_format, CPU)
        slots = table.req_to_token[:, :130].flatten()
        assert len(slots.unique()) == 3 * 130
        assert int(slots.min()) >= pool.page_size
        for layer_id in pool.layers:
            assert pool.get_key_buffer(layer_id)[slots].flatten(1).any(dim=1).all()
            assert pool.get_index_k_with_scale_buffer(layer_id).any()


@pytest.mark.parametrize("script", ["metadata_h200"], indirect=True)
def test_both_sides_start_the_same_step(script: Any) -> None:
    mode = script.ForwardMode.TARGET_VERIFY
    backend, calls = script.sides(2, mode, script.DRAFTS, CPU)  # raises where they disagree
    expanded, table, *_ = calls["per request"]()
    assert expanded.shape == (2 * script.DRAFTS,)
    assert table.shape == (2 * script.DRAFTS, int(expanded.max()))
    assert backend.cuda_graph_bytes() > 0
