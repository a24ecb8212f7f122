"""What does a Transformers DSA attention module compute, on Topkapi's backend?

`DsaAttention` stands in for the module's forward and uses the module's own submodules: projections,
norms, indexer, output gate. MLA stays absorbed: `q_latent = q_nope @ W_UK`, attention over cached
latents, `out @ W_UV` (DeepSeek-V2, section 2.1). Knows nothing about Transformers' caches or masks:
a `DsaStep` says which rows there are and where they are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from topkapi.attention.forward_batch import AttentionLayer, ForwardBatch
from topkapi.attention.layer_forward import LayerForward
from topkapi.attention.rope import apply_rope
from topkapi.config import DsaConfig
from topkapi.device import device_info
from topkapi.errors import ConfigError, ShapeError
from topkapi.models.absorbed import AbsorbedWeights
from topkapi.models.row_invariant import per_head


@dataclass(frozen=True, eq=False)
class StepPart:
    """Rows `first:last` of a step that are attended at once, with metadata of their own."""

    backend: LayerForward
    batch: ForwardBatch
    first: int
    last: int


class DsaStep:
    """One forward pass of a model, shared by all its layers.

    Attributes:
        parts: rows `[T]` in order, cut so that per-head temporaries stay small. A later part may
            belong to the same request: its context includes what earlier parts wrote.
        valid_rows: `[T]` int64, where the T rows lie among Transformers' flattened `[B * S]` ones;
            None when all are valid. The others are padding: never attended, zero in the output.
    """

    def __init__(self, backend: LayerForward, batch: ForwardBatch) -> None:
        """A step of one part. The backend's metadata for `batch` must be initialised already."""
        self.parts: tuple[StepPart, ...] = (
            StepPart(backend, batch, 0, batch.out_cache_loc.shape[0]),
        )
        self.valid_rows: torch.Tensor | None = None

    @classmethod
    def of_parts(cls, parts: Sequence[StepPart], valid_rows: torch.Tensor | None) -> DsaStep:
        """A step of several parts, or of none (all rows are padding)."""
        step = cls.__new__(cls)
        step.parts, step.valid_rows = tuple(parts), valid_rows
        return step


