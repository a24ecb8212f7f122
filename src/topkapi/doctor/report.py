"""What can this machine run? Versions, the device, every kernel, what `auto` takes, what fits."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch

from topkapi import __version__
from topkapi.config import DsaConfig
from topkapi.device import DeviceInfo, device_info, driver_version, free_memory, resolve_device
from topkapi.dispatch import Verdict
from topkapi.doctor.choices import (
    DEEPSEEK_V32,
    QUERY_DTYPES,
    STEPS,
    Choice,
    Step,
    choices,
    verdicts,
)
from topkapi.doctor.memory import Budget, CacheCost, cache_costs
from topkapi.errors import ConfigError

# What Topkapi runs on, and the packages whose kernels it can call, by distribution.
PACKAGES = (
    "torch", "triton", "transformers", "safetensors", "numpy", "tilelang", "sgl-flash-mla",
    "sgl-deep-gemm", "sglang-kernel", "vllm", "flashinfer-python", "flash-attn-3", "amd-aiter",
    "llguidance",
)  # fmt: skip


@dataclass(frozen=True)
class DoctorReport:
    """Everything `topkapi doctor` prints.

    Attributes:
        versions: None for a package that is not installed.
        driver: of the first NVIDIA GPU; None beside a CPU or where it cannot be asked.
        memory_bytes: the GPU's in all; None for a CPU.
        model: the checkpoint that was named, None for DeepSeek-V3.2's sizes.
        config: the sizes that were asked about; `heads` of its attention heads are on one device.
        kernels: by phase and operation, the verdict of each kernel, best first.
        auto: what `auto` takes, by operation and step.
        cache: what a token costs in each cache format, and how many fit in `budget`.
        budget: None where no model was named, since nothing is known of its weights.
    """

    versions: dict[str, str | None]
    device: DeviceInfo
    driver: str | None
    memory_bytes: int | None
    free_bytes: int | None
    model: str | None
    config: DsaConfig
    dtype: str
    cache_format: str
    heads: int
    kernels: dict[str, dict[str, list[Verdict]]]
    auto: list[Choice]
    cache: list[CacheCost]
    budget: Budget | None

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        plain = asdict(self)
        if self.budget is not None:
            plain["budget"]["cache_bytes"] = self.budget.cache_bytes
        return plain


def examine(
    device: str = "auto",
    cache_format: str = "bf16",
    heads: int | None = None,
    model: str | None = None,
) -> DoctorReport:
    """Look at this machine, for `model` (`demo` or a directory) or for DeepSeek-V3.2's sizes.

    `heads` are the attention heads of one device, the model's own where it is not split. Of a
    checkpoint the config and the weights' headers are read, no tensor. Raises `ConfigError` for a
    device or a format that does not exist, `CheckpointError` and `UnsupportedModelError` for a
    model that cannot be read.
    """
    if cache_format not in QUERY_DTYPES:
        raise ConfigError(
            f"cache_format: expected one of {', '.join(QUERY_DTYPES)}, got {cache_format!r}"
        )
    where = resolve_device(device)
    info = device_info(where)
    config, budget = DEEPSEEK_V32, None
    free = free_memory(where)
    if model is not None:
        config, budget = _model(model, free)
    if heads is not None:
        config = replace(config, num_attention_heads=heads)
    cuda = where.type == "cuda"
    own: dict[str, str | None] = {"topkapi": __version__, "python": platform.python_version()}
    return DoctorReport(
        versions=own | {name: _version(name) for name in PACKAGES},
        device=info,
        driver=driver_version() if cuda else None,
        memory_bytes=torch.cuda.get_device_properties(where).total_memory if cuda else None,
        free_bytes=free,
        model=model,
        config=config,
        dtype=str(QUERY_DTYPES[cache_format]).removeprefix("torch."),
        cache_format=cache_format,
        heads=config.num_attention_heads,
        kernels={step.phase: verdicts(config, info, cache_format, step) for step in _widest()},
        auto=choices(config, info, cache_format),
        cache=cache_costs(config, budget),
        budget=budget,
    )


def _widest() -> list[Step]:
    """One step of each phase, the one with the most rows."""
    return list({step.phase: step for step in sorted(STEPS, key=lambda step: step.rows)}.values())


def _model(model: str, free: int | None) -> tuple[DsaConfig, Budget | None]:
    """The sizes of a checkpoint, and what its weights leave of `free` bytes."""
    # Transformers takes seconds to import, and only a named model needs it.
    from topkapi.engine.launch import EngineOptions
    from topkapi.engine.summary import summarise
    from topkapi.models.loading import read_config, resolve_dtype

    summary = summarise(model)
    if free is None:
        return summary.config, None
    fraction = EngineOptions().memory_fraction
    dtype = resolve_dtype("auto", read_config(summary.path))
    name = str(dtype).removeprefix("torch.")
    weights = (summary.parameters or 0) * dtype.itemsize
    loaded = (
        f"{summary.parameters:,} weights in {name}" if weights else "weights, which were not found,"
    )
    assumption = (
        f"{fraction:.0%} of the memory free now once the {loaded} are loaded on this one device; "
        "no MTP layer"
    )
    return summary.config, Budget(free, weights, fraction, assumption)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
