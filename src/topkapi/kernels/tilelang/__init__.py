"""Kernels of our own, written in TileLang, for NVIDIA GPUs.

`KERNELS` can be imported without TileLang, and importing it never imports TileLang, which takes
seconds: that waits for the first launch.
"""

from topkapi.kernels.tilelang.sparse_mla import SPARSE_MLA

KERNELS = (SPARSE_MLA,)

__all__ = ["KERNELS"]
