"""The attention backend: batches, one step's metadata, and every layer's work over it."""

from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import AttentionLayer, ForwardBatch, ForwardMode, SpecInfo
from topkapi.attention.metadata import NSAIndexerMetadata, NSAMetadata
from topkapi.attention.multi_step import NativeSparseAttnMultiStepBackend

__all__ = [
    "AttentionLayer",
    "ForwardBatch",
    "ForwardMode",
    "NSAIndexerMetadata",
    "NSAMetadata",
    "NativeSparseAttnBackend",
    "NativeSparseAttnMultiStepBackend",
    "SpecInfo",
]
