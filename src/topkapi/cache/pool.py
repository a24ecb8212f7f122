"""What is stored for each cached token, layer by layer: one latent record, one index key.

The pool owns the tensors and moves tokens between slots, always with both records. It knows
nothing about requests or free pages (`allocator`), nor how a record is laid out (`layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from topkapi import ops
from topkapi.config import DsaConfig
from topkapi.errors import ConfigError
from topkapi.layout import PAGE_SIZE
from topkapi.layout.index_key import fp8_page_views, index_key_layout
from topkapi.layout.latent import latent_layout
from topkapi.shapes import INTS, check

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.uint8,
}


class HasLayerId(Protocol):
    """A layer, as far as the pool cares."""

    @property
    def layer_id(self) -> int:
        """The layer's number in the model."""


@dataclass(frozen=True)
class TokenRecords:
    """Everything cached for N tokens, bytes as stored; keys are layer ids.

    Attributes:
        latent: per layer `[N, W]` in the pool's latent dtype.
        index_key: per layer that owns an indexer `[N, Di]`, float or e4m3 as uint8.
        index_scale: the same layers' `[N]` fp32 scales; empty without fp8.
    """

    latent: dict[int, torch.Tensor]
    index_key: dict[int, torch.Tensor]
    index_scale: dict[int, torch.Tensor]

    def to(self, device: torch.device | str) -> TokenRecords:
        """Copy to another device, to offload or restore. Synchronises when leaving the GPU."""
        parts = (self.latent, self.index_key, self.index_scale)
        return TokenRecords(*({i: x.to(device) for i, x in part.items()} for part in parts))


