"""Starting a step: one builder against a plain re-creation of the per-request approach.

Run on a GPU: `python benchmarks/metadata_h200.py OUT.jsonl`. Both make the same lengths of a
TARGET_VERIFY step of 4 drafts and of a DECODE step; the per-request side makes one arange a
request, concatenates, reads lengths back to the host and gathers the wide page table, as engines
that grew mode by mode do. Reported: kernel launches and copies, host waits, microseconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from topkapi.attention import ForwardMode, NativeSparseAttnBackend, SpecInfo
from topkapi.bench.record import environment, quantiles, write_lines
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.doctor.choices import DEEPSEEK_V32

DRAFTS = 4
# Metadata is made once for all layers: one is enough.
CONFIG = replace(
    DEEPSEEK_V32, num_hidden_layers=1, indexer_types=("full",), num_nextn_predict_layers=0
)
MAX_CONTEXT, TOPK = CONFIG.max_position_embeddings, CONFIG.index_topk


def per_request(seq_lens: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, q: int) -> Any:
    """The step's tensors, request by request."""
    lens = (seq_lens + (q if q > 1 else 0)).tolist()
    expanded = torch.cat(
        [torch.arange(n - q + 1, n + 1, dtype=torch.int32, device=seq_lens.device) for n in lens]
    )
    page_table = table[rows, : max(lens)]
    page_table = page_table.repeat_interleave(q, dim=0)
    selected = expanded.clamp_max(TOPK)
    cu_k = torch.nn.functional.pad(selected.cumsum(0, dtype=torch.int32), (1, 0))
    cu_q = torch.arange(len(expanded) + 1, dtype=torch.int32, device=seq_lens.device)
    return expanded, page_table, selected, cu_k, cu_q


def count(run: Callable[[], object]) -> dict[str, int]:
    """Kernel launches (copies and fills included) and host waits of one call."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    names = [event.name for event in profiler.events()]
    starts = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    found = sum(name in waits for name in names)
    # The profiler's own closing wait is not the step's.
    return {
        "launches": sum(name.startswith(starts) for name in names),
        "host_waits": max(0, found - 1),
    }


def timed(run: Callable[[], object], repeats: int = 200) -> dict[str, float]:
    """Microseconds from the call to its last result being ready."""
    times = []
    for _ in range(repeats + 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return quantiles(times[20:])


def sides(
    size: int, mode: ForwardMode, q: int, device: torch.device
) -> tuple[NativeSparseAttnBackend, dict[str, Callable[[], Any]]]:
    """A backend whose graph is captured, and each side's call for one random batch."""
    table = ReqToTokenPool(size + 1, MAX_CONTEXT, device)
    pool = NSATokenToKVPool(CONFIG, 2, kv_cache_dtype="fp8", device=device)
    backend = NativeSparseAttnBackend(
        CONFIG, req_to_token_pool=table, token_to_kv_pool=pool, device=device
    )
    seq_lens_cpu = torch.randint(1000, 65536, (size,), dtype=torch.int32)
    seq_lens, spec = seq_lens_cpu.to(device), SpecInfo(draft_token_num=q)
    requests = torch.arange(1, size + 1, device=device)
    backend.init_cuda_graph_state(size, size * q)
    backend.init_forward_metadata_capture_cuda_graph(
        size, size * q, requests, seq_lens, None, mode, spec
    )

    def builder() -> None:
        backend.init_forward_metadata_replay_cuda_graph(
            size, requests, seq_lens, 0, None, mode, spec, seq_lens_cpu
        )

    def loop() -> Any:
        return per_request(seq_lens, table.req_to_token, requests, q)

    builder()
    if not torch.equal(backend.metadata.nsa_seqlens_expanded, loop()[0]):
        raise SystemExit(f"{mode.name} x {size}: the two sides disagree")
    return backend, {"topkapi": builder, "per request": loop}


def main(out: Path) -> None:
    """Measure both sides in turn at each batch size and write the rows."""
    device = torch.device("cuda")
    rows = []
    for size in (1, 8, 32, 64, 128, 160):
        for mode, q in ((ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, DRAFTS)):
            backend, calls = sides(size, mode, q, device)
            for side, run in calls.items():
                row = {"side": side, "mode": mode.name, "batch": size}
                row |= {"microseconds": timed(run), **count(run)}
                print(json.dumps(row), flush=True)
                row["graph_bytes"] = backend.cuda_graph_bytes() if side == "topkapi" else None
                rows.append({"bench": "metadata", **row, **environment(device)})
    write_lines(out, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
