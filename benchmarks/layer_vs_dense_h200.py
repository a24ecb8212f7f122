"""One layer's attention at a long context: sparse against dense, both in latent space.

    python benchmarks/layer_vs_dense_h200.py --out layer_vs_dense.jsonl

Ours is all a layer does between its projections, through the backend: both records of the new
tokens written, the context scored, the best 2048 selected, attended. Dense is absorbed MLA through
`torch.nn.functional.scaled_dot_product_attention` over latents that lie in order already, as one
key and value head of 576 and 512 dims: either all heads' queries go to that one head (`rows`), or
it is expanded, without a copy, to as many heads (`heads`). Backends and layouts are tried on a
small piece and the fastest goes on. Of new prompt rows it takes 64 at a time, so that scores fit,
and leaves out the causal mask among those 64, which saves it time.

Sizes are DeepSeek-V3.2's, data random, bf16.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from random_cache import random_cache
from topkapi.attention import AttentionLayer, ForwardBatch, ForwardMode, NativeSparseAttnBackend
from topkapi.bench.clock import Timed, interleaved, prepare
from topkapi.bench.random_model import random_config
from topkapi.bench.record import environment, write_lines
from topkapi.config import DsaConfig

DECODE, PREFILL = (1, 8, 64), (1024, 4096)
CONTEXT = 65536
ROWS_AT_ONCE = 64
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The math backend would copy what is expanded.
LAYOUTS = {"flash": ("heads", "rows"), "cudnn": ("heads", "rows"), "efficient": ("heads", "rows")}
Row = dict[str, Any]


def sparse_layer(
    config: DsaConfig, requests: int, rows: int, context: int, cache: str, device: torch.device
) -> Callable[[], torch.Tensor]:
    """The call that attends `rows` new tokens of each request to its context."""
    table, pool = random_cache(config, requests, context, cache, device)
    backend = NativeSparseAttnBackend(
        config, req_to_token_pool=table, token_to_kv_pool=pool, device=device
    )
    mode = ForwardMode.DECODE if rows == 1 else ForwardMode.EXTEND
    batch = ForwardBatch.from_lengths(
        mode, [rows] * requests, [context] * requests, range(requests), table, pool
    )
    backend.init_forward_metadata(batch)
    layer = AttentionLayer(
        tp_q_head_num=config.num_attention_heads,
        head_dim=config.latent_width,
        v_head_dim=config.kv_lora_rank,
        scaling=config.scaling,
        layer_id=0,
    )
    dtype = torch.float32 if cache == "fp32" else torch.bfloat16
    total = requests * rows

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(total, *shape, device=device, dtype=dtype)

    q, kv = normal(config.num_attention_heads, config.latent_width), normal(config.latent_width)
    index_q, index_k = (
        normal(config.index_n_heads, config.index_head_dim),
        normal(config.index_head_dim),
    )
    weights = torch.randn(total, config.index_n_heads, device=device)
    weights *= (config.index_n_heads * config.index_head_dim) ** -0.5

    def run() -> torch.Tensor:
        indices = backend.forward_indexer(index_q, index_k, weights, 0, batch)
        return backend.forward(q, kv[:, None], None, layer, batch, topk_indices=indices)

    return run


def dense_layer(
    config: DsaConfig, requests: int, rows: int, context: int, device: torch.device
) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    """All of the dense attention in a layout, and a piece of it to try backends on."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    keys = torch.randn(requests, 1, context, config.latent_width, device=device, dtype=dtype)
    values = keys[..., : config.kv_lora_rank]
    heads = config.num_attention_heads
    q = torch.randn(requests, heads, rows, config.latent_width, device=device, dtype=dtype)
    flat = q.transpose(1, 2).reshape(requests, 1, rows * heads, -1)

    def attend(layout: str, first: int, last: int, some: int) -> torch.Tensor:
        seen = context - rows + last
        k, v = keys[:some, :, :seen], values[:some, :, :seen]
        if layout == "rows":
            part = flat[:some, :, first * heads : last * heads]
        else:
            part = q[:some, :, first:last]
            k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
        return scaled_dot_product_attention(part, k, v, scale=config.scaling)

    def whole(layout: str) -> None:
        for first in range(0, rows, ROWS_AT_ONCE):
            attend(layout, first, min(first + ROWS_AT_ONCE, rows), requests)

    return whole, lambda layout: attend(layout, 0, min(ROWS_AT_ONCE, rows), min(requests, 8))