class NSATokenToKVPool:
    """Paged pools of latents and index keys: slot s is token `s % page_size` of page
    `s // page_size`, the same in every layer and in both pools. Slot 0 is the dummy.

    Index keys exist only on layers that own an indexer. Memory is zeroed, so that a slot that was
    never written reads as finite values.
    """

    def __init__(
        self,
        config: DsaConfig,
        num_pages: int,
        *,
        page_size: int = PAGE_SIZE,
        kv_cache_dtype: str = "bf16",
        index_cache_dtype: str | None = None,
        device: torch.device | str = "cpu",
        layers: Sequence[int] | None = None,
        page_hidden: tuple[int, torch.dtype] | None = None,
    ) -> None:
        """`num_pages` counts page 0, which is reserved. Dtypes are `bf16`, `fp16`, `fp32` or `fp8`;
        index keys follow the latents unless `index_cache_dtype` says otherwise. `layers` are the
        layer ids held here (default: all of the config, without MTP layers). `page_hidden` asks for
        one vector a page of that size and dtype: the model's hidden state of the page's last token,
        from which an MTP layer goes on behind a shared page.

        Raises `ConfigError` for an unknown dtype, or an fp8 index key that cannot be planar.
        """
        self.config = config
        self.page_size = page_size
        self.kv_cache_dtype = kv_cache_dtype
        self.index_cache_dtype = index_cache_dtype or kv_cache_dtype
        self.latent = latent_layout(_dtype("kv_cache_dtype", kv_cache_dtype))
        self.index_key = index_key_layout(_dtype("index_cache_dtype", self.index_cache_dtype))
        if self.index_key.scale_bytes and config.index_head_dim % 4:
            raise ConfigError(
                "index_cache_dtype: fp8 needs an index head dim that is a multiple of 4 "
                f"(its scales are aligned fp32), got {config.index_head_dim}"
            )
        self.device = torch.device(device)
        self.layers = tuple(range(config.num_hidden_layers) if layers is None else layers)
        self.num_pages = 0
        self.page_hidden: torch.Tensor | None = None
        if page_hidden is not None:
            width, dtype = page_hidden
            self.page_hidden = torch.zeros(0, width, dtype=dtype, device=self.device)
        self._kv: dict[int, torch.Tensor] = {}
        self._index: dict[int, torch.Tensor] = {}
        self.grow(num_pages)

    @property
    def size(self) -> int:
        """Token slots, the reserved page's included."""
        return self.num_pages * self.page_size

    def grow(self, num_pages: int) -> None:
        """Enlarge to `num_pages`, keeping contents, one layer at a time to bound the peak.

        Buffers become new tensors: graphs captured over the old ones must be captured anew.
        """
        if num_pages < max(self.num_pages, 1):
            raise ConfigError(
                f"NSATokenToKVPool: expected at least {max(self.num_pages, 1)} pages, "
                f"got {num_pages}"
            )
        width = self.latent.width(self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        index_shape = self.index_key.cache_shape(
            num_pages, self.page_size, self.config.index_head_dim
        )
        for layer_id in self.layers:
            shape = (num_pages * self.page_size, 1, width)
            self._kv[layer_id] = self._enlarged(self._kv.get(layer_id), shape, self.latent.dtype)
            if self.config.owns_indexer(layer_id):
                old = self._index.get(layer_id)
                self._index[layer_id] = self._enlarged(old, index_shape, self.index_key.dtype)
        if self.page_hidden is not None:
            old, width = self.page_hidden, self.page_hidden.shape[1]
            self.page_hidden = self._enlarged(old, (num_pages, width), old.dtype)
        self.num_pages = num_pages

    def _enlarged(
        self, old: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        buffer = torch.zeros(shape, dtype=dtype, device=self.device)
        if old is not None:
            buffer[: old.shape[0]] = old
        return buffer

    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers: 656 + 132 a layer for fp8 at V3.2's sizes, 656 alone
        on a layer that shares another's selection.
        """
        config = self.config
        latent = self.latent.bytes_per_token(config.kv_lora_rank, config.qk_rope_head_dim)
        index = self.index_key.bytes_per_token(config.index_head_dim)
        hidden = 0
        if self.page_hidden is not None:
            hidden = -(-self.page_hidden[:1].nbytes // self.page_size)
        return len(self._kv) * latent + len(self._index) * index + hidden

    def nbytes(self) -> int:
        """Bytes held by all buffers, the reserved page included."""
        return sum(x.nbytes for x in (*self._kv.values(), *self._index.values()))

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Latent records of a layer, `[slots, 1, W]`."""
        return self._kv[layer_id]

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Index keys of a layer: `[slots, Di]`, or uint8 `[pages, page * (Di + 4)]` for fp8.

        Raises `ConfigError` for a layer that owns no indexer.
        """
        if layer_id not in self._index:
            raise ConfigError(
                f"layer {layer_id} has no index cache: layers with one are {sorted(self._index)}; "
                "a shared layer reuses the selection of the last full layer before it"
            )
        return self._index[layer_id]

    def set_mla_kv_buffer(
        self, layer: HasLayerId, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor
    ) -> None:
        """Write `k_nope [T, L]` or `[T, 1, L]` and `k_rope [T, P]` or `[T, 1, P]` into slots
        `loc [T]` int64, quantising for fp8. Capture-safe.
        """
        k_nope, k_rope = k_nope.flatten(1), k_rope.flatten(1)
        ops.write_latent(self._kv[layer.layer_id], loc, k_nope, k_rope)

    def set_index_k_buffer(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Write `index_k [T, Di]` float into slots `loc [T]` int64, quantising for fp8.
        Capture-safe.
        """
        ops.write_index_key(self.get_index_k_with_scale_buffer(layer_id), loc, index_k)

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Write keys that are already quantised, `[T, Di]` e4m3, and `[T]` or `[T, 1]` fp32 scales
        into slots `loc [T]`. Capture-safe. Raises `ConfigError` unless the cache is fp8.
        """
        if not self.index_key.scale_bytes:
            raise ConfigError(
                "set_index_k_scale_buffer writes quantised keys, but this index cache is "
                f"{self.index_cache_dtype}; use set_index_k_buffer"
            )
        sizes: dict[str, int] = {"Di": self.config.index_head_dim}
        check("index_k", index_k, "T Di", sizes, dtypes=(torch.float8_e4m3fn,))
        check("loc", loc, "T", sizes, dtypes=INTS)
        keys, scales = self._index_rows(layer_id)
        page, offset = loc // self.page_size, loc % self.page_size
        keys[page, offset] = index_k.view(torch.uint8)
        assert scales is not None, "an fp8 layout has scales"
        scales[page, offset] = index_k_scale.reshape(-1)

    def _index_rows(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Views `[pages, page, Di]` of the keys (e4m3 as uint8) and `[pages, page]` of scales."""
        cache, dim = self.get_index_k_with_scale_buffer(layer_id), self.config.index_head_dim
        if not self.index_key.scale_bytes:
            return cache.view(self.num_pages, self.page_size, dim), None
        keys, scales = fp8_page_views(cache, dim, self.page_size)
        return keys.view(torch.uint8), scales

    def page_views(self) -> list[torch.Tensor]:
        """All that is cached, page by page: uint8 views `[pages, bytes]` of every latent and index
        buffer. Views of buffers that `grow` replaces.
        """
        buffers = [*self._kv.values(), *self._index.values()]
        if self.page_hidden is not None:
            buffers.append(self.page_hidden)
        return [buffer.view(self.num_pages, -1).view(torch.uint8) for buffer in buffers]

    def read_tokens(self, slots: torch.Tensor) -> TokenRecords:
        """Copy out everything cached for `slots [N]` int64, bytes as stored, on the pool's device.
        No synchronisation.
        """
        page, offset = slots // self.page_size, slots % self.page_size
        records = TokenRecords({i: kv[slots, 0] for i, kv in self._kv.items()}, {}, {})
        for layer_id in self._index:
            keys, scales = self._index_rows(layer_id)
            records.index_key[layer_id] = keys[page, offset]
            if scales is not None:
                records.index_scale[layer_id] = scales[page, offset]
        return records

    def write_tokens(self, slots: torch.Tensor, records: TokenRecords) -> None:
        """Put records from `read_tokens` of a pool of the same formats into `slots [N]` int64.
        No synchronisation. Raises `ConfigError` when layers, formats or counts differ.
        """
        self._check_records(slots, records)
        page, offset = slots // self.page_size, slots % self.page_size
        for layer_id, kv in self._kv.items():
            kv[slots, 0] = records.latent[layer_id]
        for layer_id in self._index:
            keys, scales = self._index_rows(layer_id)
            keys[page, offset] = records.index_key[layer_id]
            if scales is not None:
                scales[page, offset] = records.index_scale[layer_id]

    def copy_tokens(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy tokens from slots `source [N]` to slots `target [N]` int64, both records of every
        layer. Ranges may overlap: all of a layer is read before any is written. No sync.
        """
        self.write_tokens(target, self.read_tokens(source))

    def _check_records(self, slots: torch.Tensor, records: TokenRecords) -> None:
        scaled = set(self._index) if self.index_key.scale_bytes else set()
        found = (set(records.latent), set(records.index_key), set(records.index_scale))
        if found != (set(self._kv), set(self._index), scaled):
            raise ConfigError(
                f"token records of layers {sorted(found[0])} with index keys on {sorted(found[1])} "
                f"do not fit a pool of layers {sorted(self._kv)} with index keys on "
                f"{sorted(self._index)} ({self.index_cache_dtype})"
            )
        for latent in records.latent.values():
            if latent.dtype != self.latent.dtype or latent.shape[0] != slots.shape[0]:
                raise ConfigError(
                    f"token records: expected {slots.shape[0]} latents of {self.latent.dtype}, "
                    f"got {latent.shape[0]} of {latent.dtype}"
                )


def _dtype(argument: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"{argument}: expected one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]
