"""At which sizes is each operation measured? Data, by device.

On a GPU DeepSeek-V3.2's dims and contexts up to 131072 tokens; on a CPU the demo model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from topkapi.bench.cases import BenchCase

CPU_CASES = (
    BenchCase("indexer_logits", rows=64, context=8192),
    BenchCase("indexer_logits", rows=1, context=8192, cache="fp8"),
    BenchCase("topk", rows=64, context=8192),
    BenchCase("topk", rows=8, context=65536, k=2048),
    BenchCase("select", rows=256, context=8192),
    BenchCase("select", rows=1, context=8192),
    BenchCase("select", rows=1, context=8192, cache="fp8"),
    BenchCase("sparse_mla", rows=256, context=8192),
    BenchCase("sparse_mla", rows=256, context=8192, selection="overlap"),
    BenchCase("sparse_mla", rows=1, context=8192),
    BenchCase("sparse_mla", rows=64, context=8192, cache="fp8"),
    BenchCase("write_latent", rows=512),
    BenchCase("write_latent", rows=512, cache="fp8"),
    BenchCase("write_index_key", rows=512, cache="fp8"),
    BenchCase("gather_latent", rows=512, context=8192, cache="fp8"),
)

CONTEXTS = (8192, 65536, 131072)
BATCHES = (1, 8, 32, 64, 128)


def _case(op: str, rows: int, context: int = 65536, **sizes: object) -> BenchCase:
    case = BenchCase(op, rows, context, cache="bf16", dtype=torch.bfloat16, k=2048, index_heads=64)
    return replace(case, **sizes)  # type: ignore[arg-type]


def _decode(op: str, batch: int, context: int, **sizes: object) -> BenchCase:
    return _case(op, batch, context, requests=batch, phase="decode", **sizes)


def _attention() -> Iterator[BenchCase]:
    for heads, rows, context in product((8, 16, 64, 128), (1024, 4096), CONTEXTS):
        yield _case("sparse_mla", rows, context, heads=heads)
    for heads in (8, 16, 64, 128):
        yield _case("sparse_mla", 4096, 65536, heads=heads, selection="overlap")
    for heads in (16, 128):
        yield _case("sparse_mla", 4096, 131072, heads=heads, selection="overlap")
    for heads, context in product((16, 128), CONTEXTS):
        yield _case("sparse_mla", 4096, context, heads=heads, cache="fp8")
    for heads, cache, context, batch in product((16, 128), ("fp8", "bf16"), CONTEXTS, BATCHES):
        yield _decode("sparse_mla", batch, context, heads=heads, cache=cache)


def _scoring() -> Iterator[BenchCase]:
    for heads, query, context in product((64, 32), ("e4m3", ""), CONTEXTS):
        sizes = {"index_heads": heads, "query": query, "cache": "fp8"}
        yield _case("indexer_logits", 4096, context, **sizes)
    for heads, query, context, batch in product((64, 32), ("e4m3", ""), CONTEXTS[1:], (1, 8, 64)):
        sizes = {"index_heads": heads, "query": query, "cache": "fp8"}
        yield _decode("indexer_logits", batch, context, **sizes)


def _selecting() -> Iterator[BenchCase]:
    for query, context in product(("e4m3", ""), CONTEXTS):
        yield _case("select", 4096, context, query=query, cache="fp8")
    for query in ("e4m3", ""):
        yield _case("select", 4096, 65536, index_heads=32, query=query, cache="fp8")
    for query, context, batch in product(("e4m3", ""), CONTEXTS, (1, 8, 64, 128)):
        yield _decode("select", batch, context, query=query, cache="fp8")


def _of_rows(op: str, rows: int, context: int = 65536, **sizes: object) -> BenchCase:
    """Of a decoding step where it has that few rows."""
    return _case(op, rows, context, phase="decode" if rows <= 128 else "prefill", **sizes)


def _gather(tokens: int, cache: str) -> BenchCase:
    return _case("gather_latent", tokens, 131072, phase="decode", cache=cache)


def _ranking() -> Iterator[BenchCase]:
    for rows, context in product((1, 64, 4096), CONTEXTS):
        yield _of_rows("topk", rows, context)
    yield _of_rows("topk", 1, 2**20)
    yield _of_rows("topk", 64, values="plateau")
    yield _of_rows("topk", 4096, values="plateau")


def _records() -> Iterator[BenchCase]:
    for cache, rows in product(("fp8", "bf16"), (1, 128, 4096)):
        yield _of_rows("write_latent", rows, cache=cache)
    for rows in (1, 128, 4096):
        yield _of_rows("write_index_key", rows, cache="fp8")
    for cache, tokens in product(("fp8", "bf16"), (2048, 65536)):
        yield _gather(tokens, cache)


GPU_CASES = (*_attention(), *_scoring(), *_selecting(), *_ranking(), *_records())

GPU_QUICK = (
    _case("sparse_mla", 1024, 8192, heads=128),
    _case("sparse_mla", 1024, 8192, heads=16),
    _case("sparse_mla", 4096, 65536, heads=16, selection="overlap"),
    _case("sparse_mla", 4096, 65536, heads=128, cache="fp8"),
    _decode("sparse_mla", 32, 65536, heads=128, cache="fp8"),
    _decode("sparse_mla", 32, 65536, heads=16, cache="bf16"),
    _case("indexer_logits", 4096, 8192, query="e4m3", cache="fp8"),
    _decode("indexer_logits", 8, 65536, query="e4m3", cache="fp8"),
    _decode("indexer_logits", 8, 65536, cache="fp8"),
    _case("select", 4096, 8192, cache="fp8"),
    _decode("select", 8, 65536, query="e4m3", cache="fp8"),
    _of_rows("topk", 64),
    _of_rows("topk", 4096, 8192),
    _of_rows("topk", 64, values="plateau"),
    _of_rows("write_latent", 128, cache="fp8"),
    _of_rows("write_index_key", 128, cache="fp8"),
    _gather(2048, "fp8"),
)


def sizes_for(device: torch.device, *, quick: bool = False) -> tuple[BenchCase, ...]:
    """The cases of this kind of device; with `quick` a few, each of a second or less."""
    if device.type == "cuda":
        return GPU_QUICK if quick else GPU_CASES
    if not quick:
        return CPU_CASES
    return tuple(case for case in CPU_CASES if case.rows * case.context <= 2**19)


def shrunk(case: BenchCase, most_tokens: int) -> BenchCase:
    """The same kernels on less data, for compiling them: a shorter context for each request. Only
    where the kernels do not go by the context.
    """
    few = case.requests * case.context <= most_tokens or case.requests == 1
    if few or case.op != "sparse_mla":
        return case
    return replace(case, context=max(2 * case.k, most_tokens // case.requests))
