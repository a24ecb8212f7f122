"""Does every mode give the outputs that the tokens alone define?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attention.world import (
    CONFIG,
    World,
    expected_outputs,
    make_stream,
    parts_of,
    run_layer,
)
from cases import poisoned_memory
from tolerances import OUTPUT, assert_close
from topkapi import ops
from topkapi.attention import ForwardMode
from topkapi.config import BackendOptions
from topkapi.errors import ConfigError, ShapeError

K = CONFIG.index_topk


@dataclass(frozen=True)
class Feed:
    """A history to write first, then one step to compare."""

    name: str
    mode: ForwardMode
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


FEEDS = (
    Feed("decode", ForwardMode.DECODE, (1, 1, 1), (1, 70, 9)),
    Feed("decode one", ForwardMode.DECODE, (1,), (K,)),
    Feed("extend short", ForwardMode.EXTEND, (3, 1, K), (3, 1, K)),
    Feed("extend", ForwardMode.EXTEND, (65, K + 1, 1), (65, K + 1, 1)),
    Feed("extend after prefix", ForwardMode.EXTEND, (5, 7, 2), (69, 7, 130)),
    Feed("mixed", ForwardMode.MIXED, (1, 6, 1), (64, 20, 3)),
    Feed("verify", ForwardMode.TARGET_VERIFY, (4, 4, 4), (9, 68, 5)),
    Feed("draft extend", ForwardMode.DRAFT_EXTEND, (1, 3, 2), (66, 12, 2)),
    Feed("draft extend v2", ForwardMode.DRAFT_EXTEND_V2, (3, 3), (33, 5)),
)


def write_history(world: World, streams: list, feed: Feed) -> None:
    """Prefill what the compared step finds in the cache."""
    prefix = [n - q for q, n in zip(feed.q_lens, feed.kv_lens, strict=True)]
    if any(prefix):
        world.step(streams, prefix, prefix, ForwardMode.EXTEND)


def streams_for(feed: Feed, config=CONFIG) -> list:
    return [make_stream(config, n, seed=7 + b) for b, n in enumerate(feed.kv_lens)]


@pytest.mark.parametrize("feed", FEEDS, ids=lambda feed: feed.name)
def test_outputs_are_the_oracles_in_every_mode(feed: Feed) -> None:
    world = World()
    streams = streams_for(feed)
    with poisoned_memory():
        write_history(world, streams, feed)
        out = world.step(streams, feed.q_lens, feed.kv_lens, feed.mode)
    want = expected_outputs(CONFIG, streams, feed.q_lens, feed.kv_lens)
    assert_close(feed.name, out, want, OUTPUT[torch.float32])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("logit_cap", [0.0, 1.5])
def test_sinks_and_logit_cap(sinks: bool, logit_cap: float) -> None:
    world = World()
    feed = FEEDS[4]
    streams = streams_for(feed)
    values = torch.tensor([0.5, -1.0, 3.0]) if sinks else None
    write_history(world, streams, feed)
    out = world.step(
        streams, feed.q_lens, feed.kv_lens, feed.mode, sinks=values, logit_cap=logit_cap
    )
    want = expected_outputs(CONFIG, streams, feed.q_lens, feed.kv_lens, values, logit_cap)
    assert_close("options", out, want, OUTPUT[torch.float32])


def test_a_latent_without_rope() -> None:
    config = replace(CONFIG, qk_rope_head_dim=0)
    world = World(config)
    feed = FEEDS[4]
    streams = streams_for(feed, config)
    write_history(world, streams, feed)
    out = world.step(streams, feed.q_lens, feed.kv_lens, feed.mode)
    want = expected_outputs(config, streams, feed.q_lens, feed.kv_lens)
    assert_close("no rope", out, want, OUTPUT[torch.float32])


def test_split_and_joined_arguments_are_the_same() -> None:
    feed, joined, split = FEEDS[5], World(), World()
    streams = streams_for(feed)
    write_history(joined, streams, feed)
    write_history(split, streams, feed)
    want = joined.step(streams, feed.q_lens, feed.kv_lens, feed.mode)
    batch = split.batch(feed.mode, feed.q_lens, feed.kv_lens)
    split.backend.init_forward_metadata(batch)
    part = parts_of(streams, feed.q_lens, feed.kv_lens)
    index = split.backend.forward_indexer(part.index_q, part.index_k, part.weights, 0, batch)
    latent = CONFIG.kv_lora_rank
    out = split.backend.forward_extend(
        part.q[..., :latent].flatten(1),
        part.kv[:, None, :latent],
        None,
        split.layer(0),
        batch,
        q_rope=part.q[..., latent:],
        k_rope=part.kv[:, None, latent:],
        topk_indices=index,
    )
    assert torch.equal(out, want)


def test_a_shared_layer_reads_the_last_full_layers_choice() -> None:
    world = World()
    streams = streams_for(FEEDS[4])
    write_history(world, streams, FEEDS[4])
    q_lens, kv_lens = FEEDS[4].q_lens, FEEDS[4].kv_lens
    batch = world.batch(ForwardMode.EXTEND, q_lens, kv_lens)
    backend = world.backend
    backend.init_forward_metadata(batch)
    part = parts_of(streams, q_lens, kv_lens)
    index = backend.forward_indexer(part.index_q, part.index_k, part.weights, 0, batch)
    kv = part.kv[:, None]
    backend.forward(part.q, kv, None, world.layer(0), batch, topk_indices=index)
    world.pool.get_key_buffer(1).copy_(world.pool.get_key_buffer(0))
    shared = backend.forward(part.q, kv, None, world.layer(1), batch)
    given = backend.forward(part.q, kv, None, world.layer(1), batch, topk_indices=index)
    assert torch.equal(shared, given)
    with pytest.raises(ConfigError, match=r"layer 2.*no topk_indices"):
        backend.forward(part.q, kv, None, world.layer(2), batch)
    backend.init_forward_metadata(batch)
    with pytest.raises(ConfigError, match=r"layer 1.*no topk_indices"):
        backend.forward(part.q, kv, None, world.layer(1), batch)


def test_scoring_is_skipped_when_everything_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(*args: object, **kwargs: object) -> None:
        raise AssertionError("scored a batch whose contexts all fit in k")

    monkeypatch.setattr("topkapi.ops.select", scored)
    world = World()
    streams = [make_stream(CONFIG, n, seed=n) for n in (K, 3)]
    out = world.step(streams, (K, 3), (K, 3), ForwardMode.EXTEND)
    want = expected_outputs(CONFIG, streams, (K, 3), (K, 3))
    assert_close("skip", out, want, OUTPUT[torch.float32])
    longer = [make_stream(CONFIG, n, seed=n) for n in (K + 1, 3)]
    with pytest.raises(AssertionError, match="scored a batch"):
        world.step(longer, (K + 1, 3), (K + 1, 3), ForwardMode.EXTEND)


def test_index_keys_of_skipped_steps_are_ranked_later() -> None:
    """A prompt within k writes its keys, or decoding past k would rank what is not there."""
    world = World()
    streams = [make_stream(CONFIG, K + 6, seed=3)]
    world.step(streams, (K,), (K,), ForwardMode.EXTEND)
    for n in range(K + 1, K + 7):
        out = world.step(streams, (1,), (n,), ForwardMode.DECODE)
        want = expected_outputs(CONFIG, streams, (1,), (n,))
        assert_close(f"decode {n}", out, want, OUTPUT[torch.float32])


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_padding_rows_are_inert(mode: ForwardMode) -> None:
    """Padded requests that write to slot 0, and rows past the metadata, give zeros."""
    q = 1 if mode.is_decode() else 3
    feed = Feed("padded", mode, (q, q), (20, 11))
    streams = streams_for(feed)
    world = World()
    write_history(world, streams, feed)
    want = world.step(streams, feed.q_lens, feed.kv_lens, mode)
    padded = (*feed.q_lens, q)
    batch = world.batch(mode, padded, (20, 11, q))
    batch.out_cache_loc[2 * q :] = 0
    world.pool.get_key_buffer(0)[0] = float("nan")
    world.pool.get_index_k_with_scale_buffer(0)[0] = float("nan")
    world.backend.init_forward_metadata(batch)
    part = parts_of([*streams, make_stream(CONFIG, q, 1)], padded, (20, 11, q))
    extra = parts_of(
        [*streams, make_stream(CONFIG, q + 2, 1)], (*feed.q_lens, q + 2), (20, 11, q + 2)
    )
    index = world.backend.forward_indexer(extra.index_q, part.index_k, extra.weights, 0, batch)
    assert index.shape[0] == 3 * q
    assert torch.equal(index[2 * q :], torch.full_like(index[2 * q :], -1))
    out = world.backend.forward(
        extra.q, part.kv[:, None], None, world.layer(0), batch, topk_indices=index
    )
    assert torch.equal(out[: 2 * q], want)
    assert not out[2 * q :].any()
    assert out.shape[0] == 3 * q + 2


def test_idle_gives_empty_output() -> None:
    world = World()
    batch = world.batch(ForwardMode.IDLE, (), ())
    world.backend.init_forward_metadata(batch)
    empty = make_stream(CONFIG, 1, 0).part(0, 0)
    out = run_layer(world.backend, world.layer(0), batch, empty)
    assert out.shape == (0, CONFIG.num_attention_heads * CONFIG.kv_lora_rank)
    rows = make_stream(CONFIG, 2, 0).q
    assert not world.backend.forward_decode(rows, None, None, world.layer(0), batch).any()


def test_save_kv_cache_false_leaves_the_cache() -> None:
    world = World()
    streams = [make_stream(CONFIG, 5, 0)]
    batch = world.batch(ForwardMode.EXTEND, (5,), (5,))
    world.backend.init_forward_metadata(batch)
    part = parts_of(streams, (5,), (5,))
    world.backend.forward(part.q, part.kv[:, None], None, world.layer(0), batch, False)
    assert not world.pool.get_key_buffer(0).any()


def test_wrong_calls_teach() -> None:
    world = World()
    batch = world.batch(ForwardMode.EXTEND, (5,), (5,))
    part = make_stream(CONFIG, 5, 0)
    with pytest.raises(ConfigError, match="init_forward_metadata"):
        world.backend.forward(part.q, None, None, world.layer(0), batch)
    world.backend.init_forward_metadata(batch)
    with pytest.raises(ShapeError, match="at least the step's 5 rows, got 4"):
        world.backend.forward(part.q[:4], None, None, world.layer(0), batch)
    layer = world.layer(0, is_cross_attention=True)
    with pytest.raises(ConfigError, match="cross-attention"):
        world.backend.forward(part.q, None, None, layer, batch)
    with pytest.raises(ConfigError, match="no index cache"):
        world.backend.forward_indexer(part.index_q, part.index_k, part.weights, 1, batch)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_kernel_is_told_its_phase(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows a request decode, prompts prefill, and deterministic steps are all alike."""
    calls: list[tuple[str, str]] = []
    original = ops.sparse_mla

    def recorded(*args: Any, phase: str, kernel: str, **kwargs: Any) -> Any:
        calls.append((phase, kernel))
        return original(*args, phase=phase, **kwargs)

    monkeypatch.setattr(ops, "sparse_mla", recorded)
    decode = "auto" if deterministic else "fa3"
    options = BackendOptions(
        prefill_kernel="triton", decode_kernel=decode, deterministic=deterministic
    )
    for feed in FEEDS:
        calls.clear()
        World(options=options).step(streams_for(feed), feed.q_lens, feed.kv_lens, feed.mode)
        prefill = deterministic or feed.mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        assert calls == [("prefill", "triton") if prefill else ("decode", "fa3")], feed.name


