"""What can this machine run? Versions, the device, and every kernel with its reason to refuse."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from topkapi import __version__
from topkapi.device import DeviceInfo, device_info, resolve_device
from topkapi.dispatch import Verdict
from topkapi.errors import ConfigError
from topkapi.ops.registry import explain

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.bfloat16,
}


@dataclass(frozen=True)
class DoctorReport:
    """Everything `topkapi doctor` prints.

    `versions` has None for a package that is not installed. `kernels` maps an operation to the
    verdict of each of its kernels, best first, on DeepSeek-V3.2's sizes.
    """

    versions: dict[str, str | None]
    device: DeviceInfo
    memory_bytes: int | None
    dtype: str
    cache_format: str
    heads: int
    kernels: dict[str, list[Verdict]]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def examine(device: str = "auto", cache_format: str = "bf16", heads: int = 128) -> DoctorReport:
    """Look at this machine. Raises `ConfigError` for a device or a format that does not exist."""
    if cache_format not in _DTYPES:
        raise ConfigError(
            f"cache_format: expected one of {', '.join(_DTYPES)}, got {cache_format!r}"
        )
    where = resolve_device(device)
    info = device_info(where)
    memory = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else None
    dtype = _DTYPES[cache_format]
    own: dict[str, str | None] = {"topkapi": __version__, "python": platform.python_version()}
    return DoctorReport(
        versions=own | {name: _version(name) for name in _PACKAGES},
        device=info,
        memory_bytes=memory,
        dtype=str(dtype).removeprefix("torch."),
        cache_format=cache_format,
        heads=heads,
        kernels=explain(info, dtype, cache_format, heads),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
