"""Does a token's every record stay with it: written, read, moved, grown, offloaded?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.world import CONFIG, World, make_stream
from topkapi.attention import ForwardMode
from topkapi.cache import NSATokenToKVPool
from topkapi.errors import ConfigError

FORMATS = ("fp32", "bf16", "fp16", "fp8")
V32 = replace(
    CONFIG, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, num_hidden_layers=3
)


def filled(kv: str = "fp8", index: str | None = None, pages: int = 3) -> NSATokenToKVPool:
    """A pool with something else in every slot of every layer."""
    pool = NSATokenToKVPool(CONFIG, pages, kv_cache_dtype=kv, index_cache_dtype=index)
    draw = torch.Generator().manual_seed(0)
    loc = torch.arange(pool.size)
    world = World()
    for layer_id in pool.layers:
        latent = torch.randn(pool.size, 24, generator=draw)
        rope = torch.randn(pool.size, 8, generator=draw)
        pool.set_mla_kv_buffer(world.layer(layer_id), loc, latent, rope)
        if CONFIG.owns_indexer(layer_id):
            keys = torch.randn(pool.size, 16, generator=draw)
            pool.set_index_k_buffer(layer_id, loc, keys)
    return pool


def records_equal(pool: NSATokenToKVPool, slots: torch.Tensor, other, other_slots) -> bool:
    one, two = pool.read_tokens(slots), other.read_tokens(other_slots)
    return all(
        torch.equal(getattr(one, part)[i], getattr(two, part)[i])
        for part in ("latent", "index_key", "index_scale")
        for i in getattr(one, part)
    )


def test_bytes_per_token_count_both_records_where_both_exist() -> None:
    """656 + 132 on layers that own an indexer, 656 on the one that shares a selection."""
    pool = NSATokenToKVPool(V32, 2, kv_cache_dtype="fp8")
    assert pool.bytes_per_token() == 3 * 656 + 2 * 132
    assert pool.nbytes() == pool.bytes_per_token() * 2 * 64
    assert pool.get_key_buffer(0).shape == (128, 1, 656)
    assert pool.get_index_k_with_scale_buffer(0).shape == (2, 64 * 132)
    exact = NSATokenToKVPool(V32, 2, kv_cache_dtype="bf16", layers=[1, 2])
    assert exact.bytes_per_token() == 2 * 1152 + 256
    assert exact.get_key_buffer(1).shape == (128, 1, 576)


def test_shared_layers_have_no_index_cache_and_mtp_layers_have() -> None:
    pool = NSATokenToKVPool(CONFIG, 2, layers=[1, 3])
    with pytest.raises(ConfigError, match=r"layer 1 has no index cache: layers with one are \[3\]"):
        pool.get_index_k_with_scale_buffer(1)
    assert pool.get_index_k_with_scale_buffer(3).shape == (128, 16)


@pytest.mark.parametrize("name", FORMATS)
def test_a_write_reaches_its_slot_alone(name: str) -> None:
    pool, before = filled(name), filled(name)
    loc = torch.tensor([70, 130, 65])
    layer = World().layer(2)
    pool.set_mla_kv_buffer(layer, loc, torch.ones(3, 1, 24), torch.ones(3, 1, 8))
    pool.set_index_k_buffer(2, loc, torch.ones(3, 16))
    untouched = torch.tensor([s for s in range(pool.size) if s not in loc.tolist()])
    assert records_equal(pool, untouched, before, untouched)
    written = pool.read_tokens(loc)
    assert torch.equal(written.latent[0], before.read_tokens(loc).latent[0])
    assert not torch.equal(written.latent[2], before.read_tokens(loc).latent[2])
    if name != "fp8":
        assert torch.equal(written.latent[2].float(), torch.ones(3, 32))
        assert torch.equal(written.index_key[2].float(), torch.ones(3, 16))
    else:
        assert torch.equal(
            written.index_key[2].view(torch.float8_e4m3fn).float(), torch.full((3, 16), 256.0)
        )
        assert torch.equal(written.index_scale[2], torch.full((3,), 2.0**-8))


@pytest.mark.parametrize("name", FORMATS)
def test_copied_tokens_take_both_records_of_every_layer(name: str) -> None:
    """Overlapping ranges, across pages."""
    pool, before = filled(name), filled(name)
    source, target = torch.arange(60, 100), torch.arange(70, 110)
    pool.copy_tokens(source, target)
    assert records_equal(pool, target, before, source)
    untouched = torch.cat((torch.arange(70), torch.arange(110, pool.size)))
    assert records_equal(pool, untouched, before, untouched)


@pytest.mark.parametrize("name", FORMATS)
def test_offloaded_tokens_come_back_anywhere(name: str) -> None:
    pool, other = filled(name), NSATokenToKVPool(CONFIG, 5, kv_cache_dtype=name)
    slots = torch.tensor([64, 191, 100])
    records = pool.read_tokens(slots).to("cpu")
    places = torch.tensor([200, 64, 300])
    other.write_tokens(places, records)
    assert records_equal(other, places, pool, slots)


@pytest.mark.parametrize("name", FORMATS)
def test_growing_keeps_every_record(name: str) -> None:
    pool, before = filled(name), filled(name)
    pool.grow(7)
    assert pool.size == 7 * 64
    slots = torch.arange(before.size)
    assert records_equal(pool, slots, before, slots)
    assert not pool.get_key_buffer(1)[before.size :].any()
    with pytest.raises(ConfigError, match="at least 7 pages, got 3"):
        pool.grow(3)


def test_quantised_index_keys_are_taken_as_they_are() -> None:
    pool, quantised = filled("fp8"), filled("fp8")
    records = quantised.read_tokens(torch.tensor([5, 64]))
    loc = torch.tensor([100, 3])
    keys = records.index_key[0].view(torch.float8_e4m3fn)
    pool.set_index_k_scale_buffer(0, loc, keys, records.index_scale[0][:, None])
    got = pool.read_tokens(loc)
    assert torch.equal(got.index_key[0], records.index_key[0])
    assert torch.equal(got.index_scale[0], records.index_scale[0])
    with pytest.raises(ConfigError, match="use set_index_k_buffer"):
        filled("bf16").set_index_k_scale_buffer(0, loc, keys, records.index_scale[0])


def test_records_of_another_shape_are_refused() -> None:
    slots = torch.tensor([64, 65])
    records = filled("bf16").read_tokens(slots)
    with pytest.raises(ConfigError, match="do not fit a pool"):
        filled("fp8").write_tokens(slots, records)
    with pytest.raises(ConfigError, match="expected 1 latents"):
        filled("bf16").write_tokens(slots[:1], records)
    with pytest.raises(ConfigError, match="kv_cache_dtype: expected one of"):
        NSATokenToKVPool(CONFIG, 2, kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match="multiple of 4"):
        NSATokenToKVPool(replace(CONFIG, index_head_dim=18), 2, kv_cache_dtype="fp8")


@pytest.mark.parametrize("name", ["fp32", "fp8"])
def test_a_request_decodes_the_same_after_its_tokens_moved(name: str) -> None:
    """The selection and the output: a latent without its index key would be ranked wrongly."""
    outputs = []
    for move in (False, True):
        world = World(kv_cache_dtype=name, requests=2)
        streams = [make_stream(CONFIG, 80, seed=1)]
        world.step(streams, (79,), (79,), ForwardMode.EXTEND)
        if move:
            row, spare = world.rows[0], world.rows[1]
            source = world.table.req_to_token[row].long()
            target = world.table.req_to_token[spare].long()
            world.pool.copy_tokens(source, target)
            world.table.req_to_token[row] = target.int()
            nothing = NSATokenToKVPool(CONFIG, 8, kv_cache_dtype=name)
            world.pool.write_tokens(source, nothing.read_tokens(torch.arange(len(source))))
        outputs.append(world.step(streams, (1,), (80,), ForwardMode.DECODE))
    assert torch.equal(*outputs)
