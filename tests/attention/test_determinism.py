"""Are a request's bits its own, whatever shares its batch and however its prompt was cut?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from attention.world import CONFIG, Stream, World, concat, make_stream, parts_of
from topkapi.attention import ForwardMode
from topkapi.config import BackendOptions, DsaConfig

WIDE = replace(
    CONFIG,
    num_attention_heads=16,
    kv_lora_rank=128,
    qk_rope_head_dim=32,
    index_n_heads=8,
    index_head_dim=64,
    index_topk=80,
)
LENGTH = 90


@dataclass(frozen=True)
class Way:
    """One way to feed the same request: cuts of its tokens, its neighbours, its mode."""

    name: str
    cuts: tuple[int, ...]
    neighbours: tuple[int, ...] = ()
    first: bool = True
    decode: bool = False
    padding: int = 0


WAYS = (
    Way("at once", (LENGTH,)),
    Way("among others", (LENGTH,), neighbours=(37, 90, 5)),
    Way("last of others", (LENGTH,), neighbours=(61,), first=False),
    Way("chunked", (1, 30, 31, 63, 64, 65, LENGTH)),
    Way("chunked among others", (40, 88, LENGTH), neighbours=(3, 90)),
    Way("cached prefix", (85, LENGTH), neighbours=(90,), first=False),
    Way("decoded at the end", tuple(range(70, LENGTH + 1)), decode=True),
    Way("decoded among others", tuple(range(70, LENGTH + 1)), (64, 70, 7), decode=True),
    Way("padded", (33, LENGTH), padding=7),
)


@dataclass
class Fed:
    """What became of one request: outputs `[LENGTH, H * L]`, and each token's positions."""

    outputs: torch.Tensor
    selections: list[list[int]]


def feed(world: World, stream: Stream, others: Sequence[Stream], way: Way) -> Fed:
    """Feed all of the stream's tokens as `way` says."""
    outputs, selections, start = [], [], 0
    place = 0 if way.first else len(others)
    streams = list(others)
    streams.insert(place, stream)
    for end in way.cuts:
        decode = way.decode and end - start == 1
        # Neighbours have lengths of their own, and new tokens in every step.
        kv_lens = [min(max(end * n // LENGTH, 1), n) for n in way.neighbours]
        q_lens = [1 if decode else max(n // 2, 1) for n in kv_lens]
        kv_lens.insert(place, end)
        q_lens.insert(place, end - start)
        batch = world.batch(ForwardMode.DECODE if decode else ForwardMode.MIXED, q_lens, kv_lens)
        zeros = torch.zeros(way.padding, dtype=torch.int64)
        batch.out_cache_loc = torch.cat((batch.out_cache_loc, zeros))
        filler = make_stream(world.config, way.padding, 99, stream.q.dtype)
        part = concat([parts_of(streams, q_lens, kv_lens), filler])
        world.backend.init_forward_metadata(batch)
        index = world.backend.forward_indexer(part.index_q, part.index_k, part.weights, 0, batch)
        kv = part.kv[:, None]
        out = world.backend.forward(part.q, kv, None, world.layer(0), batch, topk_indices=index)
        rows = slice(sum(q_lens[:place]), sum(q_lens[: place + 1]))
        outputs.append(out[rows])
        if index is None:
            selections += [list(range(n)) for n in range(start + 1, end + 1)]
        else:
            table = world.table.req_to_token[world.rows[place]].tolist()
            selections += [
                [table.index(slot) for slot in row if slot >= 0] for row in index[rows].tolist()
            ]
        start = end
    return Fed(torch.cat(outputs), selections)


def fed_in_every_way(
    config: DsaConfig, options: BackendOptions, kv_cache_dtype: str, dtype: torch.dtype
) -> dict[str, Fed]:
    """The same request, fed in nine ways to nine worlds."""
    results = {}
    for way in WAYS:
        world = World(config, options=options, kv_cache_dtype=kv_cache_dtype)
        stream = make_stream(config, LENGTH, seed=1, dtype=dtype)
        others = [make_stream(config, n, 50 + n, dtype) for n in way.neighbours]
        results[way.name] = feed(world, stream, others, way)
    return results


@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp32", "fp8"])
def test_deterministic_bits_do_not_depend_on_the_batch(
    config: DsaConfig, dtype: torch.dtype, kv_cache_dtype: str
) -> None:
    """Every output bit of every token. Without the option, "wide" differs where widths do."""
    results = fed_in_every_way(config, BackendOptions(deterministic=True), kv_cache_dtype, dtype)
    want = results["at once"].outputs
    assert not [name for name, fed in results.items() if not torch.equal(fed.outputs, want)]


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])
def test_selections_never_depend_on_the_batch(kv_cache_dtype: str) -> None:
    """Without the option, too: plateaus of ties are broken by position alone."""
    results = fed_in_every_way(CONFIG, BackendOptions(), kv_cache_dtype, torch.float32)
    want = results["at once"].selections
    assert len(want) == LENGTH
    assert not [name for name, fed in results.items() if fed.selections != want]
