"""DeepSeek Sparse Attention as a library and an engine.

Names are loaded when they are first used: `import topkapi` itself imports neither torch nor
Transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from topkapi import errors as errors
    from topkapi import ops as ops
    from topkapi.attention.backend import NativeSparseAttnBackend as NativeSparseAttnBackend
    from topkapi.attention.forward_batch import ForwardBatch as ForwardBatch
    from topkapi.attention.forward_batch import ForwardMode as ForwardMode
    from topkapi.attention.metadata import NSAIndexerMetadata as NSAIndexerMetadata
    from topkapi.attention.metadata import NSAMetadata as NSAMetadata
    from topkapi.attention.multi_step import (
        NativeSparseAttnMultiStepBackend as NativeSparseAttnMultiStepBackend,
    )
    from topkapi.config import BackendOptions as BackendOptions
    from topkapi.config import DsaConfig as DsaConfig
    from topkapi.engine.llm import LLM as LLM
    from topkapi.engine.request import RequestOutput as RequestOutput
    from topkapi.engine.request import SamplingParams as SamplingParams
    from topkapi.models.attach import attach as attach
    from topkapi.models.attach import detach as detach

# Where each name lives; a name whose home is itself is a submodule.
_HOMES = {
    "BackendOptions": "topkapi.config",
    "DsaConfig": "topkapi.config",
    "ForwardBatch": "topkapi.attention.forward_batch",
    "ForwardMode": "topkapi.attention.forward_batch",
    "LLM": "topkapi.engine.llm",
    "NSAIndexerMetadata": "topkapi.attention.metadata",
    "NSAMetadata": "topkapi.attention.metadata",
    "NativeSparseAttnBackend": "topkapi.attention.backend",
    "NativeSparseAttnMultiStepBackend": "topkapi.attention.multi_step",
    "RequestOutput": "topkapi.engine.request",
    "SamplingParams": "topkapi.engine.request",
    "attach": "topkapi.models.attach",
    "detach": "topkapi.models.attach",
    "errors": "topkapi.errors",
    "ops": "topkapi.ops",
}

__all__ = [
    "LLM",
    "BackendOptions",
    "DsaConfig",
    "ForwardBatch",
    "ForwardMode",
    "NSAIndexerMetadata",
    "NSAMetadata",
    "NativeSparseAttnBackend",
    "NativeSparseAttnMultiStepBackend",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "attach",
    "detach",
    "errors",
    "ops",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'topkapi' has no attribute {name!r}")
    module = import_module(home)
    return module if home == f"topkapi.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
