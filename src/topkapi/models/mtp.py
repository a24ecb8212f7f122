"""What does a checkpoint's next-token-prediction (MTP) layer guess, and how is it loaded?

DeepSeek-V3 (technical report, section 2.2): the model's hidden state h of position p, after its
last norm, and the embedding of token p + 1 are normed, joined and projected; one decoder layer with
an indexer and a cache of its own follows, then a norm and the head. Row p so guesses token p + 2.
Tensors are `model.layers.{num_hidden_layers}.*` with enorm, hnorm, eh_proj, shared_head and
embed_tokens beside those of a decoder layer, which is Transformers' own class.

Knows nothing about requests, pages or acceptance.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topkapi.config import DsaConfig
from topkapi.errors import CheckpointError, UnsupportedModelError
from topkapi.models.attention import DsaAttention, DsaStep
from topkapi.models.checkpoint import check_experts, open_tensors, weight_files
from topkapi.models.decoder import decoder_of
from topkapi.models.loading import assemble, fp8_block, read_config

# What the layer has beside a decoder layer, and where it goes in a model of that layer alone.
_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
_HEAD_NORM, _HEAD, _EMBEDDING = (
    "shared_head.norm.weight",
    "shared_head.head.weight",
    "embed_tokens.weight",
)


class MtpLayer:
    """The draft: one decoder layer, run over the backend under a layer id of its own.

    Attributes:
        layer_id: the first number after the model's own layers.
        hidden_size: width of the hidden states it takes and gives.
        layer: the decoder layer itself.
    """

    def __init__(
        self,
        model: Any,
        config: DsaConfig,
        layer: nn.Module,
        parts: dict[str, nn.Module],
    ) -> None:
        """`parts`: enorm, hnorm, eh_proj, norm, embedding, head. Takes over the attention of
        `layer`, which from then on needs a `DsaStep`.
        """
        self.layer_id = config.num_hidden_layers
        self.hidden_size = int(model.config.hidden_size)
        self._rotary = decoder_of(model).rotary_emb
        self.layer = layer
        self._parts = parts
        attention: Any = layer.self_attn
        replaced = DsaAttention(attention, config, self.layer_id)
        replaced.exclusive = True
        attention.forward = replaced

    @torch.no_grad()
    def run(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        step: DsaStep,
    ) -> torch.Tensor:
        """Rows p of the layer: `hidden [T, hidden]` of position p, and token p + 1.

        `token_ids [T]` and `positions [T]` (p) are int64. Returns `[T, hidden]` after the head's
        norm: `logits` makes guesses of it, and a further draft step takes it in place of the
        model's hidden state. The backend's metadata must be initialised for the step's batch.
        """
        parts = self._parts
        pair = torch.cat(
            (parts["enorm"](parts["embedding"](token_ids)), parts["hnorm"](hidden)), dim=-1
        )
        x = parts["eh_proj"](pair)[None]
        output = self.layer(
            x,
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=self._rotary(x, position_ids=positions[None]),
            cache=None,
            use_cache=False,
            dsa_step=step,
        )
        # GLM's decoder layers give their selection, too.
        x = output[0] if isinstance(output, tuple) else output
        normed: torch.Tensor = parts["norm"](x[0])
        return normed

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden [T, hidden]`, as `run` gives it, to logits `[T, V]` in the model's dtype."""
        logits: torch.Tensor = self._parts["head"](hidden)
        return logits