def test_two_backends_share_no_state() -> None:
    """Target and draft: other pools, other metadata, other graphs, no module global."""
    streams = [make_stream(CONFIG, 30, seed=b) for b in range(2)]
    one, two = World(seed=1), World(seed=2, options=BackendOptions(fuse_topk=False))
    want = World(seed=1).step(streams, (30, 20), (30, 20), ForwardMode.EXTEND)
    first = one.batch(ForwardMode.EXTEND, (30, 20), (30, 20))
    second = two.batch(ForwardMode.EXTEND, (4,), (4,))
    one.backend.init_forward_metadata(first)
    two.backend.init_forward_metadata(second)
    two.backend.init_cuda_graph_state(4, 4)
    run_layer(two.backend, two.layer(0), second, parts_of(streams, (4,), (4,)))
    out = run_layer(one.backend, one.layer(0), first, parts_of(streams, (30, 20), (30, 20)))
    assert torch.equal(out, want)
    with pytest.raises(ConfigError, match="no graph state"):
        one.backend.cuda_graph_bytes()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("compute", ["records", "dequantize_selected"])
def test_fp8_latents(fuse: bool, compute: str) -> None:
    """fp8 records against the oracle over what the records hold; index keys stay exact."""
    options = BackendOptions(fuse_topk=fuse, fp8_compute=compute, score_budget_bytes=2**16)
    world = World(options=options, kv_cache_dtype="fp8", index_cache_dtype="fp32")
    feed = FEEDS[3]  # more rows than one dequantised chunk
    streams = streams_for(feed)
    write_history(world, streams, feed)
    out = world.step(streams, feed.q_lens, feed.kv_lens, feed.mode)
    stored = []
    for stream, row in zip(streams, world.rows, strict=False):
        slots = world.table.req_to_token[row, : stream.kv.shape[0]].long()
        kv = _dequantized(world, slots)
        assert 0 < float((kv - stream.kv).norm() / stream.kv.norm()) < 0.05
        stored.append(replace(stream, kv=kv))
    want = expected_outputs(CONFIG, stored, feed.q_lens, feed.kv_lens)
    assert_close("fp8", out, want, OUTPUT[torch.float32])


def _dequantized(world: World, slots: torch.Tensor) -> torch.Tensor:
    """Records read byte by byte: e4m3 latent, one fp32 scale, bf16 rope."""
    records = world.pool.get_key_buffer(0)[slots, 0]
    latent = records[:, :24].contiguous().view(torch.float8_e4m3fn).float()
    scale = records[:, 24:28].contiguous().view(torch.float32)
    rope = records[:, 28:].contiguous().view(torch.bfloat16).float()
    return torch.cat((latent * scale, rope), dim=1)
