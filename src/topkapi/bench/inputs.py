"""How are the inputs of a measured case made? Random, seeded, on the device that is measured.

Every request's pages lie in shuffled order, as a cache in use has them. More sets of inputs for one
case are what the layers of a model would give its call: other values, selections, pages and caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from topkapi import ops
from topkapi.bench.cases import FORMATS, BenchCase
from topkapi.bench.selections import overlapping_positions, uniform_positions
from topkapi.context import Context
from topkapi.layout import PAGE_SIZE
from topkapi.layout.index_key import index_key_layout
from topkapi.layout.latent import latent_layout

Arguments = dict[str, Any]

# Tokens quantised at a time: bounds the temporaries.
_CHUNK = 2**20


def make_inputs(case: BenchCase, device: torch.device) -> Arguments:
    """Fresh inputs on `device`, as keyword arguments of the operation."""
    generator = torch.Generator(device).manual_seed(case.seed)
    made = _CACHES.get(case.op)
    return _MAKERS[case.op](case, generator, made[1](case, generator) if made else None)


def make_sets(
    case: BenchCase, arguments: Arguments, count: int, pool_bytes: int
) -> list[Arguments]:
    """`count` sets of inputs like `arguments`, drawn anew. Each has a cache of its own, a copy of
    the one in `arguments`, unless all of them would take more than `pool_bytes`: then as many as
    fit are used in turn, at the least that one.
    """
    device = next(v.device for v in arguments.values() if isinstance(v, torch.Tensor))
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    pool: list[Any] = [None]
    if case.op in _CACHES:
        cache = arguments[_CACHES[case.op][0]]
        caches = max(1, min(count, pool_bytes // cache.nbytes))
        pool = [cache, *(cache.clone() for _ in range(caches - 1))]
    return [_MAKERS[case.op](case, generator, pool[at % len(pool)]) for at in range(count)]


def make_context(case: BenchCase, generator: torch.Generator) -> Context:
    """The last rows of each request, over shuffled pages behind the dummy one."""
    device, per = generator.device, case.rows // case.requests
    pages = -(-case.context // PAGE_SIZE)
    order = torch.randperm(pages * case.requests, generator=generator, device=device) + 1
    table = order[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)
    lengths = case.context - per + 1 + torch.arange(per, dtype=torch.int32, device=device)
    request = torch.arange(case.requests, dtype=torch.int32, device=device)
    return Context(
        lengths=lengths.clamp_min(1).repeat(case.requests),
        request_of_row=request.repeat_interleave(per),
        cu_seqlens_q=torch.arange(case.requests + 1, dtype=torch.int32, device=device) * per,
        max_length=case.context,
        max_seq_len_q=per,
        table=table.view(case.requests, pages * PAGE_SIZE).int(),
        table_rows=torch.arange(case.requests, device=device),
        page_size=PAGE_SIZE,
    )


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    empty = torch.empty(shape, dtype=dtype, device=generator.device)
    return empty.normal_(generator=generator)


def _slots(case: BenchCase) -> int:
    """Slots of a cache that holds every request's context, behind the dummy page."""
    return (case.requests * -(-case.context // PAGE_SIZE) + 1) * PAGE_SIZE


def _latent_cache(case: BenchCase, slots: int, device: torch.device) -> torch.Tensor:
    dtype = FORMATS[case.cache]
    width = latent_layout(dtype).width(case.latent, case.rope)
    return torch.zeros(slots, 1, width, dtype=dtype, device=device)


def _index_cache(case: BenchCase, slots: int, device: torch.device) -> torch.Tensor:
    layout = index_key_layout(FORMATS[case.cache])
    shape = layout.cache_shape(slots // PAGE_SIZE, PAGE_SIZE, case.index_dim)
    return torch.zeros(shape, dtype=layout.dtype, device=device)


def _filled_latent_cache(case: BenchCase, generator: torch.Generator) -> torch.Tensor:
    cache = _latent_cache(case, _slots(case), generator.device)
    if case.cache != "fp8":
        return cache.normal_(generator=generator)
    for part in _chunks(cache.shape[0], generator.device):
        latent = _normal(generator, len(part), case.latent, dtype=torch.float32)
        rope = _normal(generator, len(part), case.rope, dtype=torch.float32)
        ops.write_latent(cache, part, latent, rope)
    return cache


def _filled_index_cache(case: BenchCase, generator: torch.Generator) -> torch.Tensor:
    slots = _slots(case)
    cache = _index_cache(case, slots, generator.device)
    for part in _chunks(slots, generator.device):
        keys = _normal(generator, len(part), case.index_dim, dtype=torch.float32)
        ops.write_index_key(cache, part, keys)
    return cache


def _chunks(count: int, device: torch.device) -> list[torch.Tensor]:
    return list(torch.split(torch.arange(count, device=device), _CHUNK))


def _scoring(case: BenchCase, generator: torch.Generator, cache: Any) -> Arguments:
    q = _normal(generator, case.rows, case.index_heads, case.index_dim, dtype=case.dtype)
    weights = _normal(generator, case.rows, case.index_heads, dtype=torch.float32)
    return {
        "q": q.to(torch.float8_e4m3fn) if case.query == "e4m3" else q,
        "weights": weights * (case.index_heads * case.index_dim) ** -0.5,
        "index_cache": cache,
        "context": make_context(case, generator),
    }


def _selecting(case: BenchCase, generator: torch.Generator, cache: Any) -> Arguments:
    return {**_scoring(case, generator, cache), "k": case.k}


def _topk(case: BenchCase, generator: torch.Generator, _: Any) -> Arguments:
    logits = _normal(generator, case.rows, case.context, dtype=torch.float32)
    if case.values == "plateau":
        logits.clamp_min_(1.0)
    lengths = torch.full((case.rows,), case.context, dtype=torch.int32, device=generator.device)
    return {"logits": logits, "lengths": lengths, "k": case.k}


def _attending(case: BenchCase, generator: torch.Generator, cache: Any) -> Arguments:
    width = case.latent + case.rope
    context = make_context(case, generator)
    choose = overlapping_positions if case.selection == "overlap" else uniform_positions
    positions = choose(context.lengths, case.k, case.context, generator)
    return {
        "q": _normal(generator, case.rows, case.heads, width, dtype=case.dtype),
        "kv_cache": cache,
        "slots": context.slots(positions),
        "scale": width**-0.5,
        "v_dim": case.latent,
        "phase": case.phase,
    }


def _scattered(case: BenchCase, slots: int, generator: torch.Generator) -> torch.Tensor:
    """`[rows]` distinct slots int64, none in the dummy page."""
    order = torch.randperm(slots - PAGE_SIZE, generator=generator, device=generator.device)
    return order[: case.rows] + PAGE_SIZE


def _written_slots(case: BenchCase) -> int:
    """Slots of a cache that is only written to: four times the tokens, whole pages."""
    return (-(-4 * case.rows // PAGE_SIZE) + 1) * PAGE_SIZE


def _writing_latent(case: BenchCase, generator: torch.Generator, cache: Any) -> Arguments:
    return {
        "kv_cache": cache,
        "slots": _scattered(case, _written_slots(case), generator),
        "latent": _normal(generator, case.rows, case.latent, dtype=case.dtype),
        "rope": _normal(generator, case.rows, case.rope, dtype=case.dtype),
    }


def _writing_key(case: BenchCase, generator: torch.Generator, cache: Any) -> Arguments:
    return {
        "index_cache": cache,
        "slots": _scattered(case, _written_slots(case), generator),
        "keys": _normal(generator, case.rows, case.index_dim, dtype=case.dtype),
    }


def _gathering(case: BenchCase, generator: torch.Generator, cache: Any) -> Arguments:
    return {
        "kv_cache": cache,
        "slots": _scattered(case, cache.shape[0], generator),
        "v_dim": case.latent,
        "dtype": case.dtype,
    }


def _written_latent_cache(case: BenchCase, generator: torch.Generator) -> torch.Tensor:
    return _latent_cache(case, _written_slots(case), generator.device)


def _written_index_cache(case: BenchCase, generator: torch.Generator) -> torch.Tensor:
    return _index_cache(case, _written_slots(case), generator.device)


# What each operation's cache is called, and how it is made. Top-k has none.
_CACHES: dict[str, tuple[str, Callable[[BenchCase, torch.Generator], torch.Tensor]]] = {
    "indexer_logits": ("index_cache", _filled_index_cache),
    "select": ("index_cache", _filled_index_cache),
    "sparse_mla": ("kv_cache", _filled_latent_cache),
    "write_latent": ("kv_cache", _written_latent_cache),
    "write_index_key": ("index_cache", _written_index_cache),
    "gather_latent": ("kv_cache", _filled_latent_cache),
}

_MAKERS: dict[str, Callable[[BenchCase, torch.Generator, Any], Arguments]] = {
    "indexer_logits": _scoring,
    "topk": _topk,
    "select": _selecting,
    "sparse_mla": _attending,
    "write_latent": _writing_latent,
    "write_index_key": _writing_key,
    "gather_latent": _gathering,
}
