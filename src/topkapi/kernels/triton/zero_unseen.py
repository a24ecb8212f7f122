"""A zero that the compiler cannot see, for kernels in Gluon that find operands in shared memory.

Operands at places known to it have their descriptors made before the loop and kept in registers,
one for each product of 16 or 32 dims; with this added to an index they are made where needed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def zero_unseen(anything):
    """0 as int32; `anything` is any integer."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [anything], dtype=gl.int32, is_pure=False, pack=1
    )
