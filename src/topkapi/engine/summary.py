"""What is in a checkpoint directory, without loading it? Sizes, cache bytes, parameters.

Reads the config and the headers of the weight files; no tensor is read.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from topkapi.config import DsaConfig
from topkapi.layout.index_key import index_key_layout
from topkapi.layout.latent import latent_layout
from topkapi.models.checkpoint import open_tensors, weight_files
from topkapi.models.loading import read_config, resolve_model_path

_FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}


@dataclass(frozen=True)
class CheckpointSummary:
    """`cache_bytes` per token of all layers for each cache format; `parameters` and their bytes are
    None when the directory has no weights that can be read.
    """

    path: str
    config: DsaConfig
    cache_bytes: dict[str, int]
    parameters: int | None
    weight_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def summarise(model: str | Path) -> CheckpointSummary:
    """Summarise `demo` or a local directory. Raises `CheckpointError`, `UnsupportedModelError`."""
    path = Path(resolve_model_path(model))
    config = DsaConfig.from_hf(read_config(path))
    parameters = weight_bytes = None
    if any(path.glob("*.safetensors*")):
        files = weight_files(path)
        parameters = _count(files)
        weight_bytes = sum(file.stat().st_size for file in files)
    cache_bytes = {name: _bytes_per_token(config, dtype) for name, dtype in _FORMATS.items()}
    return CheckpointSummary(str(path), config, cache_bytes, parameters, weight_bytes)


def _bytes_per_token(config: DsaConfig, dtype: torch.dtype) -> int:
    latent = latent_layout(dtype).bytes_per_token(config.kv_lora_rank, config.qk_rope_head_dim)
    index = index_key_layout(dtype).bytes_per_token(config.index_head_dim)
    owners = sum(config.owns_indexer(layer) for layer in range(config.num_hidden_layers))
    return config.num_hidden_layers * latent + owners * index


def _count(files: list[Path]) -> int:
    """Numbers in all tensors, buffers too; an fp8 weight's scales are not counted."""
    with ExitStack() as stack:
        tensors = open_tensors(files, stack, block=None, dtype=torch.bfloat16)
        return sum(math.prod(tensor.get_shape()) for tensor in tensors.values())
