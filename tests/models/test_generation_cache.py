"""A cache must continue exactly as if its tokens had been computed anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import topkapi
from peers.tiny_models import BY_NAME, prompt
from topkapi.errors import ConfigError, RequestError
from topkapi.models.generation_cache import DsaCache

pytestmark = pytest.mark.any_device

LENGTHS = [45, 70, 9]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return topkapi.attach(BY_NAME["glm_shared"].build())


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: DsaCache | None = None) -> Any:
    """Forward of the columns that the cache does not hold yet."""
    first = 0 if cache is None else cache.get_seq_length()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, first:]
    return model(
        input_ids=ids[:, first:],
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
    )


def cache_of(out: Any) -> DsaCache:
    assert isinstance(out.cache, DsaCache)
    return out.cache


def filled(model: Any) -> tuple[DsaCache, torch.Tensor, torch.Tensor]:
    ids, mask = prompt(LENGTHS)
    return cache_of(run(model, ids, mask)), ids, mask


def assert_continues(model: Any, cache: DsaCache, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Six more columns on the cache give what a fresh run over all columns gives."""
    more, _ = prompt([6] * len(ids), seed=9)
    ids, mask = torch.cat((ids, more), 1), torch.cat((mask, torch.ones_like(more)), 1)
    expected = run(model, ids, mask).logits[:, -6:]
    got = run(model, ids, mask, cache).logits
    assert (got - expected).abs().max() < TOLERANCE
    assert cache.lengths == mask.sum(1).tolist()
    used = [page for sequence in cache._sequences for page in sequence.pages]
    assert len(set(used)) == len(used), "rows share a page"
    assert len(used) + cache._pages.available == cache._pages.num_pages - 1, "a page leaked"


def test_it_counts_columns_and_holds_valid_tokens(model: Any) -> None:
    cache, ids, mask = filled(model)
    assert (cache.get_seq_length(), cache.batch_size, cache.lengths) == (70, 3, LENGTHS)
    assert cache.get_max_length() == -1
    assert cache.get_mask_sizes(5, 0) == (75, 0)
    assert cache.is_croppable
    assert not cache.is_compileable
    assert len(cache) == model.config.num_hidden_layers
    assert_continues(model, cache, ids, mask)


@pytest.mark.parametrize("removed", [0, 1, 6, 64, 69])
def test_crop_forgets_the_last_columns(model: Any, removed: int) -> None:
    cache, ids, mask = filled(model)
    cache.crop(-removed)
    kept = 70 - removed
    assert cache.get_seq_length() == kept
    assert_continues(model, cache, ids[:, :kept], mask[:, :kept])


def test_crop_everything_and_reset_start_anew(model: Any) -> None:
    for forget in (lambda cache: cache.crop(-1000), lambda cache: cache.reset()):
        cache, _, _ = filled(model)
        forget(cache)
        assert cache.get_seq_length() == 0
        ids, mask = prompt([30, 4, 77], seed=3)
        assert_continues(model, cache, ids[:, :0], mask[:, :0])
    cache.reset()
    assert cache.batch_size == -1
    ids, mask = prompt([5])
    run(model, ids, mask, cache)
    assert cache.lengths == [5]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 1], [2, 2, 0], [0, 2, 0]])
def test_reorder_moves_and_copies_rows(model: Any, order: list[int]) -> None:
    cache, ids, mask = filled(model)
    cache.reorder_cache(torch.tensor(order))
    assert_continues(model, cache, ids[order], mask[order])


def test_rows_are_repeated_and_selected(model: Any) -> None:
    cache, ids, mask = filled(model)
    cache.batch_repeat_interleave(3)
    ids, mask = ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    assert_continues(model, cache, ids, mask)
    cache, ids, mask = filled(model)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert_continues(model, cache, ids[[0, 2]], mask[[0, 2]])
    cache.crop(-6)
    cache.batch_select_indices(torch.tensor([1]))
    assert_continues(model, cache, ids[[2]], mask[[2]])


def test_a_deep_copy_is_independent(model: Any) -> None:
    cache, ids, mask = filled(model)
    prefix = copy.deepcopy(cache)
    assert_continues(model, cache, ids, mask)
    assert prefix.get_seq_length() == 70
    assert_continues(model, prefix, ids, mask)


def test_a_cache_filled_in_inference_mode_is_continued_outside(model: Any) -> None:
    ids, mask = prompt(LENGTHS)
    with torch.inference_mode():
        cache = cache_of(run(model, ids, mask))
    assert_continues(model, cache, ids, mask)


def test_growth_is_amortised(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = []
    original = topkapi.cache.NSATokenToKVPool.grow

    def grow(self: Any, num_pages: int) -> None:
        grown.append(num_pages)
        original(self, num_pages)

    monkeypatch.setattr(topkapi.cache.NSATokenToKVPool, "grow", grow)
    ids, mask = prompt([300])
    cache = None
    for end in range(10, 301, 10):
        cache = cache_of(run(model, ids[:, :end], mask[:, :end], cache))
    assert grown == [2, 4, 8], "the first two pages, then twice as many each time"


def test_a_column_that_is_padding_everywhere_changes_nothing(model: Any) -> None:
    cache, ids, mask = filled(model)
    ids, mask = (torch.cat((part, part.new_zeros(3, 2)), 1) for part in (ids, mask))
    out = run(model, ids, mask, cache)
    assert out.logits.shape[1] == 2
    assert (cache.get_seq_length(), cache.lengths) == (72, LENGTHS)
    assert_continues(model, cache, ids, mask)


def test_a_step_that_does_not_continue_the_cache_is_refused(model: Any) -> None:
    cache, _, mask = filled(model)
    ids, _ = prompt([3, 3, 3])
    with torch.no_grad():
        with pytest.raises(RequestError, match="batch of 3"):
            model(input_ids=ids[:2], cache=cache)
        with pytest.raises(RequestError, match=r"expected \[3, 73\]"):
            model(input_ids=ids, attention_mask=mask, cache=cache)
        with pytest.raises(RequestError, match="left-padded"):
            model(input_ids=ids, cache=cache)
        other = torch.ones(3, 73, dtype=torch.long)
        with pytest.raises(RequestError, match="hides or shows"):
            model(input_ids=ids, attention_mask=other, cache=cache)
    with pytest.raises(RequestError, match="negative"):
        cache.crop(5)
    assert cache.lengths == LENGTHS


def test_a_forward_that_fails_leaves_the_cache_as_it_was(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, ids, mask = filled(model)
    more, ones = prompt([2, 2, 2], seed=4)
    longer, longer_mask = torch.cat((ids, more), 1), torch.cat((mask, ones), 1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck")

    fresh = copy.deepcopy(cache)
    fresh.reset()
    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[3].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            run(model, longer, longer_mask, cache)
        with pytest.raises(RuntimeError, match="out of luck"):
            run(model, ids, mask, fresh)
    assert (cache.get_seq_length(), cache.lengths) == (70, LENGTHS)
    assert (fresh.get_seq_length(), fresh.batch_size) == (0, -1)
    assert_continues(model, cache, ids, mask)


def test_other_models_cannot_use_the_cache(model: Any) -> None:
    cache, ids, _ = filled(model)
    plain = BY_NAME["glm_shared"].build()
    with torch.no_grad(), pytest.raises(ConfigError, match="not attached"):
        plain(input_ids=ids[:, :3], cache=cache)
    other = topkapi.attach(BY_NAME["deepseek_v32"].build())
    with torch.no_grad(), pytest.raises(ConfigError, match="other sizes"):
        other(input_ids=ids[:, :3], cache=cache)