def fastest_backend(
    piece: Callable[[str], Any], device: torch.device
) -> tuple[tuple[str, str], Row]:
    """Backend and layout of the fastest that can be, and what each took or why it refuses."""
    tried: Row = {}
    for name, backend in BACKENDS.items():
        for layout in LAYOUTS.get(name, ("rows",)):
            with warnings.catch_warnings(), sdpa_kernel([backend]):
                warnings.simplefilter("ignore")
                try:
                    taken = dense_seconds(partial(piece, layout), device)
                    tried[f"{name} {layout}"] = 1e6 * taken
                except RuntimeError as error:
                    reason = str(error).splitlines()[0][:60]
                    tried[f"{name} {layout}"] = f"refused: {reason}"
    usable = {name: taken for name, taken in tried.items() if not isinstance(taken, str)}
    name, layout = min(usable, key=lambda name: usable[name]).split()
    return (name, layout), tried


def dense_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of three runs, launched and not captured: the math backend's memory would stay."""
    call()
    return median(interleaved({"dense": Timed(call, "launches")}, 3, device)["dense"])


def measure(
    device: torch.device,
    config: DsaConfig,
    cases: list[tuple[int, int]],
    context: int,
    repeats: int,
) -> Iterator[Row]:
    """A row a case and side, `(requests, rows)` each; ratios are dense / ours."""
    formats = ("bf16", "fp8") if device.type == "cuda" else ("fp32",)
    for requests, rows in cases:
        case = {"phase": "decode" if rows == 1 else "prefill", "requests": requests, "rows": rows}
        case |= {"context": context}
        whole, piece = dense_layer(config, requests, rows, context, device)
        (backend, layout), tried = fastest_backend(piece, device)
        with sdpa_kernel([BACKENDS[backend]]):
            dense = dense_seconds(partial(whole, layout), device) * 1e6
        yield {**case, "side": f"dense {backend} {layout}", "us": dense, "piece_us": tried}
        del whole, piece
        for cache in formats:
            gc.collect()
            run = sparse_layer(config, requests, rows, context, cache, device)
            timed = prepare(run, device)
            ours = median(interleaved({"ours": timed}, repeats, device)["ours"]) * 1e6
            row = {**case, "side": f"topkapi {cache}", "how": timed.how, "us": ours}
            yield {**row, "ratio": dense / ours}
            del run, timed


def show(row: Row) -> None:
    size = f"{row['phase']:7} {row['requests']:3} x {row['rows']:4} rows, {row['context']} tokens"
    ratio = f"{row['ratio']:.1f} times faster than dense" if "ratio" in row else row["piece_us"]
    print(f"{size}  {row['side']:16} {row['us']:10.0f} us  {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--decode", default=",".join(map(str, DECODE)))
    parser.add_argument("--prefill", default=",".join(map(str, PREFILL)))
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [(int(text), 1) for text in arguments.decode.split(",") if text]
    cases += [(1, int(text)) for text in arguments.prefill.split(",") if text]
    config = DsaConfig.from_hf(random_config(num_hidden_layers=1))
    rows = []
    for row in measure(device, config, cases, arguments.context, arguments.repeats):
        show(row)
        rows.append({"bench": "layer_vs_dense", **row})
    if arguments.out:
        facts = environment(device)
        write_lines(arguments.out, [{**row, **facts} for row in rows])


if __name__ == "__main__":
    main()
