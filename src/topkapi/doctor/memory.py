"""What does a cached token cost, and how many fit? From the layouts of the records alone.

Knows nothing of engines: it divides the memory it is told about as the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from topkapi.config import DsaConfig
from topkapi.layout import PAGE_SIZE
from topkapi.layout.index_key import index_key_layout
from topkapi.layout.latent import latent_layout

CACHE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.uint8,
}


@dataclass(frozen=True)
class Budget:
    """Memory for the cache, in bytes, and what it was taken to be.

    `weight_bytes` are still to be loaded, 0 where that is not known. `cache_bytes` is `fraction` of
    what they leave of `free_bytes`; what the cache does not get is for activations.
    """

    free_bytes: int
    weight_bytes: int
    fraction: float
    assumption: str

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache may take."""
        return int(max(self.free_bytes - self.weight_bytes, 0) * self.fraction)


@dataclass(frozen=True)
class CacheCost:
    """What one token costs in one cache format, in bytes.

    `latent_bytes` a layer, `index_bytes` a layer that owns an indexer, `bytes_per_token` over all
    layers. `tokens` fit in the budget, in whole pages beside the reserved one; None without one.
    """

    cache_format: str
    latent_bytes: int
    index_bytes: int
    layers: int
    indexers: int
    bytes_per_token: int
    tokens: int | None


def cache_costs(config: DsaConfig, budget: Budget | None) -> list[CacheCost]:
    """One entry for each format that the model's sizes allow, MTP layers not counted."""
    layers = config.num_hidden_layers
    indexers = sum(config.owns_indexer(layer) for layer in range(layers))
    costs = []
    for name, dtype in CACHE_DTYPES.items():
        if name == "fp8" and config.index_head_dim % 4:
            continue
        latent = latent_layout(dtype).bytes_per_token(config.kv_lora_rank, config.qk_rope_head_dim)
        index = index_key_layout(dtype).bytes_per_token(config.index_head_dim)
        total = layers * latent + indexers * index
        tokens = None if budget is None else tokens_within(budget.cache_bytes, total)
        costs.append(CacheCost(name, latent, index, layers, indexers, total, tokens))
    return costs


def tokens_within(cache_bytes: int, bytes_per_token: int, page_size: int = PAGE_SIZE) -> int:
    """Tokens of the pages that fit, of which one is reserved."""
    pages = cache_bytes // (bytes_per_token * page_size) - 1
    return max(pages, 0) * page_size
