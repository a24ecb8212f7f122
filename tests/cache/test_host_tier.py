"""Do both records of every layer survive a stay in host memory?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.world import CONFIG
from topkapi.cache import HostTier, NSATokenToKVPool
from topkapi.errors import CacheCorruptionError, ConfigError

SHARING = replace(
    CONFIG, num_hidden_layers=3, indexer_types=("full", "shared", "full"), index_head_dim=12
)


@pytest.mark.parametrize("cache", ["bf16", "fp32", "fp8"])
def test_pages_come_back_bit_for_bit(cache: str) -> None:
    pool = NSATokenToKVPool(SHARING, 6, page_size=4, kv_cache_dtype=cache)
    torch.manual_seed(0)
    for view in pool.page_views():
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8))
    slots = torch.arange(4, 16)  # pages 1, 2, 3
    before = pool.read_tokens(slots)
    tier = HostTier(pool, 3)
    places = [tier.alloc() for _ in range(3)]
    assert tier.available == 0
    tier.offload([3, 1, 2], places)
    for view in pool.page_views():
        view[1:4] = 255
    tier.restore([places[1], places[2], places[0]], [4, 5, 1])
    after = pool.read_tokens(torch.cat((torch.arange(16, 24), torch.arange(4, 8))))
    for name in ("latent", "index_key", "index_scale"):
        old, new = getattr(before, name), getattr(after, name)
        assert old.keys() == new.keys()
        for layer_id, tensor in old.items():
            assert torch.equal(tensor.view(torch.uint8), new[layer_id].view(torch.uint8))
    assert set(before.index_key) == {0, 2}
    assert tier.nbytes == 3 * 4 * pool.bytes_per_token()


def test_places_are_counted() -> None:
    pool = NSATokenToKVPool(CONFIG, 2)
    with pytest.raises(ConfigError, match="at least one page"):
        HostTier(pool, 0)
    tier = HostTier(pool, 2)
    place = tier.alloc()
    tier.free(place)
    with pytest.raises(CacheCorruptionError, match="twice"):
        tier.free(place)
