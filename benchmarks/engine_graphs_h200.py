"""How long is a decoding step of the whole engine, replayed and run module by module?

    python benchmarks/engine_graphs_h200.py --out engine_graphs.jsonl

A step is one `engine.step()`, from the call to its tokens on the host: scheduling, metadata, model,
sampling, detokenising. `batch` requests of the demo model in bf16 go on from contexts of 512
tokens, greedily; the median is over all steps after the first ten, and the two engines take turns.
With drafts a step verifies 3 of them for each request, and `us_per_token` is what counts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from topkapi import LLM, SamplingParams
from topkapi.bench.record import environment, write_lines

CONTEXT, STEPS, ROUNDS = 512, 40, 2
CASES = ((1, 0), (8, 0), (64, 0), (1, 3), (8, 3))


def make(drafts: int, *, graphs: bool, device: str) -> LLM:
    return LLM(
        "demo",
        device=device,
        dtype="bf16" if device == "cuda" else "fp32",
        max_tokens_in_cache=64 * 1024,
        max_running_requests=64,
        max_batch_tokens=8192,
        speculative_num_steps=drafts,
        enable_prefix_cache=False,
        cuda_graphs=graphs,
    )


def steps_of(llm: LLM, batch: int, seed: int) -> tuple[list[float], int]:
    """Seconds of each decoding step, and the tokens they gave."""
    rng = random.Random(seed)
    engine, seconds, tokens = llm.engine, [], 0
    params = SamplingParams(temperature=0, max_tokens=STEPS + 12, ignore_eos=True)
    for _ in range(batch):
        engine.add([rng.randrange(300, 1400) for _ in range(CONTEXT)], params)
    while engine.has_work:
        began = time.perf_counter()
        updates = engine.step()
        spent = time.perf_counter() - began
        if len(updates) == batch and not any(update.output for update in updates):
            seconds.append(spent)
            tokens += sum(len(update.token_ids) for update in updates)
    kept = seconds[10:] or seconds
    return kept, round(tokens * len(kept) / max(len(seconds), 1))


def measure(batch: int, drafts: int, device: str) -> dict[str, Any]:
    engines = {graphs: make(drafts, graphs=graphs, device=device) for graphs in (True, False)}
    spent: dict[bool, list[float]] = {True: [], False: []}
    tokens = {True: 0, False: 0}
    for round_number in range(ROUNDS + 1):
        for graphs, llm in engines.items():
            seconds, count = steps_of(llm, batch, round_number)
            if round_number:  # the first one compiles and captures
                spent[graphs] += seconds
                tokens[graphs] += count
    row: dict[str, Any] = {"bench": "engine_graphs", "batch": batch, "drafts": drafts}
    for graphs, name in ((True, "graphs"), (False, "eager")):
        row[f"us_{name}"] = median(spent[graphs]) * 1e6
        row[f"us_per_token_{name}"] = sum(spent[graphs]) / max(tokens[graphs], 1) * 1e6
    row["ratio"] = row["us_eager"] / row["us_graphs"]
    stats = engines[True].stats()
    row["graphs"] = {**stats.to_json()["graphs"]}
    row["seconds"] = stats.seconds
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="only to see that it runs")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    rows = []
    for batch, drafts in CASES[:1] if options.cpu else CASES:
        row = measure(batch, drafts, device)
        rows.append({**row, **environment(torch.device(device))})
        print(json.dumps(row), flush=True)
    if options.out:
        write_lines(options.out, rows)


if __name__ == "__main__":
    main()
