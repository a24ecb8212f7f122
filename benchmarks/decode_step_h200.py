"""Where does a decode step go, and how long is it in Transformers' own attention?

    python benchmarks/decode_step_h200.py --out decode_step.jsonl

The model has 4 layers of DeepSeek-V3.2's sizes and random weights (`topkapi.bench.random_model`),
in bf16; its caches are random, written straight into the pools. A step is one new token for each of
`batch` requests whose contexts have `context` tokens: decoder, head, argmax.

Ours is timed as a CUDA graph, the way the engine runs it: the whole step, then from the same inputs
the attention modules alone, and of them what the indexer does (key written, context scored, best
2048 selected) and the sparse attention (latent written, attended). `projections` is what the
modules do besides, `rest` the step less the attention: norms, MLPs, head. `eager` is the whole step
launched kernel by kernel, from the call to its last result.

Transformers' side is the same model with its own attention and its own cache (`DynamicCache`, grown
by a token a step), launched kernel by kernel, for it has no graph: the step from the call to its
last result, and of it the attention modules and their indexers by events. It expands every latent
of the context for every head, so that it may not fit.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from random_cache import random_cache
from topkapi.attention import ForwardBatch, ForwardMode, NativeSparseAttnBackend
from topkapi.bench.clock import interleaved, prepare
from topkapi.bench.random_model import random_model
from topkapi.bench.record import environment, write_lines
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.config import DsaConfig
from topkapi.engine.timeline import Clock, DeviceClock, HostClock
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import attention_modules, compute_logits, install, run_decoder

CASES = ((1, 8192), (1, 65536), (64, 8192), (64, 65536))
PARTS = ("step", "attention", "indexer", "sparse_mla", "projections", "rest", "eager")
Row = dict[str, Any]


class RecordingBackend(NativeSparseAttnBackend):
    """Remembers what its layers were given while `recording`, so that they can be run again."""

    recording = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.indexed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.attended: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward_indexer(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        if self.recording:
            self.indexed.append((args, kwargs))
        return super().forward_indexer(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.recording:
            self.attended.append((args, kwargs))
        return super().forward(*args, **kwargs)


def measure_ours(
    model: Any, config: DsaConfig, table: ReqToTokenPool, pool: NSATokenToKVPool, *, repeats: int
) -> Iterator[Row]:
    """Microseconds of each part, for the requests and contexts of `table`."""
    requests, context = table.req_to_token.shape
    device = table.req_to_token.device
    backend = RecordingBackend(
        config, req_to_token_pool=table, token_to_kv_pool=pool, device=device
    )
    batch = ForwardBatch.from_lengths(
        ForwardMode.DECODE, [1] * requests, [context] * requests, range(requests), table, pool
    )
    backend.init_forward_metadata(batch)
    tokens = torch.randint(10, 100, (requests,), device=device)
    step = DsaStep(backend, batch)

    def whole() -> torch.Tensor:
        hidden = run_decoder(model, tokens, batch.positions, step)
        return compute_logits(model, hidden).argmax(-1)

    calls = _record(model, config, backend, whole)
    timed = {part: prepare(call, device) for part, call in calls.items()}
    taken = interleaved(timed, repeats, device)
    times = {part: median(seconds) * 1e6 for part, seconds in taken.items()}
    times["projections"] = times["attention"] - times["indexer"] - times["sparse_mla"]
    times["rest"] = times["step"] - times["attention"]
    times["eager"] = median(host_seconds(whole, device, repeats)) * 1e6
    how = {part: call.how for part, call in timed.items()}
    yield {"side": "topkapi", "cache": pool.kv_cache_dtype, "how": how["step"], "us": times}


def _record(
    model: Any, config: DsaConfig, backend: RecordingBackend, whole: Callable[[], Any]
) -> dict[str, Callable[[], Any]]:
    """Each part as a call over the inputs that one whole step gave it."""
    inputs: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append((module, args, kwargs)), with_kwargs=True
        )
        for module in attention_modules(model, config)
    ]
    backend.recording = True
    whole()
    backend.recording = False
    for handle in handles:
        handle.remove()
    indexed, attended = backend.indexed, backend.attended
    return {
        "step": whole,
        "attention": lambda: [module(*args, **kwargs) for module, args, kwargs in inputs],
        "indexer": lambda: [backend.forward_indexer(*args, **kw) for args, kw in indexed],
        "sparse_mla": lambda: [backend.forward(*args, **kw) for args, kw in attended],
    }


def host_seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Seconds from each call to its last result being there, after two that do not count."""
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[2:]


