"""Which kernel of each operation can run a model here, and which one `auto` takes.

A model is known by its sizes alone. Every operation is asked what its calls in a step would ask,
without a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from topkapi.config import DsaConfig
from topkapi.device import DeviceInfo
from topkapi.dispatch import Problem, Verdict
from topkapi.errors import KernelRefusedError
from topkapi.ops.registry import NAMES, OPS

# Query dtype of a model whose cache has the format.
QUERY_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.bfloat16,
}
# The context that kernels are asked about, where the model's own is not shorter.
CONTEXT = 65536

# What is asked about when no model is named: DeepSeek-V3.2.
DEEPSEEK_V32 = DsaConfig(
    model_type="deepseek_v32",
    num_hidden_layers=61,
    num_attention_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    scaling=192**-0.5,
    indexer_types=("full",) * 61,
    indexer_rope="half",
    max_position_embeddings=163840,
    num_nextn_predict_layers=1,
)


@dataclass(frozen=True)
class Step:
    """A kind of step: `phase` is `prefill` or `decode`, `rows` its query rows."""

    phase: str
    rows: int


STEPS = (Step("prefill", 4096), Step("decode", 1), Step("decode", 64))


@dataclass(frozen=True)
class Choice:
    """What `auto` takes for one operation in one step; `reason` is why nothing, if so."""

    op: str
    phase: str
    rows: int
    context: int
    kernel: str | None
    reason: str | None = None


def problems(
    config: DsaConfig, device: DeviceInfo, cache_format: str, step: Step
) -> dict[str, Problem]:
    """What each operation is asked in a step of the model, by the operation's name."""
    dtype = QUERY_DTYPES[cache_format]
    index_dtype = dtype
    if cache_format == "fp8" and device.multiplies_fp8:
        index_dtype = torch.float8_e4m3fn
    context = context_of(config)
    rows: dict[str, Any] = {"phase": step.phase, "rows": step.rows}
    latent: dict[str, Any] = {
        "latent_dim": config.kv_lora_rank,
        "rope_dim": config.qk_rope_head_dim,
    }
    indexer: dict[str, Any] = {
        "num_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
        "context": context,
    }
    chosen: dict[str, Any] = {"topk": config.index_topk}
    facts: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "indexer_logits": (index_dtype, rows | indexer),
        "topk": (torch.float32, {"rows": step.rows, "context": context} | chosen),
        "select": (index_dtype, rows | indexer | chosen),
        "sparse_mla": (dtype, rows | latent | chosen | {"num_heads": config.num_attention_heads}),
        "write_latent": (dtype, latent),
        "write_index_key": (dtype, {"index_dim": config.index_head_dim}),
        "gather_latent": (torch.int32, latent),
    }
    return {
        op: Problem(op, device, facts[op][0], cache_format=cache_format, **facts[op][1])
        for op in NAMES
    }


def context_of(config: DsaConfig) -> int:
    """How long a context the kernels are asked about."""
    return min(config.max_position_embeddings, CONTEXT)


def verdicts(
    config: DsaConfig, device: DeviceInfo, cache_format: str, step: Step
) -> dict[str, list[Verdict]]:
    """Every kernel of every operation with its reason to refuse the step, or None."""
    asked = problems(config, device, cache_format, step)
    return {op: OPS[op].explain(problem) for op, problem in asked.items()}


def choices(config: DsaConfig, device: DeviceInfo, cache_format: str) -> list[Choice]:
    """What `auto` takes for each operation in each of `STEPS`."""
    context = context_of(config)
    found = []
    for step in STEPS:
        for op, problem in problems(config, device, cache_format, step).items():
            kernel = reason = None
            try:
                kernel = OPS[op].choose(problem).name
            except KernelRefusedError as error:
                reason = str(error)
            found.append(Choice(op, step.phase, step.rows, context, kernel, reason))
    return found
