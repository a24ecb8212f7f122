"""What a DSA model is made of, and what the user may choose.

`DsaConfig` is read once from a Transformers config; `BackendOptions` is validated once and is the
only place that reads environment variables. Neither knows about tensors or kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

from topkapi.errors import ConfigError, UnsupportedModelError

RopeStyle = Literal["half", "interleaved"]
IndexerType = Literal["full", "shared"]

# The rope style of the indexer where the config does not say (`indexer_rope_interleave`).
_INDEXER_ROPE: dict[str, RopeStyle] = {
    "deepseek_v32": "half",
    "axk2": "half",
    "glm_moe_dsa": "interleaved",
}

_REQUIRED = (
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)


@dataclass(frozen=True)
class DsaConfig:
    """The sizes and styles of one DSA model, under their Transformers names.

    `indexer_types` has one entry a layer: `full` owns an indexer and an index-key cache, `shared`
    reuses the selection of the last full layer before it. `scaling` multiplies attention scores.
    """

    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    scaling: float
    indexer_types: tuple[IndexerType, ...]
    indexer_rope: RopeStyle
    max_position_embeddings: int
    num_nextn_predict_layers: int = 0

    @classmethod
    def from_hf(cls, config: Any) -> DsaConfig:
        """Read a Transformers config (`deepseek_v32`, `glm_moe_dsa`, `axk2`).

        Raises `UnsupportedModelError` naming every missing attribute when the model is not DSA, and
        for a family whose indexer rope style is unknown: a wrong guess would degrade silently.
        """
        model_type = str(getattr(config, "model_type", type(config).__name__))
        missing = [name for name in _REQUIRED if getattr(config, name, None) is None]
        if missing:
            raise UnsupportedModelError(
                f"{model_type} is not a DSA model that Topkapi knows: its config has no "
                + ", ".join(missing)
            )
        sizes = {name: int(getattr(config, name)) for name in _REQUIRED}
        for name, size in sizes.items():
            if size < (0 if name == "qk_rope_head_dim" else 1):
                raise ConfigError(f"{model_type}: {name} must be positive, got {size}")
        return cls(
            model_type=model_type,
            scaling=attention_scaling(config),
            indexer_types=indexer_types(config),
            indexer_rope=_indexer_rope(config, model_type),
            max_position_embeddings=int(config.max_position_embeddings),
            num_nextn_predict_layers=int(getattr(config, "num_nextn_predict_layers", 0) or 0),
            **sizes,
        )

    def owns_indexer(self, layer_id: int) -> bool:
        """Whether this layer scores and selects for itself. MTP layers, past the last, do."""
        return layer_id >= self.num_hidden_layers or self.indexer_types[layer_id] == "full"

    @property
    def latent_width(self) -> int:
        """Width of one cached latent with its rope part: 576 for DeepSeek-V3.2."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def attention_scaling(config: Any) -> float:
    """`(nope + rope)^-1/2`, times mscale squared only where yarn sets `mscale_all_dim`.

    mscale = 0.1 * mscale_all_dim * ln(factor) + 1 (DeepSeek-V2 report, and its public code).
    """
    scaling = 1.0 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    rope = getattr(config, "rope_parameters", None) or {}
    all_dim = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") != "default" and all_dim and rope["factor"] > 1:
        scaling *= (0.1 * float(all_dim) * math.log(rope["factor"]) + 1.0) ** 2
    return scaling


def indexer_types(config: Any) -> tuple[IndexerType, ...]:
    """Per layer, `full` or `shared`: from `indexer_types`, else `index_topk_pattern` (`"FSSF"`),
    else `index_topk_freq` with `index_skip_topk_offset`; every layer is full without any of them.
    """
    layers = int(config.num_hidden_layers)
    types = getattr(config, "indexer_types", None)
    pattern = getattr(config, "index_topk_pattern", None)
    freq = max(int(getattr(config, "index_topk_freq", None) or 1), 1)
    offset = getattr(config, "index_skip_topk_offset", None)
    offset = 2 if offset is None else int(offset)
    if types is None and pattern is not None:
        names = {"F": "full", "S": "shared"}
        types = [names.get(letter, letter) for letter in pattern]
    elif types is None:
        types = ["shared" if max(i - offset + 1, 0) % freq else "full" for i in range(layers)]
    unknown = sorted(set(types) - {"full", "shared"})
    if unknown or len(types) < layers or types[0] != "full":
        raise ConfigError(
            f"indexer_types: expected {layers} entries of full or shared, the first full, "
            f"got {list(types)}"
        )
    return cast("tuple[IndexerType, ...]", tuple(types[:layers]))


