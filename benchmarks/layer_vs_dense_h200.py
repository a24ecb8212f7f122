"""One layer's attention at a long context: sparse against dense, both in latent space.

    python benchmarks/layer_vs_dense_h200.py --out layer_vs_dense.jsonl

Ours is all a layer does between its projections, through the backend: both records of the new
tokens written, the context scored, the best 2048 selected, attended. Dense is absorbed MLA through
`torch.nn.functional.scaled_dot_product_attention`: the heads of a row are its queries, the latents
one key and value head of 576 and 512 dims, lying in order already. Its backends are tried on a
small piece and the fastest goes on. Of new prompt rows it takes 64 at a time, so that scores fit,
and leaves out the causal mask among those 64, which saves it time.

Sizes are DeepSeek-V3.2's, data random, bf16.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from device_time import device_times
from random_cache import random_cache
from topkapi.attention import AttentionLayer, ForwardBatch, ForwardMode, NativeSparseAttnBackend
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
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """All of the dense attention, and a piece of it to try backends on."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    keys = torch.randn(requests, 1, context, config.latent_width, device=device, dtype=dtype)
    values = keys[..., : config.kv_lora_rank]
    heads = config.num_attention_heads
    q = torch.randn(requests, 1, rows * heads, config.latent_width, device=device, dtype=dtype)

    def attend(first: int, last: int, some: int) -> torch.Tensor:
        seen = context - rows + last
        return scaled_dot_product_attention(
            q[:some, :, first * heads : last * heads],
            keys[:some, :, :seen],
            values[:some, :, :seen],
            scale=config.scaling,
        )

    def whole() -> None:
        for first in range(0, rows, ROWS_AT_ONCE):
            attend(first, min(first + ROWS_AT_ONCE, rows), requests)

    return whole, lambda: attend(0, min(ROWS_AT_ONCE, rows), min(requests, 8))


def fastest_backend(piece: Callable[[], Any], device: torch.device) -> tuple[str, Row]:
    """The name of the fastest usable backend, and what each took or why it refuses."""
    tried: Row = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel([backend]):
                piece()
                tried[name] = 1e6 * median(device_times(piece, device, repeats=3, graph=False))
        except RuntimeError as error:
            tried[name] = f"refused: {str(error).splitlines()[0][:80]}"
    usable = {name: taken for name, taken in tried.items() if not isinstance(taken, str)}
    return min(usable, key=lambda name: usable[name]), tried


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
        backend, tried = fastest_backend(piece, device)
        with sdpa_kernel([BACKENDS[backend]]):
            dense = median(device_times(whole, device, repeats=3, graph=False)) * 1e6
        yield {**case, "side": f"dense {backend}", "us": dense, "piece_us": tried}
        del whole, piece
        for cache in formats:
            gc.collect()
            run = sparse_layer(config, requests, rows, context, cache, device)
            ours = median(device_times(run, device, repeats=repeats)) * 1e6
            yield {**case, "side": f"topkapi {cache}", "us": ours, "ratio": dense / ours}
            del run


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
