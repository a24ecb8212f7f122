"""No tensor of [S, T] or [S, heads, dims] may exist in an attached forward; the oracle has both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import topkapi
from peers.tiny_models import BY_NAME, prompt, twins

pytestmark = pytest.mark.any_device

# Large beside the torch kernels' scratch, which is 512 x 512 whatever the context.
CONTEXT = 900
HEADS = 16


class LargestTensor(TorchDispatchMode):
    """Records the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > self.numel:
                self.numel, self.where = leaf.numel(), f"{func} {list(leaf.shape)}"
        return result


def largest(model: Any, **options: Any) -> LargestTensor:
    ids, mask = prompt([CONTEXT])
    mask[0, :3] = 0
    with torch.no_grad(), LargestTensor() as recorder:
        model(input_ids=ids, attention_mask=mask, logits_to_keep=1, **options)
    return recorder


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_shared", "axk2"])
def test_a_prefill_neither_expands_the_latent_nor_builds_a_mask(name: str) -> None:
    family = BY_NAME[name]
    sizes = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 1024,
    }
    model, oracle = family.build(**sizes), family.build(**sizes)
    topkapi.attach(model, rows_at_once=32, score_budget_bytes=2**20)
    config = model.config
    expanded = CONTEXT * HEADS * (config.qk_nope_head_dim + config.v_head_dim)
    assert largest(oracle).numel >= min(expanded, CONTEXT * CONTEXT), "the test sees nothing"
    ours = largest(model)
    assert ours.numel < min(expanded, CONTEXT * CONTEXT) / 2, ours.where


def test_a_decode_step_touches_no_more_than_scores_of_the_context() -> None:
    model, oracle = twins(BY_NAME["deepseek_v32"])
    topkapi.attach(model)
    ids, _ = prompt([CONTEXT])
    sizes = []
    for side in (model, oracle):
        with torch.no_grad():
            cache = side(input_ids=ids, use_cache=True)[-1]
            with LargestTensor() as recorder:
                side(input_ids=ids[:, :1], cache=cache)
        sizes.append(recorder.numel)
    config = model.config
    assert sizes[1] >= CONTEXT * config.num_attention_heads * 48, "the oracle expands the latent"
    assert sizes[0] <= max(512 * 512, config.index_n_heads * (CONTEXT + 64))
