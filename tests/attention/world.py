"""A small world to run the backend in: pools, a table of shuffled slots, and streams of tokens.

A `Stream` is one request's projections, token by token, as a model would make them. Feeding any
part of it in any mode must give the outputs that the whole stream defines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from attention import oracle
from topkapi.attention import (
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    NativeSparseAttnBackend,
)
from topkapi.attention.layer_forward import LayerForward
from topkapi.cache import NSATokenToKVPool, PageAllocator, ReqToTokenPool
from topkapi.config import BackendOptions, DsaConfig

CONFIG = DsaConfig(
    model_type="deepseek_v32",
    num_hidden_layers=3,
    num_attention_heads=3,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    index_n_heads=5,
    index_head_dim=16,
    index_topk=8,
    scaling=0.31,
    indexer_types=("full", "shared", "full"),
    indexer_rope="half",
    max_position_embeddings=4096,
)


@dataclass(frozen=True)
class Stream:
    """N tokens of one request at one layer."""

    q: torch.Tensor
    kv: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor
    weights: torch.Tensor

    def to(self, device: str) -> Stream:
        return Stream(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def part(self, first: int, last: int) -> Stream:
        return Stream(*(getattr(self, name)[first:last] for name in self.__dataclass_fields__))


def make_stream(
    config: DsaConfig, length: int, seed: int, dtype: torch.dtype = torch.float32
) -> Stream:
    """Index keys come from few values, so that scores tie, at 0.0 above all."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(length, *shape, generator=draw).to(dtype)

    heads, dim = config.index_n_heads, config.index_head_dim
    keys = torch.randint(-1, 2, (length, dim), generator=draw).to(dtype)
    return Stream(
        q=normal(config.num_attention_heads, config.latent_width),
        kv=normal(config.latent_width),
        index_q=torch.randint(-1, 2, (length, heads, dim), generator=draw).to(dtype),
        index_k=keys,
        weights=torch.randint(1, 4, (length, heads), generator=draw).float() / 8,
    )


def concat(parts: Sequence[Stream]) -> Stream:
    names = Stream.__dataclass_fields__
    return Stream(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@dataclass
class World:
    """Pools and a backend, and slots for `requests` requests of up to `max_context` tokens."""

    config: DsaConfig = CONFIG
    requests: int = 4
    max_context: int = 192
    kv_cache_dtype: str = "fp32"
    index_cache_dtype: str | None = None
    options: BackendOptions = field(default_factory=BackendOptions)
    seed: int = 0
    page_size: int = 64
    device: str = "cpu"

    def __post_init__(self) -> None:
        pages = -(-self.max_context // self.page_size)
        num_pages = self.requests * pages + 1
        self.table = ReqToTokenPool(self.requests + 1, self.max_context, self.device)
        self.pool = NSATokenToKVPool(
            self.config,
            num_pages,
            page_size=self.page_size,
            kv_cache_dtype=self.kv_cache_dtype,
            index_cache_dtype=self.index_cache_dtype,
            device=self.device,
        )
        allocator = PageAllocator(num_pages, self.page_size)
        self.rows = list(reversed(self.table.alloc(self.requests)))
        draw = torch.Generator().manual_seed(self.seed)
        owned = torch.tensor(allocator.alloc(self.requests * pages))
        owned = owned[torch.randperm(len(owned), generator=draw)].view(self.requests, pages)
        offsets = torch.arange(self.page_size)
        for row, own in zip(self.rows, owned, strict=True):
            slots = (own[:, None] * self.page_size + offsets).flatten()[: self.max_context]
            self.table.req_to_token[row] = slots.int()
        self.backend = self.new_backend()

    def new_backend(self) -> NativeSparseAttnBackend:
        return NativeSparseAttnBackend(
            self.config,
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            device=self.device,
            options=self.options,
        )

    def layer(self, layer_id: int, **changes: object) -> AttentionLayer:
        config = self.config
        layer = AttentionLayer(
            tp_q_head_num=config.num_attention_heads,
            head_dim=config.latent_width,
            v_head_dim=config.kv_lora_rank,
            scaling=config.scaling,
            layer_id=layer_id,
        )
        return replace(layer, **changes)  # type: ignore[arg-type]

    def batch(
        self, mode: ForwardMode, q_lens: Sequence[int], kv_lens: Sequence[int]
    ) -> ForwardBatch:
        rows = self.rows[: len(q_lens)]
        return ForwardBatch.from_lengths(mode, q_lens, kv_lens, rows, self.table, self.pool)

    def step(
        self,
        streams: Sequence[Stream],
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        mode: ForwardMode,
        **layer_changes: object,
    ) -> torch.Tensor:
        """Feed the last `q_lens[b]` of `kv_lens[b]` tokens of each stream; `[R, H * L]`."""
        batch = self.batch(mode, q_lens, kv_lens)
        self.backend.init_forward_metadata(batch)
        part = parts_of(streams, q_lens, kv_lens).to(self.device)
        return run_layer(self.backend, self.layer(0, **layer_changes), batch, part)


def parts_of(streams: Sequence[Stream], q_lens: Sequence[int], kv_lens: Sequence[int]) -> Stream:
    """The new tokens of each request, one after another."""
    return concat(
        [stream.part(n - q, n) for stream, q, n in zip(streams, q_lens, kv_lens, strict=False)]
    )


def run_layer(
    backend: LayerForward, layer: AttentionLayer, batch: ForwardBatch, part: Stream
) -> torch.Tensor:
    """One layer over rows that may be padded: index, select, attend."""
    index = backend.forward_indexer(part.index_q, part.index_k, part.weights, layer.layer_id, batch)
    return backend.forward(part.q, part.kv[:, None], None, layer, batch, topk_indices=index)


def expected_outputs(
    config: DsaConfig,
    streams: Sequence[Stream],
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    sinks: torch.Tensor | None = None,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """The oracle's outputs `[sum(q_lens), H * L]` float64."""
    rows = []
    for stream, q, n in zip(streams, q_lens, kv_lens, strict=False):
        for position in range(n - q, n):
            seen = slice(0, position + 1)
            best = oracle.best_positions(
                stream.index_q[position],
                stream.index_k[seen],
                stream.weights[position],
                config.index_topk,
            )
            out = oracle.attend(
                stream.q[position],
                stream.kv[best],
                scale=config.scaling,
                v_dim=config.kv_lora_rank,
                sinks=sinks,
                logit_cap=logit_cap,
            )
            rows.append(out.flatten())
    return torch.stack(rows)
