"""What a block-quantised fp8 weight is worth in full precision.

DeepSeek's checkpoints keep a matrix `[N, K]` in e4m3 with one scale a block of 128 x 128 values, in
`weight_scale_inv [ceil(N / 128), ceil(K / 128)]`; the blocks at the right and lower edge are short
when a size is no multiple of 128. Knows nothing about files or modules.
"""

from __future__ import annotations

import torch

from topkapi.errors import ShapeError

DEFAULT_BLOCK = (128, 128)


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks in a matrix of `shape`, short ones included: `(576, 7168)` has `(5, 56)`."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def dequantize_blocks(
    weight: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int] | None = DEFAULT_BLOCK,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`[N, K]` float8 times its scales, as `dtype`; the product is made in fp32.

    `scales` is fp32, or float8_e8m0fnu (ue8m0): one a block, or a single one where `block` is None.
    The block comes from the checkpoint's config and is never guessed from the shapes: 192 rows with
    two scales are blocks of 128 and 64, not twice 96. Raises `ShapeError` when they do not match.
    """
    values = weight.to(torch.float32)
    if block is None:
        if scales.numel() != 1:
            raise ShapeError(f"scales: expected a single one, got {list(scales.shape)}")
        return values.mul_(scales.to(torch.float32).reshape(())).to(dtype)
    rows, columns = weight.shape
    expected = scale_shape((rows, columns), block)
    if tuple(scales.shape) != expected:
        raise ShapeError(
            f"scales: expected {list(expected)} for a weight of {[rows, columns]} in blocks of "
            f"{list(block)}, got {list(scales.shape)}"
        )
    spread = scales.to(torch.float32).repeat_interleave(block[1], dim=1)[:, :columns]
    for start in range(0, rows, block[0]):
        values[start : start + block[0]].mul_(spread[start // block[0]])
    return values.to(dtype)
