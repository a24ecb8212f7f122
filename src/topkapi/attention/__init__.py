"""The attention backend: batches, one step's metadata, and every layer's work over it."""

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import AttentionLayer, ForwardBatch, ForwardMode, SpecInfo
from topkapi.attention.metadata import NSAIndexerMetadata, NSAMetadata

__all__ = [
    "AttentionLayer",
    "ForwardBatch",
    "ForwardMode",
    "NSAIndexerMetadata",
    "NSAMetadata",
    "NativeSparseAttnBackend",
    "SpecInfo",
]
