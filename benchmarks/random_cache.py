"""Caches as long contexts would have left them, without computing one: random records in the pools.

Pages of all requests lie in shuffled order, as after a while of serving.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.config import DsaConfig

_AT_ONCE = 2**18


def random_cache(
    config: DsaConfig, requests: int, context: int, kv_cache_dtype: str, device: torch.device
) -> tuple[ReqToTokenPool, NSATokenToKVPool]:
    """A table whose first `requests` rows have `context` tokens each, and the pool they are in."""
    pool = NSATokenToKVPool(config, 1, kv_cache_dtype=kv_cache_dtype, device=device)
    pages = -(-context // pool.page_size)
    pool.grow(requests * pages + 1)
    table = ReqToTokenPool(requests, pages * pool.page_size, device)
    order = torch.randperm(requests * pages, device=device) + 1
    slots = order[:, None] * pool.page_size + torch.arange(pool.page_size, device=device)
    table.req_to_token.copy_(slots.view(requests, -1))
    for layer_id in pool.layers:
        fill_layer(pool, layer_id)
    return table, pool


def fill_layer(pool: NSATokenToKVPool, layer_id: int) -> None:
    """Random records in every slot of a layer; one stretch of them, repeated."""
    config, device = pool.config, pool.device
    dtype = torch.float32 if pool.kv_cache_dtype == "fp32" else torch.bfloat16
    count = min(pool.size, _AT_ONCE)
    latent = torch.randn(count, config.kv_lora_rank, device=device, dtype=dtype)
    rope = torch.randn(count, config.qk_rope_head_dim, device=device, dtype=dtype)
    keys = torch.randn(count, config.index_head_dim, device=device, dtype=dtype)
    layer = SimpleNamespace(layer_id=layer_id)
    for first in range(0, pool.size, count):
        part = torch.arange(first, min(first + count, pool.size), device=device)
        pool.set_mla_kv_buffer(layer, part, latent[: len(part)], rope[: len(part)])
        if config.owns_indexer(layer_id):
            pool.set_index_k_buffer(layer_id, part, keys[: len(part)])
