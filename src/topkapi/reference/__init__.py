"""The definition of every operation: plain torch, obvious, slow. Kernels are compared with it."""

from topkapi.reference.indexer import indexer_logits, select
from topkapi.reference.records import (
    dequantize_index_key,
    dequantize_latent,
    gather_latent,
    hadamard,
    quantize_index_key,
    quantize_latent,
    read_index_key,
    write_index_key,
    write_latent,
)
from topkapi.reference.rope import apply_rope
from topkapi.reference.sparse_mla import sparse_mla
from topkapi.reference.speculative import Acceptance, accept_greedy, accept_sampled
from topkapi.reference.topk import topk

__all__ = [
    "Acceptance",
    "accept_greedy",
    "accept_sampled",
    "apply_rope",
    "dequantize_index_key",
    "dequantize_latent",
    "gather_latent",
    "hadamard",
    "indexer_logits",
    "quantize_index_key",
    "quantize_latent",
    "read_index_key",
    "select",
    "sparse_mla",
    "topk",
    "write_index_key",
    "write_latent",
]
