"""What the machine under Triton can do, and why a Triton kernel would not run on it.

Static facts of a device that more than one kernel decides on. Knows no formula.
"""

from __future__ import annotations

import torch
import triton

from topkapi.device import DeviceInfo, device_info
from topkapi.dispatch import Problem


def interpreted() -> bool:
    """Whether kernels were defined under TRITON_INTERPRET=1 and run on the host, very slowly."""
    return bool(triton.knobs.runtime.interpret)


def refuse_device(problem: Problem) -> str | None:
    """A reason that holds for every Triton kernel, or None."""
    if problem.device.backend in ("cuda", "hip"):
        if problem.device.backend == "cuda" and int(problem.device.arch) < 80:
            return f"needs sm80 or newer, this is {problem.device.label}"
        return None
    if interpreted():
        cached = problem.op != "topk" and problem.cache_format == "bf16"
        if problem.dtype == torch.bfloat16 or cached:
            return "Triton's interpreter has no bfloat16"
        return None
    return f"needs a GPU that Triton compiles for, this is {problem.device.label}"


def target_of(tensor: torch.Tensor) -> DeviceInfo:
    """The device that a launch with `tensor` runs on."""
    return device_info(tensor.device)


def native_fp8(device: DeviceInfo) -> bool:
    """Whether Triton's `fp8e4nv` may be used on the device."""
    return device.multiplies_fp8


def decoder_of(device: DeviceInfo) -> str:
    """How pairs of e4m3 codes are decoded: `native` or `bits` in PTX, or `plain` in Triton."""
    if device.backend != "cuda" or interpreted():
        return "plain"
    return "native" if native_fp8(device) else "bits"


def launches_early(device: DeviceInfo) -> bool:
    """Whether a kernel can be launched before the one it waits for has ended."""
    return device.backend == "cuda" and int(device.arch) >= 90 and not interpreted()


def float32_precision(device: DeviceInfo) -> str:
    """How a dot of fp32 operands is computed so that it keeps fp32's digits."""
    return "tf32x3" if device.backend == "cuda" else "ieee"
