"""The operations of DeepSeek Sparse Attention: check shapes, choose a kernel, launch it.

For inference alone: they run under `torch.no_grad`, and their outputs carry no gradient.
"""

from topkapi.ops.indexer import indexer_logits, select, topk
from topkapi.ops.records import gather_latent, write_index_key, write_latent
from topkapi.ops.sparse_mla import sparse_mla

__all__ = [
    "gather_latent",
    "indexer_logits",
    "select",
    "sparse_mla",
    "topk",
    "write_index_key",
    "write_latent",
]
