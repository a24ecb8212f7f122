"""Where the bytes of one cached latent lie: `latent | scales | rope`, one record a token.

The fp8 record of 512 + 64 dims is FlashMLA's token-level layout, 656 bytes:
512 x e4m3 | 4 x fp32 scale | 64 x bf16 rope. Unquantised records are `latent | rope` in one dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LatentLayout:
    """Format of a latent record. `group` is the number of latent values that share one fp32 scale
    (0: not quantised). `dtype` is the dtype of the cache tensor that holds such records.
    """

    name: str
    dtype: torch.dtype
    latent_bytes: int
    rope_bytes: int
    group: int = 0

    def num_scales(self, latent_dim: int) -> int:
        """fp32 scales in one record; the last group may be short."""
        return -(-latent_dim // self.group) if self.group else 0

    def bytes_per_token(self, latent_dim: int, rope_dim: int) -> int:
        """Size of one record, in bytes: 656 for fp8 with 512 + 64 dims."""
        scales = 4 * self.num_scales(latent_dim)
        return latent_dim * self.latent_bytes + scales + rope_dim * self.rope_bytes

    def width(self, latent_dim: int, rope_dim: int) -> int:
        """Last dimension of the cache tensor `[slots, 1, width]`, in elements of `dtype`."""
        return self.bytes_per_token(latent_dim, rope_dim) // self.dtype.itemsize


LATENT_BF16 = LatentLayout("bf16", torch.bfloat16, latent_bytes=2, rope_bytes=2)
LATENT_FP16 = LatentLayout("fp16", torch.float16, latent_bytes=2, rope_bytes=2)
LATENT_FP32 = LatentLayout("fp32", torch.float32, latent_bytes=4, rope_bytes=4)
LATENT_FP8 = LatentLayout("fp8", torch.uint8, latent_bytes=1, rope_bytes=2, group=128)

_BY_DTYPE = {layout.dtype: layout for layout in (LATENT_BF16, LATENT_FP16, LATENT_FP32, LATENT_FP8)}


def latent_layout(dtype: torch.dtype) -> LatentLayout:
    """The layout whose cache tensors have `dtype`; `KeyError` for one that no layout uses."""
    return _BY_DTYPE[dtype]
