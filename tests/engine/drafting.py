"""Tiny checkpoints with an MTP layer, wrong or mostly right, for tests of speculation."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.conftest import make_model, make_tokenizer
from topkapi.attention import ForwardBatch, ForwardMode, NativeSparseAttnBackend
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.engine.llm import LLM
from topkapi.engine.request import RequestOutput, SamplingParams
from topkapi.engine.speculative import SpeculativeRunner
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import compute_logits, install, run_decoder
from topkapi.models.loading import load_model
from topkapi.models.mtp import load_mtp

VOCAB = 290
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of([1, 2, 7, 8, 9, 16, 17, 40, 63, 65, 100, 130])


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    """Complete, and leave nothing behind."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert not llm.engine.has_work
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def runner_of(llm: LLM) -> SpeculativeRunner:
    runner = llm.engine._runner
    assert isinstance(runner, SpeculativeRunner)
    return runner


def branches(layer: Any) -> list[nn.Parameter]:
    """What a decoder layer adds to its input goes through these."""
    return [
        weight
        for name, weight in layer.named_parameters()
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
    ]


def mtp_tensors(
    model: Any, *, seed: int, guesses: bool, influence: float
) -> dict[str, torch.Tensor]:
    """An MTP layer under its official names: random, or (`guesses`) one that looks at the newest
    token as the model does.
    """
    config = copy.deepcopy(model.config)
    torch.manual_seed(seed)
    layer = type(model)(config).float().model.layers[-1]
    hidden = config.hidden_size
    # The newest token above all, and as much of the hidden state as the model's layers count for.
    looks = torch.cat((torch.eye(hidden), influence * torch.randn(hidden, hidden)), dim=1)
    with torch.no_grad():
        for weight in branches(layer):
            weight.mul_(1.5 * influence if guesses else 1.0)
    own = {
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": looks if guesses else torch.randn(hidden, 2 * hidden) * 0.3,
        "shared_head.norm.weight": torch.ones(hidden),
        "shared_head.head.weight": model.lm_head.weight.detach().clone(),
        "embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
        **split_experts(layer.state_dict()),
    }
    number = config.num_hidden_layers
    return {f"model.layers.{number}.{name}": tensor.clone() for name, tensor in own.items()}


def split_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers' stacked experts, one by one as checkpoints have them."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        stem, found, kind = name.rpartition(".experts.")
        if not found:
            out[name] = tensor
            continue
        for number, weight in enumerate(tensor):
            if kind == "down_proj":
                out[f"{stem}.experts.{number}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2)
                out[f"{stem}.experts.{number}.gate_proj.weight"] = gate
                out[f"{stem}.experts.{number}.up_proj.weight"] = up
    return out


def save_checkpoint(
    path: Path, *, guesses: bool, vocab_size: int | None = None, influence: float = 0.08
) -> Path:
    """A tiny model whose layers add `influence` as much as they would, and its MTP layer.

    With a vocabulary of its own it has no tokenizer.
    """
    tokenizer = make_tokenizer() if vocab_size is None else None
    model = make_model(len(tokenizer) if tokenizer else vocab_size or 0)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in branches(layer):
                weight.mul_(influence)
        if guesses:
            # Each token has a likely successor, unless the context says otherwise.
            successor = torch.randperm(model.config.vocab_size)
            model.lm_head.weight[successor] = 3 * model.model.embed_tokens.weight
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(path)
    if tokenizer:
        tokenizer.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    tensors |= mtp_tensors(model, seed=7, guesses=guesses, influence=influence)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class Oracle:
    """The model and its MTP layer over whole texts, in caches of their own."""

    def __init__(self, path: Path) -> None:
        self._model = load_model(path, "fp32", "cpu")
        self._config = install(self._model)
        self._mtp = load_mtp(self._model, self._config)

    def hidden(self, text: list[int]) -> torch.Tensor:
        """`[T, hidden]`."""
        return self._run(
            text, lambda ids, positions, step: run_decoder(self._model, ids, positions, step)
        )

    def logprobs(self, text: list[int]) -> torch.Tensor:
        """`[T, V]`: row t is of token t + 1."""
        return compute_logits(self._model, self.hidden(text)).log_softmax(-1)

    def draft_logits(self, text: list[int]) -> torch.Tensor:
        """`[T - 1, V]`: row t is what the layer says of token t + 2."""
        hidden = self.hidden(text)[:-1]
        out = self._run(
            text[1:], lambda ids, positions, step: self._mtp.run(ids, hidden, positions, step)
        )
        return self._mtp.logits(out)

    def _run(self, text: list[int], forward: Any) -> torch.Tensor:
        size = len(text)
        rows = ReqToTokenPool(1, size)
        rows.req_to_token[0] = torch.arange(8, 8 + size)
        pool = NSATokenToKVPool(
            self._config,
            size // 8 + 3,
            page_size=8,
            kv_cache_dtype="fp32",
            layers=range(self._config.num_hidden_layers + 1),
        )
        backend = NativeSparseAttnBackend(
            self._config, req_to_token_pool=rows, token_to_kv_pool=pool
        )
        batch = ForwardBatch.from_lengths(ForwardMode.EXTEND, [size], [size], [0], rows, pool)
        backend.init_forward_metadata(batch)
        with torch.inference_mode():
            result: torch.Tensor = forward(
                torch.tensor(text), batch.positions, DsaStep(backend, batch)
            )
        return result
