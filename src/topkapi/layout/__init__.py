"""Byte layout of one cached token. Data only: quantising is `reference.records`."""

from topkapi.layout.index_key import INDEX_BF16, INDEX_FP8, INDEX_FP32, IndexKeyLayout
from topkapi.layout.latent import LATENT_BF16, LATENT_FP8, LATENT_FP32, LatentLayout

PAGE_SIZE = 64

__all__ = [
    "INDEX_BF16",
    "INDEX_FP8",
    "INDEX_FP32",
    "LATENT_BF16",
    "LATENT_FP8",
    "LATENT_FP32",
    "PAGE_SIZE",
    "IndexKeyLayout",
    "LatentLayout",
]
