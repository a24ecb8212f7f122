"""What are the two halves of `kv_b_proj`, per head, ready to be absorbed into q and out?

`kv_b_proj.weight [H * (nope + V), L]` holds for each head first the key part W_UK, then the value
part W_UV. Plain weights are only viewed; an fp8 weight is dequantised once and kept until it
changes or moves. Knows nothing about attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from topkapi.errors import UnsupportedModelError
from topkapi.models.block_fp8 import dequantize_blocks

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class AbsorbedWeights:
    """The halves of one module's `kv_b_proj`, for `q_latent = q_nope @ w_kc` and `out @ w_vc`."""

    def __init__(self, projection: nn.Module, qk_nope_head_dim: int, v_head_dim: int) -> None:
        """Raises `UnsupportedModelError` for a weight that cannot be read: a wrapped projection
        (an adapter that is not merged), an unknown quantisation, weights that are offloaded.
        """
        self._projection: Any = projection
        self._nope = qk_nope_head_dim
        self._value = v_head_dim
        self._source: torch.Tensor | None = None
        self._version = -1
        self._dequantized: torch.Tensor | None = None
        self._check(projection)

    def _check(self, projection: nn.Module) -> None:
        weight = getattr(projection, "weight", None)
        known = type(projection) is nn.Linear or type(projection).__name__ == "FP8Linear"
        if not known or not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            raise UnsupportedModelError(
                f"kv_b_proj: expected nn.Linear or FP8Linear, got {type(projection).__name__}; "
                "merge adapters and undo other quantisation first"
            )
        if weight.device.type == "meta":
            raise UnsupportedModelError("kv_b_proj: its weight is offloaded (on the meta device)")
        if projection.bias is not None or weight.shape[0] % (self._nope + self._value):
            raise UnsupportedModelError(
                f"kv_b_proj: expected no bias and heads of {self._nope} + {self._value} rows, got "
                f"{list(weight.shape)}"
            )

    def halves(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`w_kc [H, nope, L]` and `w_vc [H, L, V]`, views of the weight (of `dtype` if it is fp8).

        No copy and no synchronisation, but for the first call after an fp8 weight changed.
        """
        weight = self._projection.weight.detach()
        if weight.dtype in _FLOAT8:
            weight = self._full_precision(weight, dtype)
        per_head = weight.view(-1, self._nope + self._value, weight.shape[1])
        return per_head[:, : self._nope], per_head[:, self._nope :].transpose(1, 2)

    def _full_precision(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        version = -1 if weight.is_inference() else weight._version
        kept, source = self._dequantized, self._source
        if (
            kept is not None
            and source is not None
            and kept.dtype == dtype
            and (source.data_ptr(), source.device) == (weight.data_ptr(), weight.device)
            and self._version == version
        ):
            return kept
        block = self._projection.block_size
        scales = self._projection.weight_scale_inv.detach()
        kept = dequantize_blocks(weight, scales, block and (block[0], block[1]), dtype)
        # The fp8 weight is held too, so that its address cannot be reused while it is the key.
        self._dequantized, self._source, self._version = kept, weight, version
        return kept
