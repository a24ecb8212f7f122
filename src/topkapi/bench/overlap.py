"""`topkapi bench overlap`: how alike are the selections of neighbouring queries in the demo model?

Whole documents are prefilled, and the selections of all rows of each layer kept; only rows in the
second half of a document count, where k is a small part of the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from topkapi.demo.documents import make_document
from topkapi.engine.llm import LLM
from topkapi.engine.request import SamplingParams

DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def measure(*, context: int, documents: int, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """One row a layer: the mean share at each distance, over documents of `context` tokens."""
    llm = LLM(
        "demo",
        device=device,
        dtype="fp32",
        enable_prefix_cache=False,
        max_running_requests=1,
    )
    recorder = _Recorder()
    model: Any = llm.model
    for layer_id, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(recorder.hook(layer_id), with_kwargs=True)
    shares: dict[int, list[dict[int, float]]] = {}
    for number in range(documents):
        recorder.seen.clear()
        _prefill(llm, seed * 1_000_003 + number, context)
        for layer_id, parts in recorder.seen.items():
            lengths, slots = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            late = lengths > context // 2
            shares.setdefault(layer_id, []).append(shared(lengths[late], slots[late]))
    for layer_id, found in sorted(shares.items()):
        mean = {d: sum(one[d] for one in found) / len(found) for d in found[0]}
        yield {
            "layer": layer_id,
            "k": llm.config.index_topk,
            "context": context,
            "documents": documents,
            "shares": mean,
        }


def shared(lengths: torch.Tensor, slots: torch.Tensor) -> dict[int, float]:
    """Of selections `slots [R, K]` (-1 is none) of consecutive rows of one request with
    `lengths [R]`: the mean share that the row `distance` before had selected, too.
    """
    flags = torch.zeros(len(slots), int(slots.max()) + 1, dtype=torch.bool, device=slots.device)
    row = torch.arange(len(slots), device=slots.device)[:, None].expand_as(slots)
    flags[row[slots >= 0], slots[slots >= 0].long()] = True
    found = {}
    for distance in DISTANCES:
        if distance >= len(slots):
            break
        later, earlier = flags[distance:], flags[:-distance]
        neighbours = lengths[distance:] - lengths[:-distance] == distance
        share = (later & earlier).sum(1) / later.sum(1).clamp_min(1)
        found[distance] = float(share[neighbours].mean())
    return found


class _Recorder:
    """Keeps `(lengths [R], slots [R, K])` of every layer and forward pass that selects."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def hook(self, layer_id: int) -> Any:
        def look(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            metadata = kwargs["dsa_step"].parts[0].backend.forward_metadata
            slots = metadata.selection.slots
            if slots is not None and not metadata.selects_everything:
                pair = metadata.nsa_seqlens_expanded.clone(), slots.clone()
                self.seen.setdefault(layer_id, []).append(pair)

        return look


def _prefill(llm: LLM, seed: int, context: int) -> None:
    tokenizer = llm.tokenizer
    document = make_document(
        seed,
        num_tokens=context,
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )
    message = {"role": "user", "content": document.prompt(document.questions[0])}
    llm.chat([message], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
