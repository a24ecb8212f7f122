"""Which parts of a model that are not attention run through `torch.compile`?

Norms, dense MLPs, shared experts and routers, each module by itself, with the number of tokens left
open. Routed experts stay as they are: their shapes are data. Attention is Topkapi's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from topkapi.errors import ConfigError
from topkapi.models.decoder import decoder_of


def compile_rest(model: Any) -> None:
    """Compile in place, for good; one small part at once, the others when they are first called.

    Raises `ConfigError`, changing nothing, where that cannot be compiled here.
    """
    parts = list(_parts(model))
    for part in parts:
        part.compile(dynamic=True)
    norm = parts[0]
    weight = next(norm.parameters())
    try:
        with torch.inference_mode():
            norm(torch.zeros(1, 2, weight.shape[0], dtype=weight.dtype, device=weight.device))
    except (RuntimeError, OSError) as error:
        for part in parts:
            part._compiled_call_impl = None
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            "compile: torch.compile does not work here; it needs a C++ compiler (on a GPU Triton "
            f"and a C compiler), or leave compile=False: {words}"
        ) from error


def _parts(model: Any) -> Iterator[nn.Module]:
    """The last norm first."""
    decoder = decoder_of(model)
    yield decoder.norm
    for layer in decoder.layers:
        yield layer.input_layernorm
        yield layer.post_attention_layernorm
        if not hasattr(layer.mlp, "experts"):
            yield layer.mlp
            continue
        for name in ("gate", "shared_experts"):
            if isinstance(part := getattr(layer.mlp, name, None), nn.Module):
                yield part
