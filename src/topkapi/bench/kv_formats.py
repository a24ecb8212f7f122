"""`topkapi bench kv-formats`: what a cache format costs in accuracy, on the demo model.

Each format runs the same held-out text and the same fresh documents; fp32 is what the others are
compared with. The first layer's input is equal for all, so its error is attention's own (selection
included); the last layer's carries what the layers before it lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from topkapi.bench import recall
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams
from topkapi.engine.summary import summarise


@dataclass(frozen=True)
class Format:
    """One way to keep and to read the cache. Index keys follow the latents' format."""

    name: str
    kv_cache_dtype: str
    options: BackendOptions


FORMATS = (
    Format("fp32", "fp32", BackendOptions()),
    Format("bf16", "bf16", BackendOptions()),
    Format("fp8, records", "fp8", BackendOptions(fp8_compute="records")),
    Format("fp8, dequantised", "fp8", BackendOptions(fp8_compute="dequantize_selected")),
)


def measure(
    formats: Sequence[Format],
    *,
    device: str,
    windows: int,
    documents: int,
    context: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """One row a format: bytes a token, attention errors, perplexity, recall."""
    wanted: list[torch.Tensor] | None = None
    cache_bytes = summarise("demo").cache_bytes
    for form in formats:
        llm = LLM(
            "demo",
            device=device,
            dtype="fp32",
            kv_cache_dtype=form.kv_cache_dtype,
            backend_options=form.options,
            max_batch_tokens=context,
            enable_prefix_cache=False,
        )
        texts = _windows(llm, windows, context)
        outputs = _attention_outputs(llm, texts[0])
        wanted = outputs if wanted is None else wanted
        result = recall.measure(
            llm, documents=documents, context=context, seed=seed, use_tqdm=False
        )
        yield {
            "format": form.name,
            "bytes_per_token": cache_bytes[form.kv_cache_dtype],
            "first_layer_error": _relative_error(outputs[0], wanted[0]),
            "last_layer_error": _relative_error(outputs[-1], wanted[-1]),
            "perplexity": _perplexity(llm, texts),
            "windows": windows,
            "context": context,
            "documents": documents,
            "recall": result.recall,
        }


def _windows(llm: LLM, count: int, length: int) -> list[list[int]]:
    """The first `count` stretches of `length` tokens of the held-out text."""
    text = resources.files("topkapi.demo").joinpath("filler.txt").read_text(encoding="utf-8")
    ids: list[int] = llm.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return [ids[at * length : (at + 1) * length - 1] for at in range(count)]


def _attention_outputs(llm: LLM, ids: list[int]) -> list[torch.Tensor]:
    """What each layer's attention hands to its output projection, `[T, H * V]` a layer."""
    seen: list[torch.Tensor] = []
    model: Any = llm.model
    layers = model.model.layers
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        for layer in layers
    ]
    llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    for hook in hooks:
        hook.remove()
    return seen[: len(layers)]


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def _perplexity(llm: LLM, texts: list[list[int]]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate(texts, params, use_tqdm=False):
        for token in output.prompt_logprobs or []:
            if token is not None:
                total, count = total - token.logprob, count + 1
    return math.exp(total / count)