def load_mtp(model: Any, config: DsaConfig) -> MtpLayer:
    """The MTP layer of a model that was loaded from a local directory, in its dtype, on its device.

    Embedding and head are the model's own where the checkpoint repeats or omits them. Reads the
    directory `model.name_or_path`. Raises `UnsupportedModelError` when there is no such layer, and
    `CheckpointError` naming the tensor that is missing, left over or misshapen.
    """
    directory = Path(str(getattr(model, "name_or_path", "") or ""))
    if not str(getattr(model, "name_or_path", "")) or not directory.is_dir():
        raise UnsupportedModelError(
            "speculation needs the model's MTP layer, which Transformers leaves out: load it "
            "from its local directory"
        )
    parameter = next(model.parameters())
    prefix = f"model.layers.{config.num_hidden_layers}."
    with ExitStack() as stack:
        block = fp8_block(read_config(directory))
        files = weight_files(directory)
        tensors = open_tensors(files, stack, block=block, dtype=parameter.dtype)
        found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if not found:
            raise UnsupportedModelError(
                f"{directory}: has no MTP layer to draft with (no tensor is named {prefix}*); "
                "use speculative_num_steps=0"
            )
        missing = [name for name in (*_OWN, _HEAD_NORM) if name not in found]
        if missing:
            names = ", ".join(prefix + name for name in missing)
            raise CheckpointError(f"{directory}: the MTP layer has no {names}")
        return _assemble(model, config, directory, found)


def _assemble(model: Any, config: DsaConfig, directory: Path, found: dict[str, Any]) -> MtpLayer:
    parameter = next(model.parameters())
    dtype, device = parameter.dtype, parameter.device
    special = (*_OWN, _HEAD_NORM, _HEAD, _EMBEDDING)
    hidden = int(model.config.hidden_size)
    layer_tensors = {f"model.layers.0.{n}": t for n, t in found.items() if n not in special}
    check_experts(layer_tensors, int(getattr(model.config, "n_routed_experts", 0) or 0))
    # A model of this one layer: its embedding and head of one token are thrown away.
    single = assemble(
        directory,
        _one_layer_config(model.config, sparse=any(".mlp.experts." in n for n in layer_tensors)),
        None,
        dtype=dtype,
        state_dict={
            **layer_tensors,
            "model.norm.weight": found[_HEAD_NORM],
            "model.embed_tokens.weight": torch.zeros(1, hidden, dtype=dtype),
            "lm_head.weight": torch.zeros(1, hidden, dtype=dtype),
        },
    ).to(device)
    decoder = decoder_of(single)
    parts: dict[str, nn.Module] = {
        "norm": decoder.norm,
        "eh_proj": nn.Linear(2 * hidden, hidden, bias=False, dtype=dtype, device=device),
        "embedding": _own_or(model.get_input_embeddings(), found.get(_EMBEDDING), _EMBEDDING),
        "head": _own_or(model.get_output_embeddings(), found.get(_HEAD), _HEAD),
        "enorm": copy.deepcopy(decoder.norm),
        "hnorm": copy.deepcopy(decoder.norm),
    }
    for name in _OWN:
        _fill(parts[name.removesuffix(".weight")], found[name], name)
    return MtpLayer(model, config, decoder.layers[0], parts)


def _one_layer_config(config: Any, *, sparse: bool) -> Any:
    """The model's config, for one layer that owns an indexer."""
    single = copy.deepcopy(config)
    changes = {
        "num_hidden_layers": 1,
        "vocab_size": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "indexer_types": ["full"],
        "layer_types": list(getattr(config, "layer_types", None) or [None])[-1:],
    }
    for name, value in changes.items():
        if getattr(single, name, None) is not None or name == "pad_token_id":
            setattr(single, name, value)
    return single


def _own_or(shared: Any, tensor: Any, name: str) -> nn.Module:
    """The model's embedding or head, or a copy of it with the checkpoint's own weight."""
    own: torch.Tensor | None = None if tensor is None else tensor[...]
    weight = shared.weight
    if own is None or torch.equal(own.to(weight.device, weight.dtype), weight):
        return shared  # type: ignore[no-any-return]
    module: nn.Module = copy.deepcopy(shared)
    _fill(module, own, name)
    return module


def _fill(module: Any, tensor: Any, name: str) -> None:
    value: torch.Tensor = tensor[...]
    if value.shape != module.weight.shape:
        raise CheckpointError(
            f"{name} of the MTP layer: expected shape {list(module.weight.shape)}, "
            f"got {list(value.shape)}"
        )
    with torch.no_grad():
        module.weight.copy_(value)
