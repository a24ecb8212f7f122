"""One operation at one size, as data: what it is called, the work it must do at least.

Knows nothing of tensors' contents (`inputs`), of the sizes worth measuring (`sizes`), of kernels
or of clocks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from topkapi.layout.index_key import index_key_layout
from topkapi.layout.latent import latent_layout

FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in FORMATS.items() if name != "fp8"}


@dataclass(frozen=True)
class BenchCase:
    """One operation at one size. Sizes that the operation does not have are ignored.

    Attributes:
        rows: query rows of all requests together; tokens, for writes and gathers.
        requests: they share the rows equally. Each has `context` tokens of its own, and its rows
            are the last ones of it: row j sees `context - rows/requests + j + 1` tokens.
        phase: `prefill`, or `decode` for a call that a decoding step makes; attention's kernels get
            it as a hint.
        cache: format of the cached records, a key of `FORMATS`.
        dtype: of queries and of what is written.
        query: `e4m3` for index queries quantised to it, else empty.
        selection: `random`, uniform; or `overlap`, neighbours as alike as the demo model's.
        values: of top-k's logits: `normal`, or `plateau` where more than k of a row are equal.
    """

    op: str
    rows: int = 1
    context: int = 1024
    requests: int = 1
    phase: str = "prefill"
    heads: int = 8
    index_heads: int = 16
    index_dim: int = 128
    latent: int = 512
    rope: int = 64
    k: int = 128
    cache: str = "fp32"
    dtype: torch.dtype = torch.float32
    query: str = ""
    selection: str = "random"
    values: str = "normal"
    seed: int = 0

    @property
    def scores(self) -> bool:
        """Whether the operation scores index keys."""
        return self.op in ("select", "indexer_logits")

    @property
    def group(self) -> str:
        """What this case has in common with those it is plotted with: all but rows and context."""
        words = [self.op]
        if self.op == "sparse_mla" or self.scores:
            words.append("decode" if self.requests > 1 or self.phase == "decode" else "prefill")
        if self.scores:
            words.append(f"heads={self.index_heads}")
        elif self.op == "sparse_mla":
            words.append(f"heads={self.heads}")
        if self.op != "topk":
            words.append(self.cache)
        words.append(f"q={self.query}" if self.query else "")
        words.append(self.selection if self.selection != "random" else "")
        words.append(self.values if self.values != "normal" else "")
        return " ".join(filter(None, words))

    @property
    def size(self) -> str:
        """Rows and context: `64 x 8192`; tokens alone for a write."""
        return f"{self.rows}" if self.op.startswith("write") else f"{self.rows} x {self.context}"

    @property
    def name(self) -> str:
        """A readable key: `sparse_mla decode heads=16 fp8, 64 x 8192`."""
        return f"{self.group}, {self.size}"

    @property
    def arithmetic(self) -> str:
        """Which ceiling its products run into: fp8 where both operands are e4m3."""
        if self.scores and self.query == "e4m3" and self.cache == "fp8":
            return "fp8"
        return _DTYPE_NAMES[self.dtype]

    def facts(self) -> dict[str, Any]:
        """Every size, as a JSON object."""
        return {**asdict(self), "dtype": _DTYPE_NAMES[self.dtype]}

    def visible(self) -> int:
        """Tokens that all rows together may see."""
        per = self.rows // self.requests
        return self.requests * (per * self.context - per * (per - 1) // 2)

    def work(self, distinct: int | None = None) -> tuple[int, int]:
        """(bytes, FLOPs) at least: each input read once, each output written once.

        `distinct` is how many different records `sparse_mla` selects; None bounds it by k for a
        row and by the context for a request.
        """
        token = latent_layout(FORMATS[self.cache]).bytes_per_token(self.latent, self.rope)
        key = index_key_layout(FORMATS[self.cache]).bytes_per_token(self.index_dim)
        width = self.latent + self.rope
        size = self.dtype.itemsize
        rows, tokens = self.rows, self.requests * self.context
        selected = rows * min(self.k, self.context)
        if distinct is None:
            distinct = min(selected, tokens)
        score = 2 * self.visible() * self.index_heads * self.index_dim
        queries = rows * self.index_heads * (self.index_dim * (1 if self.query else size) + 4)
        attend = 2 * selected * self.heads * (width + self.latent)
        around = rows * (self.heads * ((width + self.latent) * size + 4) + 4 * self.k)
        return {
            "indexer_logits": (queries + tokens * key + 4 * rows * self.context, score),
            "topk": (4 * rows * (self.context + self.k), 0),
            "select": (queries + tokens * key + 4 * rows * self.k, score),
            "sparse_mla": (around + distinct * token, attend),
            "write_latent": (rows * (width * size + token), 0),
            "write_index_key": (rows * (self.index_dim * size + key), 0),
            "gather_latent": (rows * (width * size + token), 0),
        }[self.op]
