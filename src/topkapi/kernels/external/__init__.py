"""Other projects' kernels behind our signatures: optional, thin, their quirks kept inside.

`KERNELS` can be imported without any of their packages: a record then refuses with that reason, and
looks for its package only when asked. `auto` takes one only where a measured table says so.
"""

from topkapi.kernels.external import topk_flashinfer, topk_sgl_kernel, topk_vllm
from topkapi.kernels.external.aiter import AITER
from topkapi.kernels.external.deep_gemm import DEEP_GEMM_LOGITS, DEEP_GEMM_SELECT
from topkapi.kernels.external.fa3 import FA3
from topkapi.kernels.external.flashmla_kv import FLASHMLA_KV
from topkapi.kernels.external.flashmla_sparse import FLASHMLA_SPARSE

KERNELS = (
    FLASHMLA_SPARSE,
    FLASHMLA_KV,
    FA3,
    AITER,
    DEEP_GEMM_LOGITS,
    DEEP_GEMM_SELECT,
    topk_sgl_kernel.TOPK,
    topk_vllm.TOPK,
    topk_flashinfer.TOPK,
)

__all__ = ["KERNELS"]