def measure_transformers(
    model: Any, config: DsaConfig, requests: int, context: int, attention: str, *, repeats: int
) -> Iterator[Row]:
    """Microseconds of the step and its attention, or the reason that there are none."""
    row: Row = {"side": f"transformers-{attention}", "cache": "bf16", "how": "launches"}
    expanded = requests * context * config.num_attention_heads * model.dtype.itemsize
    expanded *= 2 * config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    device = model.device
    if device.type == "cuda" and expanded > torch.cuda.get_device_properties(device).total_memory:
        reason = f"out of memory: keys and values of all heads take {expanded / 1e9:.0f} GB"
        yield {**row, "failed": reason}
        return
    model.set_attn_implementation(attention)
    try:
        yield {**row, "us": _transformers_times(model, config, requests, context, repeats)}
    except torch.OutOfMemoryError as error:
        yield {**row, "failed": str(error).split(". ")[0]}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _transformers_times(
    model: Any, config: DsaConfig, requests: int, context: int, repeats: int
) -> Row:
    device = model.device
    cache = DynamicCache(config=model.config)
    for layer in range(config.num_hidden_layers):
        for width, store in (
            ((config.kv_lora_rank, config.qk_rope_head_dim), cache.update),
            ((config.index_head_dim,), cache.update_indexer),
        ):
            shape = (requests, 1, context - 1) if len(width) == 2 else (requests, context - 1)
            parts = [torch.randn(*shape, w, device=device, dtype=model.dtype) for w in width]
            store(*parts, layer)
    tokens = torch.randint(10, 100, (requests, 1), device=device)
    modules = attention_modules(model, config)
    watched = {"attention": modules, "indexer": [module.indexer for module in modules]}
    spans = {name: _Spans(parts, device) for name, parts in watched.items()}
    with torch.no_grad():
        whole = host_seconds(
            lambda: model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1),
            device,
            repeats,
        )
    # Spans have the two first steps, too.
    parts = {name: span.end(config.num_hidden_layers)[2:] for name, span in spans.items()}
    parts["step"] = whole
    parts["rest"] = [a - b for a, b in zip(whole, parts["attention"], strict=True)]
    return {name: median(seconds) * 1e6 for name, seconds in parts.items()}


class _Spans:
    """Times between entering and leaving some modules."""

    def __init__(self, modules: list[Any], device: torch.device) -> None:
        self._clock: Clock = DeviceClock(device) if device.type == "cuda" else HostClock()
        self._marks: list[Any] = []
        self._handles = []
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._mark))
            self._handles.append(module.register_forward_hook(self._mark))

    def _mark(self, *_: Any) -> None:
        self._marks.append(self._clock.mark())

    def end(self, calls_a_step: int) -> list[float]:
        """Seconds of each step; stops watching."""
        for handle in self._handles:
            handle.remove()
        moments = self._clock.seconds(self._marks)
        times = [end - begin for begin, end in zip(moments[::2], moments[1::2], strict=True)]
        return [sum(times[i : i + calls_a_step]) for i in range(0, len(times), calls_a_step)]


def measure(
    device: torch.device, cases: Any, sides: set[str], repeats: int, **sizes: Any
) -> Iterator[Row]:
    """Rows as they are measured: Transformers' sides first, while the memory is free."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(device, dtype, **sizes)
    config = install(model)
    for requests, context in cases:
        for attention in ("sdpa", "eager"):
            if f"transformers-{attention}" in sides:
                for row in measure_transformers(
                    model, config, requests, context, attention, repeats=max(3, repeats // 2)
                ):
                    yield {"batch": requests, "context": context, **row}
    formats = ("bf16", "fp8") if device.type == "cuda" else ("fp32",)
    for cache_format in formats if "topkapi" in sides else ():
        for requests, context in cases:
            table, pool = random_cache(config, requests, context, cache_format, device)
            for row in measure_ours(model, config, table, pool, repeats=repeats):
                yield {"batch": requests, "context": context, **row}
            del table, pool
            gc.collect()


def with_ratios(rows: list[Row]) -> list[Row]:
    """Transformers' rows with `ratio`: their part over ours in the bf16 cache's graph."""
    ours = {
        (row["batch"], row["context"]): row["us"]
        for row in reversed(rows)
        if row["side"] == "topkapi" and row["cache"] != "fp8"
    }
    out = []
    for row in rows:
        same = ours.get((row["batch"], row["context"]))
        if row["side"] != "topkapi" and "us" in row and same:
            ratios = {name: row["us"][name] / same[name] for name in row["us"]}
            row = {**row, "ratio": ratios, "ratio_to_eager": row["us"]["step"] / same["eager"]}
        out.append(row)
    return out


def show(row: Row) -> None:
    """One line a row, as soon as it is there."""
    name = f"{row['batch']:3} x {row['context']:6} {row['side']:18} {row['cache']:4}"
    if "failed" in row:
        print(f"{name} {row['failed']}", flush=True)
        return
    times = " ".join(f"{part} {row['us'][part]:.0f}" for part in PARTS if part in row["us"])
    ratios = {key: round(value, 1) for key, value in row.get("ratio", {}).items()}
    print(f"{name} us: {times} {json.dumps(ratios) if ratios else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", default="", help="batch x context, as 1x8192,64x65536")
    parser.add_argument("--sides", default="topkapi,transformers-sdpa,transformers-eager")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try this script out")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [tuple(map(int, case.split("x"))) for case in arguments.cases.split(",") if case]
    rows = []
    sizes = TINY if arguments.tiny else {}
    for row in measure(
        device, cases or CASES, set(arguments.sides.split(",")), arguments.repeats, **sizes
    ):
        show(row)
        rows.append({"bench": "decode_step", "model": "random", **row})
    rows = with_ratios(rows)
    for row in rows:
        if "ratio" in row:
            show(row)
    if arguments.out:
        facts = environment(device)
        write_lines(arguments.out, [{**row, **facts} for row in rows])


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 64,
    "num_hidden_layers": 2,
    "vocab_size": 200,
}


if __name__ == "__main__":
    main()
