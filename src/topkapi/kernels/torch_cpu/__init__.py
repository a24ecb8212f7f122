"""Plain torch kernels: the CPU path, and the fallback on any other device."""

from topkapi.kernels.torch_cpu.records import GATHER_LATENT, WRITE_INDEX_KEY, WRITE_LATENT
from topkapi.kernels.torch_cpu.select import INDEXER_LOGITS, SELECT
from topkapi.kernels.torch_cpu.sparse_mla import SPARSE_MLA
from topkapi.kernels.torch_cpu.topk import TOPK

KERNELS = (INDEXER_LOGITS, TOPK, SELECT, SPARSE_MLA, WRITE_LATENT, WRITE_INDEX_KEY, GATHER_LATENT)

__all__ = ["KERNELS"]
