"""One measurement of one side, in a process of its own so that its peak memory is its own.

`python -m topkapi.bench.side SIDE MODEL CONTEXT DECODE_TOKENS DTYPE` prints one JSON object.
SIDE is `topkapi`, or `transformers-IMPLEMENTATION` (its own `sdpa` or `eager` attention). Both
sides run the same loop over the same prompt; only the attention differs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

PAGE_BYTES = 4096


class PeakMemory:
    """Samples this process's resident memory every few milliseconds (Linux)."""

    def __init__(self) -> None:
        self.start_bytes = self._resident()
        self.peak_bytes = self.start_bytes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, self._resident())

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@torch.inference_mode()
def measure(model: Any, prompt: torch.Tensor, decode_tokens: int) -> dict[str, Any]:
    """Prefill `prompt [1, S]`, then decode greedily; seconds, bytes above the loaded model, tokens.

    Decode is timed from the second generated token on: the first step of a cache may allocate.
    """
    tokens = []
    steps = []
    with PeakMemory() as memory:
        start = time.perf_counter()
        output = model(prompt, use_cache=True, logits_to_keep=1)
        prefill = time.perf_counter() - start
        for _ in range(decode_tokens):
            token = output.logits[:, -1:].argmax(-1)
            tokens.append(int(token))
            start = time.perf_counter()
            output = model(token, cache=output.cache, use_cache=True, logits_to_keep=1)
            steps.append(time.perf_counter() - start)
    steps = sorted(steps[1:])
    return {
        "prefill_seconds": prefill,
        "decode_seconds_per_token": steps[len(steps) // 2],
        "peak_bytes_above_model": memory.peak_bytes - memory.start_bytes,
        "tokens": tokens,
    }


def load(side: str, path: str, dtype: torch.dtype) -> Any:
    """The model at `path` with this side's attention."""
    from transformers import AutoModelForCausalLM

    from topkapi import attach

    implementation = side.removeprefix("transformers-") if side != "topkapi" else "eager"
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=implementation
    ).eval()
    return attach(model) if side == "topkapi" else model


def main(arguments: list[str]) -> None:
    """Measure once, after one short warm-up, and print the result as JSON."""
    side, path, context, decode_tokens, dtype = arguments
    model = load(side, path, getattr(torch, dtype))
    generator = torch.Generator().manual_seed(int(context))
    vocabulary = model.config.vocab_size
    prompt = torch.randint(4, vocabulary, (1, int(context)), generator=generator)
    measure(model, prompt[:, :256], 2)
    print(json.dumps(measure(model, prompt, int(decode_tokens))))


if __name__ == "__main__":
    main(sys.argv[1:])
