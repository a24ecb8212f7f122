"""Where the bytes of one cached index key lie, page by page.

fp8 pages are planar, as DeepGEMM reads them: first the e4m3 keys of the page's 64 tokens, then
their 64 fp32 scales, in one uint8 row `[pages, 64 * (Di + 4)]` (132 bytes a token for 128 dims).
Unquantised keys are plain rows `[slots, Di]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class IndexKeyLayout:
    """Format of an index-key cache. `scale_bytes` is 4 when each key carries an fp32 scale."""

    name: str
    dtype: torch.dtype
    key_bytes: int
    scale_bytes: int = 0

    def bytes_per_token(self, index_dim: int) -> int:
        """Size of one key with its scale, in bytes: 132 for fp8 with 128 dims."""
        return index_dim * self.key_bytes + self.scale_bytes

    def cache_shape(self, num_pages: int, page_size: int, index_dim: int) -> tuple[int, int]:
        """Shape of the cache tensor: `[pages, page bytes]` for fp8, `[slots, Di]` otherwise."""
        if self.scale_bytes:
            return num_pages, page_size * self.bytes_per_token(index_dim)
        return num_pages * page_size, index_dim


INDEX_BF16 = IndexKeyLayout("bf16", torch.bfloat16, key_bytes=2)
INDEX_FP16 = IndexKeyLayout("fp16", torch.float16, key_bytes=2)
INDEX_FP32 = IndexKeyLayout("fp32", torch.float32, key_bytes=4)
INDEX_FP8 = IndexKeyLayout("fp8", torch.uint8, key_bytes=1, scale_bytes=4)

_BY_DTYPE = {layout.dtype: layout for layout in (INDEX_BF16, INDEX_FP16, INDEX_FP32, INDEX_FP8)}


def index_key_layout(dtype: torch.dtype) -> IndexKeyLayout:
    """The layout whose cache tensors have `dtype`; `KeyError` for one that no layout uses."""
    return _BY_DTYPE[dtype]


def fp8_page_views(
    cache: torch.Tensor, index_dim: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of an fp8 cache `[pages, page bytes]` uint8, no copy.

    Returns keys `[pages, page_size, Di]` float8_e4m3fn and scales `[pages, page_size]` fp32.
    """
    pages, page_bytes = cache.shape
    keys = cache[:, : page_size * index_dim].view(torch.float8_e4m3fn)
    keys = keys.as_strided((pages, page_size, index_dim), (page_bytes, index_dim, 1))
    scales = cache.view(torch.float32)[:, page_size * index_dim // 4 :]
    return keys, scales
