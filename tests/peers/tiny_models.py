"""Tiny random models of every DSA family, with weights large enough that attention matters.

Sizes are odd on purpose: nothing is 512, 64, 128 or 2048. Used by the tests of models/ and peers/.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from where import DEVICE

VOCAB = 97
TOPK = 8

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 56,
    "intermediate_size": 72,
    "moe_intermediate_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 40,
    "q_lora_rank": 36,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": TOPK,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """One seeded model: `name` is the test's id."""

    name: str
    model_type: str
    layers: int = 3
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> Any:
        if self.model_type not in CONFIG_MAPPING:
            pytest.skip(f"this Transformers has no {self.model_type}")
        sizes = {**_SIZES, "num_hidden_layers": self.layers, **self.extra, **changes}
        if self.model_type != "axk2":
            sizes = {"n_group": 1, "topk_group": 1, **sizes}
        return CONFIG_MAPPING[self.model_type](first_k_dense_replace=1, **sizes)

    def build(self, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        """A model in evaluation mode on eager attention, the same weights for the same seed, on the
        device of the suites.
        """
        torch.manual_seed(self.seed)
        config = self.config(initializer_range=0.25, **changes)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(self.seed + 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(0.2 * noise)
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
        return model.to(DEVICE, dtype).eval().requires_grad_(False)


# With these seeds no score at the border of a selection is within 1e-5 of the next one, over the
# prompts of the tests: rounding, which is another on every device, selects the same.
FAMILIES = (
    Family("deepseek_v32", "deepseek_v32", seed=10),
    Family(
        "deepseek_v32_yarn",
        "deepseek_v32",
        seed=20,
        extra={"rope_parameters": YARN, "max_position_embeddings": 256},
    ),
    Family("glm_full", "glm_moe_dsa", seed=39, extra={"indexer_types": ["full"] * 3}),
    Family(
        "glm_shared",
        "glm_moe_dsa",
        layers=5,
        seed=40,
        extra={"indexer_types": ["full", "shared", "shared", "full", "shared"]},
    ),
    Family("axk2", "axk2", seed=50),
)
BY_NAME = {family.name: family for family in FAMILIES}


def twins(family: Family, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The same model twice: one to attach to, one to stay Transformers' own."""
    model = family.build(dtype)
    return model, copy.deepcopy(model)


def prompt(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids `[B, max]` and their mask, left-padded with token 0."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), width), generator=generator)
    columns = torch.arange(width)
    mask = (columns[None] >= width - torch.tensor(lengths)[:, None]).long()
    return (ids * mask).to(DEVICE), mask.to(DEVICE)