class DsaAttention:
    """Callable in place of one attention module's forward.

    Takes the keyword arguments of Transformers' decoder layers and `dsa_step=` among them; masks
    and caches that come along are not read then. Returns what the family's module returns.

    Attributes:
        exclusive: a call without a step is an error; otherwise it computes what Transformers wrote.
    """

    def __init__(self, module: Any, config: DsaConfig, layer_id: int) -> None:
        self.exclusive = False
        self._module = module
        self._config = config
        self._layer_id = layer_id
        self._absorbed = AbsorbedWeights(
            module.kv_b_proj, config.qk_nope_head_dim, config.v_head_dim
        )
        # GLM's decoder layers hand the selection on; here the step's metadata does.
        self._returns = 3 if hasattr(module, "skip_topk") else 2
        self._gated = hasattr(module, "q_gate_proj")

    def __call__(self, *args: Any, dsa_step: DsaStep | None = None, **kwargs: Any) -> Any:
        """The module's own arguments and results; see `run` for what is read when there is a step.

        Raises `ConfigError` without a step where `exclusive`.
        """
        if dsa_step is not None:
            return self.run(*args, dsa_step=dsa_step, **kwargs)
        if self.exclusive:
            raise ConfigError(
                "dsa_step: this model's attention runs on Topkapi and is entered through the "
                "decoder (model(...) or model.generate(...)); use topkapi.detach(model) otherwise"
            )
        return type(self._module).forward(self._module, *args, **kwargs)

    def run(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *unused_args: Any,
        dsa_step: DsaStep,
        **unused: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """`hidden_states [B, S, hidden]`; cos and sin `[B or 1, S, P]` in the model's dtype.

        Returns the attention's output of the same shape, and None for weights (and selection).
        Raises `ShapeError` when the step has other rows. Capture-safe if the step has one part.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        leading = hidden_states.shape[:-1]
        cos, sin = (_angles(table, leading) for table in position_embeddings)
        valid = dsa_step.valid_rows
        if valid is not None:
            rows, cos, sin = rows[valid], cos[valid], sin[valid]
        out = self._run_parts(dsa_step, rows, cos, sin)
        if valid is not None:
            full = hidden_states.new_zeros(leading.numel(), out.shape[1])
            out = full.index_copy_(0, valid, out)
        out = out.view(*leading, out.shape[1])
        return (out, None, None) if self._returns == 3 else (out, None)

    def _run_parts(
        self, step: DsaStep, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        total = step.parts[-1].last if step.parts else 0
        if len(step.parts) == 1 and rows.shape[0] >= total:
            # Rows past the step's (data-parallel padding) come out as zeros from the backend.
            return self._attend(step.parts[0], rows, cos, sin)
        if rows.shape[0] != total:
            raise ShapeError(f"dsa_step: has {total} rows, the hidden states {rows.shape[0]}")
        out = torch.empty_like(rows)
        for part in step.parts:
            at = slice(part.first, part.last)
            out[at] = self._attend(part, rows[at], cos[at], sin[at])
        return out

    def _attend(
        self, part: StepPart, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """`x [T, hidden]` to `[T, hidden]`, caching the new tokens on the way."""
        module, config, backend, batch = self._module, self._config, part.backend, part.batch
        compressed = module.q_a_proj(x)
        residual = module.q_a_layernorm(compressed)
        q, gate = self._queries(compressed, residual)
        nope = config.qk_nope_head_dim
        q_rope = apply_rope(q[..., nope:], cos, sin, "interleaved")
        kv = module.kv_a_proj_with_mqa(x)
        latent = module.kv_a_layernorm(kv[:, : config.kv_lora_rank])[:, None]
        k_rope = apply_rope(kv[:, config.kv_lora_rank :], cos, sin, "interleaved")[:, None]
        w_kc, w_vc = self._absorbed.halves(x.dtype)
        layer = self._layer(q.shape[1], w_kc, w_vc)
        topk_indices = self._select(part, x, residual, cos, sin)
        invariant = backend.options.deterministic
        if backend.use_dense(batch):
            whole = torch.cat((q[..., :nope], q_rope), dim=-1)
            out = backend.forward_dense(whole, latent, layer, batch, k_rope)
        else:
            q_latent = per_head(q[..., :nope], w_kc, row_invariant=invariant)
            out = backend.forward(
                q_latent,
                latent,
                None,
                layer,
                batch,
                q_rope=q_rope,
                k_rope=k_rope,
                topk_indices=topk_indices,
            )
            out = out.view(-1, q.shape[1], config.kv_lora_rank)
            out = per_head(out, w_vc, row_invariant=invariant).flatten(1)
        if gate is not None:
            out = (out * torch.sigmoid(gate.float())).to(out.dtype)
        projected: torch.Tensor = module.o_proj(out)
        return projected

    def _queries(
        self, compressed: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`q [T, H, nope + P]`, and axk2's output gate `[T, H * V]` before its sigmoid."""
        config = self._config
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        tokens = residual.shape[0]
        if not self._gated:
            return self._module.q_b_proj(residual).view(tokens, -1, width), None
        both = self._module.q_gate_proj(torch.cat((residual, compressed), dim=-1))
        both = both.view(tokens, -1, width + config.v_head_dim)
        return both[..., :width], both[..., width:].flatten(1)

    def _layer(self, heads: int, w_kc: torch.Tensor, w_vc: torch.Tensor) -> AttentionLayer:
        config = self._config
        return AttentionLayer(
            tp_q_head_num=heads,
            head_dim=config.latent_width,
            v_head_dim=config.kv_lora_rank,
            scaling=config.scaling,
            layer_id=self._layer_id,
            w_kc=w_kc,
            w_vc=w_vc,
        )

    def _select(
        self,
        part: StepPart,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor | None:
        """Cache the index keys and select, or None on a layer that shares a selection."""
        config, backend = self._config, part.backend
        if not config.owns_indexer(self._layer_id):
            return None
        indexer, style = self._module.indexer, config.indexer_rope
        keys = indexer.wk(x)
        keys = indexer.k_norm(keys.to(indexer.k_norm.weight.dtype)).to(x.dtype)
        keys = apply_rope(keys, cos, sin, style)
        if backend.metadata.selects_everything:
            return backend.forward_indexer(None, keys, None, self._layer_id, part.batch)
        q = indexer.wq_b(residual).view(-1, config.index_n_heads, config.index_head_dim)
        q = apply_rope(q, cos, sin, style)
        invariant = backend.options.deterministic
        weights = head_weights(indexer.weights_proj, x, row_invariant=invariant)
        weights = weights * (config.index_n_heads**-0.5 * config.index_head_dim**-0.5)
        return backend.forward_indexer(q, keys, weights, self._layer_id, part.batch)


def _angles(table: torch.Tensor, leading: torch.Size) -> torch.Tensor:
    """`[T, P / 2]` from Transformers' cos or sin `[B or 1, S, P]`, whose halves are equal."""
    half = table[..., : table.shape[-1] // 2]
    return half.expand(*leading, half.shape[-1]).reshape(-1, half.shape[-1])


def head_weights(projection: Any, x: torch.Tensor, *, row_invariant: bool) -> torch.Tensor:
    """`[T, Hi]` fp32, without a rounding to the model's dtype: it would flip near-ties.

    NVIDIA's products of 16-bit numbers can give the sums as they are, in fp32, and take half the
    time of a product of copies. Row by row the same bits come of copies alone, inside of
    `RowInvariant`.
    """
    if type(projection) is not nn.Linear or projection.weight.dtype.itemsize == 1:
        weights: torch.Tensor = projection(x).float()
        return weights
    weight = projection.weight
    sums_in_fp32 = weight.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
    if sums_in_fp32 and not row_invariant and device_info(x.device).backend == "cuda":
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return nn.functional.linear(x.float(), weight.float())
