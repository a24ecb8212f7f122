"""Does the dense path compute what the absorbed sparse path does, and only when it may?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.world import CONFIG, World
from tolerances import OUTPUT, assert_close
from topkapi.attention import AttentionLayer, ForwardBatch, ForwardMode
from topkapi.config import BackendOptions
from topkapi.errors import ConfigError

K = CONFIG.index_topk
NOPE, ROPE, LATENT = CONFIG.qk_nope_head_dim, CONFIG.qk_rope_head_dim, CONFIG.kv_lora_rank
HEADS, VALUE = CONFIG.num_attention_heads, CONFIG.v_head_dim
DENSE = BackendOptions(dense_min_tokens=1)


class Rows:
    """Projections of T rows before absorption, and a layer that carries kv_b_proj's halves."""

    def __init__(self, world: World, rows: int, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(rows)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(dtype)

        self.q_nope, self.q_rope = normal(rows, HEADS, NOPE), normal(rows, HEADS, ROPE)
        self.latent, self.k_rope = normal(rows, 1, LATENT), normal(rows, 1, ROPE)
        w_kc = normal(HEADS, NOPE, LATENT) / LATENT**0.5
        w_vc = normal(HEADS, LATENT, VALUE) / LATENT**0.5
        self.layer: AttentionLayer = world.layer(0, w_kc=w_kc, w_vc=w_vc)

    def dense(self, world: World, batch: ForwardBatch) -> torch.Tensor:
        q = torch.cat((self.q_nope, self.q_rope), dim=2)
        return world.backend.forward_dense(q, self.latent, self.layer, batch, self.k_rope)

    def absorbed(self, world: World, batch: ForwardBatch) -> torch.Tensor:
        q_latent = torch.einsum("thn,hnl->thl", self.q_nope, self.layer.w_kc)
        out = world.backend.forward(
            q_latent,
            self.latent,
            None,
            self.layer,
            batch,
            q_rope=self.q_rope,
            k_rope=self.k_rope,
        )
        out = out.view(-1, HEADS, LATENT)
        return torch.einsum("thl,hlv->thv", out, self.layer.w_vc).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [(K, 1, 3), (1,), (K, K)])
def test_dense_is_absorbed_when_everything_is_selected(
    dtype: torch.dtype, lens: tuple[int, ...]
) -> None:
    """And it writes the same cache; padding rows give zeros."""
    results, caches = [], []
    for path in ("dense", "absorbed"):
        world = World(kv_cache_dtype="fp32", options=DENSE)
        batch = world.batch(ForwardMode.EXTEND, lens, lens)
        batch.out_cache_loc = torch.cat((batch.out_cache_loc, torch.zeros(2, dtype=torch.int64)))
        world.backend.init_forward_metadata(batch)
        assert world.backend.use_dense(batch)
        rows = Rows(world, sum(lens) + 2, dtype)
        results.append(getattr(rows, path)(world, batch))
        caches.append(world.pool.get_key_buffer(0)[64:])
    assert results[0].dtype == dtype
    assert not results[0][sum(lens) :].any()
    loose = replace(OUTPUT[dtype], relative=2 * OUTPUT[dtype].relative)
    assert_close("dense", results[0], results[1], loose)
    assert torch.equal(*caches)


@pytest.mark.parametrize(
    ("name", "mode", "q_lens", "kv_lens", "options"),
    [
        ("a longer context", ForwardMode.EXTEND, (K + 1, 2), (K + 1, 2), DENSE),
        ("a cached prefix", ForwardMode.EXTEND, (3, 2), (3, 3), DENSE),
        ("decode rows", ForwardMode.MIXED, (3, 1), (3, 1), DENSE),
        ("decode", ForwardMode.DECODE, (1, 1), (1, 1), DENSE),
        ("verify", ForwardMode.TARGET_VERIFY, (2, 2), (2, 2), DENSE),
        (
            "deterministic",
            ForwardMode.EXTEND,
            (3,),
            (3,),
            BackendOptions(dense_min_tokens=1, deterministic=True),
        ),
        (
            "switched off",
            ForwardMode.EXTEND,
            (3,),
            (3,),
            BackendOptions(dense_min_tokens=1, dense_prefill=False),
        ),
        ("short prompts", ForwardMode.EXTEND, (3, 8), (3, 8), BackendOptions(dense_min_tokens=6)),
        ("no rows", ForwardMode.EXTEND, (), (), DENSE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_rule_keeps_dense_from(
    name: str,
    mode: ForwardMode,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    options: BackendOptions,
) -> None:
    world = World(options=options)
    batch = world.batch(mode, q_lens, kv_lens)
    world.backend.init_forward_metadata(batch)
    assert not world.backend.use_dense(batch), name


def test_what_dense_cannot_do_is_refused() -> None:
    world = World()
    batch = world.batch(ForwardMode.EXTEND, (3,), (3,))
    world.backend.init_forward_metadata(batch)
    rows = Rows(world, 3)
    for changes in ({"sinks": torch.zeros(HEADS)}, {"logit_cap": 3.0}, {"w_kc": None}):
        rows.layer = replace(rows.layer, **changes)
        with pytest.raises(ConfigError, match="dense path needs w_kc and w_vc"):
            rows.dense(world, batch)
        rows = Rows(world, 3)
