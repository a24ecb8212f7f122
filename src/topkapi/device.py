"""What the machine at hand can do: the facts a kernel's refusal is decided on.

Knows nothing about operations or kernels.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache

import torch

from topkapi.errors import ConfigError


@dataclass(frozen=True)
class DeviceInfo:
    """One device, as kernels see it.

    `backend` is `cpu`, `cuda` or `hip`; `arch` is the compute capability as one number (90 for
    sm_90, 0 elsewhere) or the gfx name on AMD; `shared_memory` is in bytes per program.
    """

    backend: str
    arch: int | str = 0
    name: str = "cpu"
    num_sms: int = 0
    shared_memory: int = 0
    has_triton: bool = False

    @property
    def multiplies_fp8(self) -> bool:
        """Whether the device converts and multiplies e4m3 (OCP) itself: sm89 or newer, gfx950."""
        if self.backend == "cuda":
            return int(self.arch) >= 89
        return self.arch == "gfx950"

    @property
    def label(self) -> str:
        """How messages name this device: `cpu`, `sm90`, `gfx942`."""
        if self.backend == "cpu":
            return "cpu"
        return f"sm{self.arch}" if self.backend == "cuda" else str(self.arch)


@lru_cache(maxsize=64)
def device_info(device: torch.device) -> DeviceInfo:
    """Describe a torch device. Queries the driver once per device; never synchronises."""
    has_triton = importlib.util.find_spec("triton") is not None
    if device.type != "cuda":
        return DeviceInfo(backend=device.type, name=device.type, has_triton=has_triton)
    properties = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    arch: int | str = properties.major * 10 + properties.minor
    if hip:
        arch = properties.gcnArchName.split(":")[0]
    return DeviceInfo(
        backend="hip" if hip else "cuda",
        arch=arch,
        name=properties.name,
        num_sms=properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 65536),
        has_triton=has_triton,
    )


def resolve_device(device: str | torch.device) -> torch.device:
    """Turn `"auto"` (the GPU if there is one) or a device name into a `torch.device`.

    Raises `ConfigError` for a name torch does not know and for CUDA without a GPU.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu or cuda[:N], got {device!r}") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no GPU; use device='cpu'")
    return resolved


def free_memory(device: torch.device) -> int | None:
    """Bytes free on a device now; None where the system cannot be asked."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def driver_version() -> str | None:
    """Of the first NVIDIA GPU; None without `nvidia-smi`, which this starts."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = answer.stdout.split()
    return lines[0] if lines else None
