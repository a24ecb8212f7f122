"""Compile a kernel for a GPU that is not here, and read what the compiler says about it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

# Shared memory that one program may take, in bytes.
SHARED_MEMORY = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}


@dataclass(frozen=True)
class Compiled:
    """What one compilation gave: bytes of shared memory, registers a thread, bytes spilled."""

    shared: int
    registers: int | None
    spilled: int | None
    asm: dict[str, Any]


def compile_for(
    arch: int | str, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any
) -> Compiled:
    """Compile `kernel` for `arch` (90 for sm_90, or a gfx name).

    `types` maps run-time parameters to Triton types (`*bf16`, `i32`, ...); pointers are aligned.
    """
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    attrs = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*")
    }
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constexprs, attrs)
    compiled = triton.compile(source, target=target, options=options)
    registers, spilled = _resources(compiled)
    return Compiled(compiled.metadata.shared, registers, spilled, compiled.asm)


def _resources(compiled: Any) -> tuple[int | None, int | None]:
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        spill = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
        count = re.search(r"\.vgpr_count:\s*(\d+)", text)
        return (int(count[1]) if count else None, 4 * int(spill[1]) if spill else None)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    registers = re.search(r"REG:(\d+)", run.stdout)
    stack = re.search(r"STACK:(\d+)", run.stdout)
    return (int(registers[1]) if registers else None, int(stack[1]) if stack else None)


def machine_code(cubin: bytes, path: Path) -> str:
    """The disassembly of a cubin, which is written to `path`."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run(
        [str(tool), "-sass", str(path)], capture_output=True, text=True, check=True
    ).stdout
