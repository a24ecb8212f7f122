"""Where is attention in a Transformers model, and how is the model run over flattened tokens?

`install` puts `DsaAttention` in place of every attention module's forward and `uninstall` undoes
it; `run_decoder` and `compute_logits` are how an engine runs such a model. Everything else stays
Transformers'. Knows nothing about generation or Transformers' caches.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from topkapi.config import DsaConfig
from topkapi.errors import UnsupportedModelError
from topkapi.models.attention import DsaAttention, DsaStep
from topkapi.models.row_invariant import RowInvariant

_PARTS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
_INDEXER_PARTS = ("wq_b", "wk", "k_norm", "weights_proj")


def decoder_of(model: Any) -> Any:
    """The stack of decoder layers of a Transformers model, or the model itself if it is that.

    Raises `UnsupportedModelError` for anything else, a wrapped model included.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"expected a Transformers model, got {type(model).__name__}; pass the model inside a "
            "wrapper, with its adapters merged"
        )
    decoder = getattr(model, model.base_model_prefix, model)
    if not hasattr(decoder, "layers"):
        raise UnsupportedModelError(f"{type(model).__name__} has no decoder layers")
    return decoder


def attention_modules(model: Any, config: DsaConfig) -> list[Any]:
    """The attention module of every layer, in order.

    Raises `UnsupportedModelError` naming each submodule that is missing, and for weights spread
    over several devices.
    """
    layers = decoder_of(model).layers
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"expected {config.num_hidden_layers} decoder layers, got {len(layers)}"
        )
    modules: list[Any] = []
    for layer_id, layer in enumerate(layers):
        module: Any = getattr(layer, "self_attn", None)
        missing = _missing_parts(module, config.owns_indexer(layer_id))
        if missing:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not a DSA model that Topkapi knows: attention of "
                f"layer {layer_id} has no {', '.join(missing)}"
            )
        modules.append(module)
    devices = sorted({str(module.kv_b_proj.weight.device) for module in modules})
    if len(devices) > 1:
        raise UnsupportedModelError(f"expected one device, attention is on {', '.join(devices)}")
    return modules


def _missing_parts(module: Any, owns_indexer: bool) -> list[str]:
    names = [name for name in (*_PARTS, "o_proj") if not hasattr(module, name)]
    if not hasattr(module, "q_b_proj") and not hasattr(module, "q_gate_proj"):
        names.append("q_b_proj")
    if owns_indexer:
        indexer = getattr(module, "indexer", None)
        names += [f"indexer.{name}" for name in _INDEXER_PARTS if not hasattr(indexer, name)]
    return names


def install(model: Any, *, exclusive: bool = False) -> DsaConfig:
    """Run the model's attention on Topkapi wherever its forward is given a `dsa_step=`.

    Without a step a module computes what Transformers wrote, or, where it is installed to be
    `exclusive`, raises `ConfigError`. Installing again changes that alone. Returns the model's
    sizes. Raises `UnsupportedModelError` for a model that is not DSA, changing nothing.
    """
    config = DsaConfig.from_hf(getattr(model, "config", None))
    modules = attention_modules(model, config)
    in_place = [module.__dict__.get("forward") for module in modules]
    if not all(isinstance(forward, DsaAttention) for forward in in_place):
        if any(forward is not None for forward in in_place):
            raise UnsupportedModelError(
                f"{type(modules[0]).__name__}.forward is replaced by someone else already "
                "(accelerate's dispatch over devices does so); load the model on one device"
            )
        # All are made before any is put in place: a refusal leaves the model as it was.
        in_place = [DsaAttention(module, config, i) for i, module in enumerate(modules)]
    for module, attention in zip(modules, in_place, strict=True):
        attention.exclusive = exclusive
        module.forward = attention
    return config


def uninstall(model: Any) -> None:
    """Give every attention module its own forward back; modules left alone stay as they are."""
    for layer in decoder_of(model).layers:
        if isinstance(layer.self_attn.__dict__.get("forward"), DsaAttention):
            del layer.self_attn.__dict__["forward"]


@torch.no_grad()
def run_decoder(
    model: Any, input_ids: torch.Tensor, positions: torch.Tensor, step: DsaStep
) -> torch.Tensor:
    """Run all decoder layers over `input_ids [T]` at `positions [T]`, both int64.

    Returns hidden states `[T, hidden]` after the last norm. The backend's metadata must be
    initialised for the step's batch. Masks are never built. A model that is seen for the first time
    is installed into, and stays Transformers' own for everyone who passes no step. Capture-safe as
    far as the model's own modules are (a looped mixture of experts is not).
    """
    decoder = decoder_of(model)
    if not isinstance(decoder.layers[0].self_attn.__dict__.get("forward"), DsaAttention):
        install(model)
    deterministic = any(part.backend.options.deterministic for part in step.parts)
    with RowInvariant() if deterministic else nullcontext():
        output = decoder(
            input_ids=input_ids[None],
            position_ids=positions[None],
            attention_mask={"indexed_attention": None},
            use_cache=False,
            dsa_step=step,
        )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


@torch.no_grad()
def compute_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """`hidden [T, hidden]` to logits `[T, vocabulary]` in the model's dtype."""
    logits: torch.Tensor = model.get_output_embeddings()(hidden)
    return logits
