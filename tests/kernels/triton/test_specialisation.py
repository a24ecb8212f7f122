"""How many variants of each kernel do fifty shapes ask for? Lengths and batches must not compile.

Launchers run on meta tensors with a recorder in place of each kernel. It notes what Triton compiles
anew for: constants, options, types, and, unless the kernel forbids it, whether an integer is 1 or a
multiple of 16, and whether an address is a multiple of 16. `tests/gpu/test_compilations.py` counts
what a GPU has compiled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.triton.test_aot import KERNELS, device_of, meta, meta_context
from topkapi.kernels.hopper import sparse_mla as hopper_mla
from topkapi.kernels.triton import (
    index_queries,
    indexer_logits,
    records,
    select,
    sparse_mla,
    step_metadata,
    topk,
)
from topkapi.layout.latent import latent_layout

FP8, BF16 = torch.uint8, torch.bfloat16
INT64, F32 = torch.int64, torch.float32
K = 2048
# A power of two that grows with the shape, and whether rows are split: never one for each shape.
MOST_VARIANTS = 10


class Variants:
    """Stands in for a kernel: notes what Triton's cache would be asked for."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.keys: set[str] = set()
        self.constants = {param.name for param in kernel.params if param.is_constexpr}
        self.plain = {param.name for param in kernel.params if param.do_not_specialize}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
            self.keys.add(str({name: self._key(name, value) for name, value in given.items()}))

        return launch

    def _key(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            return value.dtype, aligned or name in self.plain
        if isinstance(value, TensorDescriptor):
            return value.base.dtype, tuple(value.block_shape), repr(value.layout)
        if name in self.constants or name not in self.kernel.arg_names:
            return value
        if isinstance(value, int):
            wide = value >= 2**31
            return wide if name in self.plain else (wide, value == 1, value % 16 == 0)
        return type(value)


def write_and_gather(tokens: int, cache: torch.dtype) -> None:
    slots = meta(tokens, dtype=INT64)
    kv_cache = meta(640, 1, latent_layout(cache).width(512, 64), dtype=cache)
    # Latent and rope part are slices of one projection, as a model has them.
    kv = meta(tokens, 576, dtype=BF16)
    records.write_latent(kv_cache, slots, kv[:, :512], kv[:, 512:])
    records.gather_latent(kv_cache, meta(tokens), dtype=BF16)
    index_cache = meta(9, 64 * 132, dtype=FP8) if cache == FP8 else meta(640, 128, dtype=BF16)
    records.write_index_key(index_cache, slots, meta(tokens, 128, dtype=BF16))


def start_step(requests: int, rows: int) -> None:
    step_metadata.step_metadata(
        table_rows=meta(requests, dtype=INT64),
        kv_lens_out=meta(requests),
        cu_seqlens_q=meta(requests + 1),
        request_of_row=meta(rows),
        lengths=meta(rows),
        selected_lens=meta(rows),
        q_lens=meta(requests),
        kv_lens=meta(requests),
        request_rows=meta(requests, dtype=INT64),
        topk=K,
        out_cache_loc=meta(rows, dtype=INT64),
    )


def layer(requests: int, rows: int, longest_q: int, context: int, heads: int, cache: Any) -> None:
    """Every launch of a step and one layer of it."""
    start_step(requests, rows)
    write_and_gather(rows, cache)
    seen = replace(meta_context(rows, requests, context), max_seq_len_q=longest_q)
    q, weights = meta(rows, 64, 128, dtype=BF16), meta(rows, 64, dtype=F32)
    if cache == FP8:
        q, weights = index_queries.quantize_index_query(q, weights)
    index_cache = meta(9, 64 * 132, dtype=FP8) if cache == FP8 else meta(640, 128, dtype=BF16)
    select.select(q, weights, index_cache, seen, K)
    width = latent_layout(cache).width(512, 64)
    for attend in (sparse_mla.sparse_mla, hopper_mla.sparse_mla):
        attend(
            meta(rows, heads, 576, dtype=BF16),
            meta(640, 1, width, dtype=cache),
            meta(rows, min(K, -(-context // 64) * 64)),
            scale=0.1,
            v_dim=512,
        )


def shapes(mode: str) -> list[tuple[int, int, int, int]]:
    """Fifty times requests, rows, the longest query, and a context of up to 150,000 tokens."""
    draw = random.Random(mode)
    made = []
    for _ in range(50):
        requests = draw.randint(1, 128 if mode == "decode" else 8)
        context = int(2 ** draw.uniform(6, 17.2))
        longest = {"decode": 1, "verify": 4}.get(mode) or draw.randint(40, 1500)
        rows = requests * longest if mode != "prefill" else draw.randint(longest, 8 * longest)
        made.append((requests, rows, longest, context))
    return made


@pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("mode", ["decode", "verify", "prefill"])
def test_fifty_shapes_share_their_kernels(
    mode: str, heads: int, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = {}
    names = "wide", "wide_fp8", "narrow", "narrow_fp8"
    hopper = [(hopper_mla, f"attend_{name}") for name in names]
    for module, attribute in (*KERNELS, *hopper):
        noted[attribute] = Variants(getattr(module, attribute))
        monkeypatch.setattr(module, attribute, noted[attribute])
    for module in (sparse_mla, hopper_mla, indexer_logits, topk, records):
        monkeypatch.setattr(module, "target_of", lambda tensor: device_of(90))
    for shape in shapes(mode):
        layer(*shape, heads, cache)
    counts = {name: len(variants.keys) for name, variants in noted.items()}
    print(mode, heads, counts)
    assert {"_fill", "_write_latent", "_write_index_key"} <= {n for n in counts if counts[n]}
    assert max(counts.values()) <= MOST_VARIANTS, counts