def _indexer_rope(config: Any, model_type: str) -> RopeStyle:
    interleave = getattr(config, "indexer_rope_interleave", None)
    if interleave is not None:
        return "interleaved" if interleave else "half"
    if model_type not in _INDEXER_ROPE:
        raise UnsupportedModelError(
            f"{model_type}: the indexer's rope style is unknown; its config has no "
            f"indexer_rope_interleave. Known families: {', '.join(_INDEXER_ROPE)}"
        )
    return _INDEXER_ROPE[model_type]


# What a kernel option may be: the names that users of the reference know, and ours. A test holds
# them to the records of `ops.registry`; whether a kernel can run here is asked when it is used.
_SPARSE_MLA = (
    "auto",
    "hopper",
    "triton",
    "torch",
    "flashmla_sparse",
    "flashmla_kv",
    "fa3",
    "tilelang",
)
KERNEL_NAMES: dict[str, tuple[str, ...]] = {
    "prefill_kernel": _SPARSE_MLA,
    "decode_kernel": (*_SPARSE_MLA, "aiter"),
    "indexer_kernel": ("auto", "triton", "torch", "deep_gemm"),
    "topk_kernel": ("auto", "triton", "torch", "sgl_kernel", "vllm", "flashinfer"),
}


@dataclass(frozen=True)
class BackendOptions:
    """What a user may choose about the attention backend.

    `prefill_kernel`, `decode_kernel`, `indexer_kernel` and `topk_kernel` name a kernel record, or
    `auto`, the fastest usable one; `KERNEL_NAMES` has what each may be. `topk_kernel` ranks logits
    that somebody else made (`topk_transform`); the indexer of a layer scores and ranks in one.
    `score_budget_bytes` bounds every temporary of scoring and gathering. `deterministic` asks for
    bit-equal outputs of a request whatever shares its batch; every step then runs `prefill_kernel`,
    and another `decode_kernel` is an error. `fuse_topk` has the indexer give slots
    at once, not positions to be mapped. `fp8_compute` says how fp8 latents are attended: as
    `records`, or by `dequantize_selected`. `index_queries` says whether queries against fp8 index
    keys are quantised as well: `fp8`, `full`, or `auto`, which does where the device multiplies
    fp8. `dense_prefill` lets whole prompts within topk, of `dense_min_tokens` on average, skip
    absorption.
    """

    prefill_kernel: str = "auto"
    decode_kernel: str = "auto"
    indexer_kernel: str = "auto"
    topk_kernel: str = "auto"
    score_budget_bytes: int = 256 * 2**20
    deterministic: bool = False
    fuse_topk: bool = True
    fp8_compute: str = "records"
    index_queries: str = "auto"
    dense_prefill: bool = True
    dense_min_tokens: int = 32

    def __post_init__(self) -> None:
        for option, names in KERNEL_NAMES.items():
            if getattr(self, option) not in names:
                raise ConfigError(
                    f"{option}: expected one of {', '.join(names)}, got {getattr(self, option)!r}"
                )
        if self.deterministic and self.decode_kernel not in ("auto", self.prefill_kernel):
            raise ConfigError(
                f"decode_kernel: deterministic=True runs prefill_kernel ({self.prefill_kernel}) at "
                f"every step, so expected auto or the same, got {self.decode_kernel!r}"
            )
        if self.fp8_compute not in ("records", "dequantize_selected"):
            raise ConfigError(
                f"fp8_compute: expected records or dequantize_selected, got {self.fp8_compute!r}"
            )
        if self.index_queries not in ("auto", "fp8", "full"):
            raise ConfigError(
                f"index_queries: expected auto, fp8 or full, got {self.index_queries!r}"
            )
        if self.score_budget_bytes < 2**16:
            raise ConfigError(
                f"score_budget_bytes: expected at least 65536, got {self.score_budget_bytes}"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> BackendOptions:
        """Defaults overridden by `TOPKAPI_PREFILL_KERNEL`, `TOPKAPI_SCORE_BUDGET_BYTES`, ...

        Raises `ConfigError` for an unknown `TOPKAPI_` variable or a value that does not parse.
        """
        environ = os.environ if environ is None else environ
        known = {f"TOPKAPI_{item.name.upper()}": item.name for item in fields(cls)}
        changes: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith("TOPKAPI_"):
                continue
            if variable not in known:
                raise ConfigError(f"{variable}: unknown; known are {', '.join(known)}")
            name = known[variable]
            changes[name] = _parse(variable, text, type(getattr(cls, name)))
        return replace(cls(), **changes)


def _parse(variable: str, text: str, kind: type) -> str | int | bool:
    if kind is bool:
        values = {"1": True, "true": True, "0": False, "false": False}
        if text.lower() not in values:
            raise ConfigError(f"{variable}: expected 1, 0, true or false, got {text!r}")
        return values[text.lower()]
    if kind is int:
        if not text.isdecimal():
            raise ConfigError(f"{variable}: expected a whole number, got {text!r}")
        return int(text)
    return text
