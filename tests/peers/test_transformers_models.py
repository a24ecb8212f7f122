"""Transformers' eager attention in fp32 is the oracle for `attach`, family by family.

Contexts are up to 12 times k, so that a wrong selection shows; `test_the_oracle_can_see` proves it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import topkapi
from peers.tiny_models import BY_NAME, FAMILIES, TOPK, VOCAB, Family, prompt, twins
from where import DEVICE

pytestmark = pytest.mark.any_device

LENGTHS = [50, 37, 3, 64]
STEPS = 32
TOLERANCE = 1e-4
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> Any:
    settings = {
        "max_new_tokens": STEPS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        **options,
    }
    return model.generate(ids, attention_mask=mask, **settings)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of the valid tokens, [T, vocabulary]; positions count valid tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return out.logits[mask.bool()].float()


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


@families
def test_prefill_and_decode_match_transformers(family: Family) -> None:
    model, oracle = twins(family)
    topkapi.attach(model)
    ids, mask = prompt(LENGTHS)
    ours, theirs = greedy(model, ids, mask), greedy(oracle, ids, mask)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert largest(torch.stack(ours.logits) - torch.stack(theirs.logits)) < TOLERANCE
    assert ours.sequences.shape[1] > 4 * TOPK
    sequences = theirs.sequences
    grown = torch.cat((mask, mask.new_ones(len(LENGTHS), STEPS)), dim=1)
    full = logits(model, sequences, grown)
    assert largest(full - logits(oracle, sequences, grown)) < TOLERANCE
    uncached = greedy(model, ids, mask, use_cache=False, max_new_tokens=5)
    assert torch.equal(uncached.sequences, sequences[:, : uncached.sequences.shape[1]])


@families
def test_a_returned_cache_is_continued(family: Family) -> None:
    model, oracle = twins(family)
    topkapi.attach(model)
    ids, mask = prompt(LENGTHS[:2])
    start = greedy(model, ids, mask, max_new_tokens=4)
    turn, _ = prompt([9, 9], seed=1)
    longer = torch.cat((start.sequences, turn), dim=1)
    extra = mask.new_ones(2, longer.shape[1] - mask.shape[1])
    longer_mask = torch.cat((mask, extra), dim=1)
    assert start.cache.get_seq_length() == start.sequences.shape[1] - 1
    ours = greedy(model, longer, longer_mask, max_new_tokens=8, cache=start.cache)
    theirs = greedy(oracle, longer, longer_mask, max_new_tokens=8)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert largest(torch.stack(ours.logits) - torch.stack(theirs.logits)) < TOLERANCE


def flip_indexer_rope(config: topkapi.DsaConfig) -> dict[str, Any]:
    return {"indexer_rope": "half" if config.indexer_rope == "interleaved" else "interleaved"}


def share_the_first_selection(config: topkapi.DsaConfig) -> dict[str, Any]:
    rest = ("shared",) * (config.num_hidden_layers - 1)
    return {"indexer_types": ("full", *rest)}


def forget_mscale(config: topkapi.DsaConfig) -> dict[str, Any]:
    return {"scaling": (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek_v32", flip_indexer_rope),
        ("glm_full", flip_indexer_rope),
        ("glm_shared", flip_indexer_rope),
        ("axk2", flip_indexer_rope),
        ("deepseek_v32", share_the_first_selection),
        ("glm_shared", share_the_first_selection),
        ("deepseek_v32_yarn", forget_mscale),
        ("glm_full", lambda config: {"index_topk": 10**6}),
        ("axk2", lambda config: {"index_topk": TOPK - 1}),
    ],
)
def test_the_oracle_can_see(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong rope style, selection, k or scale is far outside the tolerance."""
    model, oracle = twins(BY_NAME[name])
    read = topkapi.DsaConfig.from_hf

    def wrong(config: Any) -> topkapi.DsaConfig:
        right = read(config)
        return dataclasses.replace(right, **change(right))

    monkeypatch.setattr(topkapi.DsaConfig, "from_hf", wrong)
    topkapi.attach(model)
    ids, _ = prompt([96])
    difference = (logits(model, ids) - logits(oracle, ids)).abs().amax(1)
    assert difference.max() > 1e-2
    if name != "deepseek_v32_yarn":
        assert difference[: TOPK - 1].max() < TOLERANCE, "up to k tokens nothing may show"


@pytest.mark.parametrize("rows_at_once", [1, 7, 64])
def test_results_do_not_depend_on_rows_at_once(rows_at_once: int) -> None:
    model, oracle = twins(BY_NAME["glm_shared"])
    topkapi.attach(model, rows_at_once=rows_at_once)
    ids, mask = prompt(LENGTHS)
    assert largest(logits(model, ids, mask) - logits(oracle, ids, mask)) < TOLERANCE


