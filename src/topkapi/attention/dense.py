"""How is a short prompt attended faster than through the latent space?

When no context is longer than k the selection is everything, and without a cached prefix all keys
are at hand: plain multi-head attention over expanded keys and values does `nope + rope + V` work a
pair and head where the absorbed form does `2 L + P` (320 against 1088 at DeepSeek-V3.2's sizes).
Knows nothing about caches or metadata.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from topkapi.shapes import FLOATS, check


def dense_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    w_kc: torch.Tensor,
    w_vc: torch.Tensor,
    seq_lens: Sequence[int],
    *,
    scale: float,
) -> torch.Tensor:
    """Causal attention of whole prompts over expanded keys and values.

    Args:
        q: `[T, H, nope + P]`, rope already applied to the last P.
        latent: `[T, L]`, after its norm. k_rope: `[T, P]`, rope applied.
        w_kc: `[H, nope, L]`, w_vc: `[H, L, V]`: kv_b_proj's halves.
        seq_lens: host lengths of the prompts; rows past their sum are padding and give zeros.
        scale: multiplies scores.

    Returns `[T, H, V]` in q's dtype. Keys are expanded one prompt at a time:
    `T_b * H * (nope + P + V)` values. Host lengths, so it neither synchronises nor is captured.
    Raises `ShapeError`.
    """
    sizes: dict[str, int] = {}
    check("q", q, "T H D", sizes, dtypes=FLOATS)
    check("latent", latent, "T L", sizes, dtypes=FLOATS, like=q)
    check("k_rope", k_rope, "T P", sizes, dtypes=FLOATS, like=q)
    check("w_kc", w_kc, "H nope L", sizes, dtypes=FLOATS, like=q)
    check("w_vc", w_vc, "H L V", sizes, dtypes=FLOATS, like=q)
    out = q.new_zeros(sizes["T"], sizes["H"], sizes["V"])
    first = 0
    for seq_len in seq_lens:
        rows = slice(first, first + seq_len)
        first += seq_len
        keys = torch.einsum("tl,hnl->htn", latent[rows], w_kc)
        rope = k_rope[rows].expand(sizes["H"], -1, -1)
        values = torch.einsum("tl,hlv->htv", latent[rows], w_vc)
        out[rows] = _causal(q[rows].transpose(0, 1), torch.cat((keys, rope), dim=2), values, scale)
    return out


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """`[H, T, D]`, `[H, T, D]`, `[H, T, V]` to `[T, H, V]`.

    torch's flash kernels want one width: without the padding it takes the path that holds
    `[H, T, T]`, which is slower, too (6 times at 2048 tokens, on a CPU).
    """
    width = max(q.shape[2], v.shape[2])
    q, k, v_padded = (pad(x, (0, width - x.shape[2]))[None] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v_padded, is_causal=True, scale=scale)
    return out[0, :, :, : v.shape[2]].transpose(0, 1)
