"""The sizes at which each operation is measured, as data, and how their inputs are made.

A case knows its own work: the bytes it must move at least and the floating-point operations it
must do. It knows nothing of kernels or clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from topkapi.context import Context
from topkapi.layout import PAGE_SIZE
from topkapi.layout.index_key import index_key_layout
from topkapi.layout.latent import latent_layout

Arguments = dict[str, Any]

_FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}


@dataclass(frozen=True)
class BenchCase:
    """One operation at one size. Sizes that the operation does not have are ignored."""

    op: str
    rows: int = 1
    context: int = 1024
    heads: int = 8
    index_heads: int = 16
    index_dim: int = 128
    latent: int = 512
    rope: int = 64
    k: int = 128
    cache: str = "fp32"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def name(self) -> str:
        """A readable key of the sizes that the operation has: `select rows=64 context=8192 ...`."""
        words = [self.op, f"rows={self.rows}"]
        if not self.op.startswith("write"):
            words.append(f"context={self.context}")
        if self.op in ("select", "indexer_logits"):
            words.append(f"heads={self.index_heads}")
        elif self.op == "sparse_mla":
            words.append(f"heads={self.heads}")
        return " ".join([*words, "" if self.op == "topk" else self.cache]).rstrip()

    def make(self, device: torch.device) -> Arguments:
        """Fresh seeded inputs on `device`, as keyword arguments of the operation."""
        generator = torch.Generator().manual_seed(self.seed)
        return _MAKERS[self.op](self, generator, device)

    def work(self) -> tuple[int, int]:
        """(bytes, FLOPs): each input read once, each output written once; causal halves ignored."""
        token = latent_layout(_FORMATS[self.cache]).bytes_per_token(self.latent, self.rope)
        key = index_key_layout(_FORMATS[self.cache]).bytes_per_token(self.index_dim)
        width = self.latent + self.rope
        size = self.dtype.itemsize
        rows, context = self.rows, self.context
        selected = rows * min(self.k, context)
        score = 2 * rows * context * self.index_heads * self.index_dim
        queries = rows * self.index_heads * (self.index_dim * size + 4)
        attend = 2 * selected * self.heads * (width + self.latent)
        output = rows * self.heads * (width + self.latent) * size
        return {
            "indexer_logits": (queries + context * key + 4 * rows * context, score),
            "topk": (4 * rows * (context + self.k), 0),
            "select": (queries + context * key + 4 * rows * self.k, score),
            "sparse_mla": (output + min(selected, context) * token, attend),
            "write_latent": (rows * (width * size + token), 0),
            "write_index_key": (rows * (self.index_dim * size + key), 0),
            "gather_latent": (rows * (width * size + token), 0),
        }[self.op]


def _normal(generator: torch.Generator, *shape: int, case: BenchCase) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(case.dtype)


def _context(case: BenchCase, device: torch.device) -> Context:
    """The last `rows` queries of one request, whose pages lie in shuffled order."""
    pages = -(-case.context // PAGE_SIZE)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(case.seed)) + 1
    table = (order[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[None].int()
    lengths = torch.arange(case.context - case.rows + 1, case.context + 1, dtype=torch.int32)
    return Context(
        lengths=lengths.clamp_min(1).to(device),
        request_of_row=torch.zeros(case.rows, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, case.rows], dtype=torch.int32, device=device),
        max_length=case.context,
        max_seq_len_q=case.rows,
        table=table.to(device),
        table_rows=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _latent_cache(case: BenchCase, device: torch.device) -> torch.Tensor:
    slots = (-(-case.context // PAGE_SIZE) + 1) * PAGE_SIZE
    dtype = _FORMATS[case.cache]
    width = latent_layout(dtype).width(case.latent, case.rope)
    return torch.zeros(slots, 1, width, dtype=dtype, device=device)


def _index_cache(case: BenchCase, device: torch.device) -> torch.Tensor:
    pages = -(-case.context // PAGE_SIZE) + 1
    layout = index_key_layout(_FORMATS[case.cache])
    shape = layout.cache_shape(pages, PAGE_SIZE, case.index_dim)
    return torch.zeros(shape, dtype=layout.dtype, device=device)


def _filled_latent_cache(
    case: BenchCase, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    from topkapi import ops

    cache = _latent_cache(case, device)
    count = cache.shape[0]
    latent = _normal(generator, count, case.latent, case=case).to(device)
    rope = _normal(generator, count, case.rope, case=case).to(device)
    ops.write_latent(cache, torch.arange(count, device=device), latent, rope)
    return cache


def _filled_index_cache(
    case: BenchCase, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    from topkapi import ops

    cache = _index_cache(case, device)
    count = (-(-case.context // PAGE_SIZE) + 1) * PAGE_SIZE
    keys = _normal(generator, count, case.index_dim, case=case).to(device)
    ops.write_index_key(cache, torch.arange(count, device=device), keys)
    return cache


def _scoring(case: BenchCase, generator: torch.Generator, device: torch.device) -> Arguments:
    q = _normal(generator, case.rows, case.index_heads, case.index_dim, case=case)
    weights = torch.randn(case.rows, case.index_heads, generator=generator)
    return {
        "q": q.to(device),
        "weights": (weights * (case.index_heads * case.index_dim) ** -0.5).to(device),
        "index_cache": _filled_index_cache(case, generator, device),
        "context": _context(case, device),
    }


def _selecting(case: BenchCase, generator: torch.Generator, device: torch.device) -> Arguments:
    return {**_scoring(case, generator, device), "k": case.k}


def _topk(case: BenchCase, generator: torch.Generator, device: torch.device) -> Arguments:
    logits = torch.randn(case.rows, case.context, generator=generator)
    lengths = torch.full((case.rows,), case.context, dtype=torch.int32)
    return {"logits": logits.to(device), "lengths": lengths.to(device), "k": case.k}


def _attending(case: BenchCase, generator: torch.Generator, device: torch.device) -> Arguments:
    width = case.latent + case.rope
    scores = torch.rand(case.rows, case.context, generator=generator)
    chosen = scores.topk(min(case.k, case.context), dim=-1).indices.sort(dim=-1).values
    return {
        "q": _normal(generator, case.rows, case.heads, width, case=case).to(device),
        "kv_cache": _filled_latent_cache(case, generator, device),
        "slots": (chosen + PAGE_SIZE).int().to(device),
        "scale": width**-0.5,
        "v_dim": case.latent,
    }


def _writing_latent(case: BenchCase, generator: torch.Generator, device: torch.device) -> Arguments:
    return {
        "kv_cache": _latent_cache(case, device),
        "slots": torch.arange(case.rows, device=device) + PAGE_SIZE,
        "latent": _normal(generator, case.rows, case.latent, case=case).to(device),
        "rope": _normal(generator, case.rows, case.rope, case=case).to(device),
    }


def _writing_key(case: BenchCase, generator: torch.Generator, device: torch.device) -> Arguments:
    return {
        "index_cache": _index_cache(case, device),
        "slots": torch.arange(case.rows, device=device) + PAGE_SIZE,
        "keys": _normal(generator, case.rows, case.index_dim, case=case).to(device),
    }


def _gathering(case: BenchCase, generator: torch.Generator, device: torch.device) -> Arguments:
    return {
        "kv_cache": _filled_latent_cache(case, generator, device),
        "slots": torch.randint(PAGE_SIZE, case.context, (case.rows,), generator=generator).to(
            device
        ),
        "v_dim": case.latent,
        "dtype": case.dtype,
    }


_MAKERS: dict[str, Callable[[BenchCase, torch.Generator, torch.device], Arguments]] = {
    "indexer_logits": _scoring,
    "topk": _topk,
    "select": _selecting,
    "sparse_mla": _attending,
    "write_latent": _writing_latent,
    "write_index_key": _writing_key,
    "gather_latent": _gathering,
}