def test_chunked_prefill_embeddings_and_hidden_states() -> None:
    model, oracle = twins(BY_NAME["deepseek_v32"])
    topkapi.attach(model)
    ids, mask = prompt(LENGTHS)
    expected = greedy(oracle, ids, mask, max_new_tokens=6, output_hidden_states=True)
    chunked = greedy(model, ids, mask, max_new_tokens=6, prefill_chunk_size=16)
    assert torch.equal(chunked.sequences, expected.sequences)
    embeds = model.get_input_embeddings()(ids)
    given = greedy(model, None, mask, max_new_tokens=6, inputs_embeds=embeds)
    assert torch.equal(given.sequences, expected.sequences[:, ids.shape[1] :])
    ours = greedy(model, ids, mask, max_new_tokens=6, output_hidden_states=True)
    for step, (got, wanted) in enumerate(
        zip(ours.hidden_states, expected.hidden_states, strict=True)
    ):
        assert len(got) == len(wanted)
        valid = mask.bool() if step == 0 else slice(None)
        for layer, other in zip(got, wanted, strict=True):
            assert largest(layer[valid] - other[valid]) < TOLERANCE


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_shared"])
def test_padding_may_be_anywhere(name: str) -> None:
    model, oracle = twins(BY_NAME[name])
    topkapi.attach(model)
    ids, _ = prompt([60] * 4)
    mask = (torch.rand(4, 60, generator=torch.Generator().manual_seed(3)) < 0.7).long()
    mask[0, 40:], mask[1, :20], mask[2] = 0, 0, 1
    mask = mask.to(DEVICE)
    assert largest(logits(model, ids, mask) - logits(oracle, ids, mask)) < TOLERANCE


def test_packed_sequences_do_not_see_each_other() -> None:
    model, oracle = twins(BY_NAME["axk2"])
    topkapi.attach(model)
    ids, _ = prompt([60, 60])
    lengths = ([17, 1, 42], [30, 29, 1])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    positions = positions.to(DEVICE)
    with torch.no_grad():
        ours, theirs = (
            m(input_ids=ids, position_ids=positions, use_cache=False).logits
            for m in (model, oracle)
        )
    assert largest(ours - theirs) < TOLERANCE


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_shared"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3},
        {"num_return_sequences": 2, "do_sample": True},
    ],
    ids=["sampling", "beams", "several beams", "several samples"],
)
def test_other_ways_to_generate_match(name: str, options: dict[str, Any]) -> None:
    model, oracle = twins(BY_NAME[name])
    topkapi.attach(model)
    ids, mask = prompt([40, 23])
    outcomes = []
    for side in (model, oracle):
        torch.manual_seed(5)
        outcomes.append(side.generate(ids, attention_mask=mask, max_new_tokens=20, **options))
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("assistant", ["prompt lookup", "attached", "plain"])
def test_assisted_generation_matches_greedy(assistant: str) -> None:
    model, oracle = twins(BY_NAME["deepseek_v32"])
    topkapi.attach(model)
    ids = prompt([20])[0].repeat(1, 2)
    expected = greedy(oracle, ids, None, output_logits=False).sequences
    if assistant == "prompt lookup":
        options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    else:
        draft = BY_NAME["glm_shared"].build()
        options = {"assistant_model": topkapi.attach(draft) if assistant == "attached" else draft}
    ours = greedy(model, ids, None, output_logits=False, **options)
    assert torch.equal(ours.sequences, expected)


def median_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (got - expected).abs().median().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_shared", "axk2"])
def test_low_precision_is_no_worse_than_transformers(name: str, dtype: torch.dtype) -> None:
    family = BY_NAME[name]
    exact = family.build()
    model, oracle = twins(family, dtype)
    topkapi.attach(model)
    ids, mask = prompt(LENGTHS)
    expected = logits(exact, ids, mask)
    ours, theirs = (median_error(logits(m, ids, mask), expected) for m in (model, oracle))
    assert 0 < ours < 1.5 * theirs
    tokens = greedy(model, ids, mask, max_new_tokens=4).sequences
    assert tokens.dtype == torch.int64
    assert tokens.max() < VOCAB


def test_an_fp8_cache_is_near_and_smaller() -> None:
    family = BY_NAME["deepseek_v32"]
    model, oracle = twins(family)
    topkapi.attach(model, kv_cache_dtype="fp8")
    ids, _ = prompt([64])
    ours, expected = logits(model, ids), logits(oracle, ids)
    assert 1e-4 < median_error(ours[:TOPK], expected[:TOPK]) < 0.2, "nothing to select here"
    pair = torch.stack((ours[TOPK:].flatten(), expected[TOPK:].flatten()))
    assert torch.corrcoef(pair)[0, 1] > 0.7, "3 % noise on random weights flips selections"
    exact = topkapi.attach(family.build())
    sizes = []
    for side in (model, exact):
        with torch.no_grad():
            sizes.append(side(input_ids=ids, use_cache=True).cache.nbytes)
    assert sizes[0] < 0.35 * sizes[1]
