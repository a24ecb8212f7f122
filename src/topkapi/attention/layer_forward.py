"""What does one layer compute, given a step's metadata?

Write the new tokens, choose what each row reads, attend to it. `LayerForward` is shared by the
backend and by every draft step of the multi-step backend; it does not know how metadata is made.
"""

from __future__ import annotations

import torch

from topkapi import ops
from topkapi.attention.dense import dense_attention
from topkapi.attention.forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from topkapi.attention.index_queries import quantizes_queries
from topkapi.attention.indexer import everything, select_tokens
from topkapi.attention.metadata import NSAIndexerMetadata, NSAMetadata, Transform
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.config import BackendOptions, DsaConfig
from topkapi.errors import ConfigError, ShapeError


class LayerForward:
    """Attention of every layer over one step's metadata.

    Attributes:
        forward_metadata: the current step's metadata; None before the first one.
    """

    def __init__(
        self,
        config: DsaConfig,
        *,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: NSATokenToKVPool,
        device: torch.device | str = "cpu",
        options: BackendOptions | None = None,
    ) -> None:
        """Holds references alone: no tensor is allocated and nothing is shared between two."""
        self.config = config
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.device = torch.device(device)
        self.options = options or BackendOptions()
        self.forward_metadata: NSAMetadata | None = None

    @property
    def metadata(self) -> NSAMetadata:
        """The current step's metadata. Raises `ConfigError` before `init_forward_metadata`."""
        if self.forward_metadata is None:
            raise ConfigError("no metadata yet: call init_forward_metadata(batch) before a forward")
        if not self.forward_metadata.captured and _is_capturing(self.device):
            self.forward_metadata = self.forward_metadata.for_capture()
        return self.forward_metadata

    def get_indexer_metadata(self, layer_id: int, batch: ForwardBatch) -> NSAIndexerMetadata:
        """The step's metadata for an indexer that scores by itself; the same for every layer."""
        transform: Transform = "fused" if self.options.fuse_topk else "unfused"
        return NSAIndexerMetadata(self.metadata, transform, self.options.topk_kernel)

    def write_index_key(self, k: torch.Tensor, layer_id: int, batch: ForwardBatch) -> None:
        """Cache the new tokens' index keys `k [T, Di]`: on every step, even one that does not
        score, or later steps would rank what is not there. Capture-safe.
        """
        loc = batch.out_cache_loc
        if k.shape[0]:
            self.token_to_kv_pool.set_index_k_buffer(layer_id, loc, k[: loc.shape[0]])

    def forward_indexer(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor,
        weights: torch.Tensor | None,
        layer_id: int,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        """Cache index keys and select, for a layer that owns an indexer.

        Args:
            q: `[R, Hi, Di]` and weights: `[R, Hi]` fp32, scales included; both may be None where
                `metadata.selects_everything`: they are not read then.
            k: `[T, Di]`, the new tokens' keys.

        Returns `topk_indices` for `forward_*` of this layer and of those that share its selection:
        `[R, topk]` int32, or None when every context fits in topk, so that there is nothing to
        choose. Raises `ConfigError` when it must score and q or weights are missing.
        """
        self.write_index_key(k, layer_id, batch)
        metadata = self.metadata
        if metadata.selects_everything or metadata.num_rows == 0:
            return None
        if q is None or weights is None:
            raise ConfigError(
                f"layer {layer_id}: contexts of up to {metadata.max_seq_len_k} tokens exceed "
                f"topk {metadata.topk}, so the indexer's q and weights are needed"
            )
        index_cache = self.token_to_kv_pool.get_index_k_with_scale_buffer(layer_id)
        return select_tokens(
            metadata,
            q,
            weights,
            index_cache,
            fused=self.options.fuse_topk,
            fp8_queries=quantizes_queries(self.options, index_cache),
            budget_bytes=self.options.score_budget_bytes,
            batch_invariant=self.options.deterministic,
            kernel=self.options.indexer_kernel,
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of every mode but DECODE and IDLE.

        Args:
            q: `[R, H, L]` beside `q_rope [R, H, P]`, else `[R, H, L + P]`; heads may be flattened.
            k: `[T, 1, L]` beside `k_rope [T, 1, P]`, else `[T, 1, L + P]`.
            v: not read; the latent is the value.
            save_kv_cache: write k first.
            topk_indices: from `forward_indexer`. None means everything where all contexts fit in
                topk, and the last selection of this step on a layer that shares it.

        Returns `[R, H * L]` in q's dtype; padding rows are zero. Capture-safe. Raises `ConfigError`
        when there is no selection and contexts exceed topk: nothing turns dense unasked.
        """
        return self._forward(q, k, layer, batch, save_kv_cache, q_rope, k_rope, topk_indices)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of DECODE and IDLE; arguments and result as in `forward_extend`."""
        return self._forward(q, k, layer, batch, save_kv_cache, q_rope, k_rope, topk_indices)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward_decode` or `forward_extend`, as the batch's mode says."""
        decode = batch.forward_mode.is_decode_or_idle()
        step = self.forward_decode if decode else self.forward_extend
        return step(q, k, v, layer, batch, save_kv_cache, q_rope, k_rope, topk_indices)

    def use_dense(self, batch: ForwardBatch) -> bool:
        """Whether a layer with `w_kc` and `w_vc` should call `forward_dense` on this batch.

        The rule: prompts without a cached prefix, all within topk, of `dense_min_tokens` or more on
        average (docs/backend.md has the measured crossover). Never when `deterministic`: a chunked
        prompt takes the sparse path, and must give the same bits.
        """
        options, q_lens = self.options, self.metadata.nsa_extend_seq_lens_list
        return (
            options.dense_prefill
            and not options.deterministic
            and batch.forward_mode is ForwardMode.EXTEND
            and not any(batch.extend_prefix_lens_cpu or [1])
            and 0 < options.dense_min_tokens * len(q_lens) <= sum(q_lens)
            and self.metadata.selects_everything
        )

    def forward_dense(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        k_rope: torch.Tensor,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """One-shot multi-head attention of whole prompts, not absorbed.

        Args:
            q: `[T, H, nope + P]`. k: latent `[T, 1, L]`. k_rope: `[T, 1, P]`.

        Returns `[T, H * V]`: values, not latents. The index keys still have to be written. Raises
        `ConfigError` for a layer with sinks or a logit cap, or without `w_kc` and `w_vc`.
        """
        if layer.w_kc is None or layer.w_vc is None or layer.sinks is not None or layer.logit_cap:
            raise ConfigError(
                f"layer {layer.layer_id}: the dense path needs w_kc and w_vc, and takes neither "
                "sinks nor a logit cap"
            )
        if save_kv_cache:
            self._save(layer, batch, k, k_rope)
        lens = self.metadata.nsa_extend_seq_lens_list
        latent, rope = k.flatten(1), k_rope.flatten(1)
        out = dense_attention(q, latent, rope, layer.w_kc, layer.w_vc, lens, scale=layer.scaling)
        return out.flatten(1)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool,
        q_rope: torch.Tensor | None,
        k_rope: torch.Tensor | None,
        topk_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        if layer.is_cross_attention:
            raise ConfigError(f"layer {layer.layer_id}: DSA has no cross-attention")
        if save_kv_cache and k is not None:
            self._save(layer, batch, k, k_rope)
        metadata = self.metadata
        queries = _queries(q, q_rope, layer)
        given, rows = queries.shape[0], metadata.num_rows
        if given < rows:
            raise ShapeError(f"q: expected at least the step's {rows} rows, got {given}")
        latent_dim = layer.v_head_dim
        if rows == 0 or metadata.buffers.num_requests == 0:
            return queries.new_zeros(given, layer.tp_q_head_num * latent_dim)
        slots = self._slots(layer, topk_indices)
        out = self._attend(queries[:rows], slots, layer, batch)
        if given > rows:
            out = torch.cat((out, out.new_zeros(given - rows, *out.shape[1:])))
        return out.flatten(1)

    def _save(
        self,
        layer: AttentionLayer,
        batch: ForwardBatch,
        k: torch.Tensor,
        k_rope: torch.Tensor | None,
    ) -> None:
        loc = batch.out_cache_loc
        k = k.flatten(1)[: loc.shape[0]]
        if k_rope is None:
            k, k_rope = k[:, : layer.v_head_dim], k[:, layer.v_head_dim :]
        if k.shape[0]:
            k_rope = k_rope.flatten(1)[: loc.shape[0]]
            self.token_to_kv_pool.set_mla_kv_buffer(layer, loc, k, k_rope)

    def _slots(self, layer: AttentionLayer, topk_indices: torch.Tensor | None) -> torch.Tensor:
        """`[R, K]` slots to attend to. Selections are remembered for layers that share them."""
        metadata, shared = self.metadata, self.metadata.selection
        if topk_indices is not None:
            topk_indices = topk_indices[: metadata.num_rows]
            if not self.options.fuse_topk:
                topk_indices = metadata.context.slots(topk_indices)
            shared.slots = topk_indices
        elif metadata.selects_everything and shared.slots is None:
            positions = everything(metadata, full_width=self.options.deterministic)
            shared.slots = metadata.context.slots(positions)
        elif self.config.owns_indexer(layer.layer_id) and not metadata.selects_everything:
            shared.slots = None
        if shared.slots is None:
            raise ConfigError(
                f"layer {layer.layer_id}: contexts of up to {metadata.max_seq_len_k} tokens exceed "
                f"topk {metadata.topk}, and no topk_indices were given; call forward_indexer"
            )
        return shared.slots

    def _attend(
        self, q: torch.Tensor, slots: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """`[R, H, L]`. fp8 latents are attended as records, or dequantised where selected."""
        options = self.options
        prefill = options.deterministic or batch.forward_mode.is_extend_without_speculative()
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)

        def attend(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return ops.sparse_mla(
                q,
                cache,
                slots,
                scale=layer.scaling,
                v_dim=layer.v_head_dim,
                sinks=layer.sinks,
                logit_cap=layer.logit_cap,
                phase="prefill" if prefill else "decode",
                budget_bytes=options.score_budget_bytes,
                batch_invariant=options.deterministic,
                state=self.metadata.flashmla_metadata,
                kernel=options.prefill_kernel if prefill else options.decode_kernel,
            )[0]

        if cache.dtype != torch.uint8 or options.fp8_compute == "records":
            return attend(q, cache, slots)
        width = slots.shape[1]
        chunk = max(1, options.score_budget_bytes // (width * layer.head_dim * q.element_size()))
        parts = []
        for first in range(0, q.shape[0], chunk):
            part_q, part = q[first : first + chunk], slots[first : first + chunk]
            selected = ops.gather_latent(
                cache, part.flatten(), v_dim=layer.v_head_dim, dtype=q.dtype
            )
            places = torch.arange(part.numel(), device=part.device).view(part.shape)
            parts.append(attend(part_q, selected[:, None], torch.where(part < 0, -1, places)))
        return torch.cat(parts)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _queries(q: torch.Tensor, q_rope: torch.Tensor | None, layer: AttentionLayer) -> torch.Tensor:
    """`[R, H, L + P]` from either form of the arguments."""
    rows, heads, latent_dim = q.shape[0], layer.tp_q_head_num, layer.v_head_dim
    if q_rope is None:
        return q.reshape(rows, heads, layer.head_dim)
    q_rope = q_rope.reshape(rows, heads, layer.head_dim - latent_dim)
    return torch.cat((q.reshape(rows, heads, latent_dim), q_rope), dim=2)
