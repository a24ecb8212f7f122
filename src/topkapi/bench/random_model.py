"""A model of DeepSeek-V3.2's sizes with random weights, for speed alone.

What is cut from the real one, so that it loads in a second and its shares stay those of the whole:

- 4 layers of 61.
- No experts: every layer has the dense MLP of the first three, 18432 wide. A token's eight experts
  and the shared one multiply exactly as much (9 x 2048), but a large batch of the real model reads
  more expert weights than this.
- A vocabulary of 8192 instead of 129280, so that embedding and head weigh on 4 layers as they do
  on 61.

Attention, indexer, latent and hidden sizes are the real ones: 128 heads, latent 512 + 64, 64 index
heads of 128, the best 2048 tokens. 2.5 billion parameters, 5 GB in bf16.
"""

from __future__ import annotations

from typing import Any

import torch

from topkapi.errors import ConfigError

NUM_LAYERS = 4
VOCABULARY = 8192


def random_config(**changes: Any) -> Any:
    """The Transformers config; `changes` are fields to set otherwise (tests make it tiny). Raises
    `ConfigError` for one that it has not, or of another type.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import DeepseekV32Config

    if unknown := sorted(changes.keys() - DeepseekV32Config().to_dict().keys()):
        raise ConfigError(f"config_overrides: the random model has no {', '.join(unknown)}")
    sizes = {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCABULARY, **changes}
    sizes.setdefault("first_k_dense_replace", sizes["num_hidden_layers"])
    try:
        return DeepseekV32Config(**sizes)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"config_overrides: {error}") from error


def random_model(
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    attention: str = "eager",
    **changes: Any,
) -> Any:
    """The model in evaluation mode, made where it stays; the same seed gives the same weights.

    `attention` is what Transformers computes with where Topkapi is not asked to.
    """
    from transformers import AutoModelForCausalLM

    config = random_config(**changes)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)
