"""Writing and reading cached records with plain torch: the definition is already vectorised."""

from __future__ import annotations

import torch

from topkapi.dispatch import Kernel, Problem
from topkapi.kernels.torch_cpu.fp8 import dequantize_latent_into
from topkapi.layout.latent import LATENT_FP8
from topkapi.reference import records


def gather_latent(
    kv_cache: torch.Tensor, slots: torch.Tensor, *, v_dim: int = 512, dtype: torch.dtype
) -> torch.Tensor:
    """See `reference.gather_latent`."""
    if kv_cache.dtype != torch.uint8:
        return records.gather_latent(kv_cache, slots, v_dim=v_dim, dtype=dtype)
    chosen = kv_cache[:, 0].index_select(0, slots.long().clamp_min(0))
    rope_bytes = chosen.shape[1] - LATENT_FP8.bytes_per_token(v_dim, 0)
    width = v_dim + rope_bytes // LATENT_FP8.rope_bytes
    out = torch.empty(chosen.shape[0], width, dtype=torch.float32, device=chosen.device)
    dequantize_latent_into(chosen, v_dim, out)
    return out.masked_fill_((slots < 0)[:, None], 0.0).to(dtype)


def _take_all(problem: Problem) -> str | None:
    return None


WRITE_LATENT = Kernel("torch", "write_latent", _take_all, records.write_latent)
WRITE_INDEX_KEY = Kernel("torch", "write_index_key", _take_all, records.write_index_key)
GATHER_LATENT = Kernel("torch", "gather_latent", _take_all, gather_latent)
