"""Cases of writing and reading records: group edges, zeros, huge values, NaN, odd sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from topkapi import reference
from topkapi.layout.index_key import index_key_layout
from topkapi.layout.latent import latent_layout

Values = Literal["normal", "zeros", "huge", "tiny", "special", "powers"]


@dataclass(frozen=True)
class RecordCase:
    """`tokens` written to shuffled slots of a cache of `pages` pages, in one format."""

    name: str
    tokens: int
    cache: torch.dtype
    latent: int = 512
    rope: int = 64
    index_dim: int = 128
    values: Values = "normal"
    dtype: torch.dtype = torch.bfloat16
    pages: int = 3
    page_size: int = 64
    seed: int = 0

    def make(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Two caches full of 0xFF bytes (NaN in every format), slots, and values to write.

        Returns `kv_cache`, `index_cache`, `slots`, `latent`, `rope`, `keys`.
        """
        generator = torch.Generator().manual_seed(self.seed)
        num_slots = self.pages * self.page_size
        width = latent_layout(self.cache).width(self.latent, self.rope)
        shape = index_key_layout(self.cache).cache_shape(self.pages, self.page_size, self.index_dim)
        made = {
            "kv_cache": _full_of_nan((num_slots, 1, width), self.cache),
            "index_cache": _full_of_nan(shape, self.cache),
            "slots": torch.randperm(num_slots, generator=generator)[: self.tokens],
            "latent": self._draw(self.latent, generator),
            "rope": self._draw(self.rope, generator),
            "keys": self._draw(self.index_dim, generator),
        }
        return {name: tensor.to(device) for name, tensor in made.items()}

    def _draw(self, dim: int, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(self.tokens, dim, generator=generator)
        if self.values == "zeros":
            x = torch.zeros_like(x)
        elif self.values == "huge":
            x = x * (3e37 if self.dtype != torch.float16 else 1e4)
        elif self.values == "tiny":
            x = x * (1e-40 if self.dtype == torch.float32 else 1e-7)
        elif self.values == "powers":
            # The largest of a row is 448 or just beside it, where the ue8m0 scale steps.
            edge = torch.tensor([448.0, 450.0, 446.0, 224.0, 225.0, 1.75, 1.7578125])
            x = x.clamp(-1, 1)
            if dim:
                x[:, dim // 2] = edge[torch.arange(self.tokens) % len(edge)]
        elif self.values == "special" and dim:
            x[::3, dim // 3] = float("nan")
            x[1::3, dim // 2] = float("inf")
        return x.to(self.dtype)

    def compare(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Bit-equal, NaN included (any NaN matches any NaN in a float cache; written on a GPU, an
        e4m3 NaN may have the other sign).
        """
        assert got.dtype == want.dtype, f"{self.name}: {name} has {got.dtype}"
        on_gpu, got, want = got.is_cuda, got.cpu(), want.cpu()
        same = got == want
        if got.dtype != torch.uint8:
            same |= got.isnan() & want.isnan()
        elif on_gpu:
            same |= ((got & 0x7F) == 0x7F) & ((want & 0x7F) == 0x7F)
        assert bool(same.all()), f"{self.name}: {name} differs at {(~same).nonzero()[:5].tolist()}"

    def written(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Both caches after the reference has written, on the CPU."""
        cpu = {name: tensor.cpu().clone() for name, tensor in inputs.items()}
        reference.write_latent(cpu["kv_cache"], cpu["slots"], cpu["latent"], cpu["rope"])
        reference.write_index_key(cpu["index_cache"], cpu["slots"], cpu["keys"])
        return {"kv_cache": cpu["kv_cache"], "index_cache": cpu["index_cache"]}


def _full_of_nan(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape)
    bytes_ = torch.full((size.numel() * dtype.itemsize,), 0xFF, dtype=torch.uint8)
    return bytes_.view(dtype).view(size)


RECORD_CASES = (
    RecordCase("fp8", 65, torch.uint8),
    RecordCase("fp8 from fp32", 63, torch.uint8, dtype=torch.float32),
    RecordCase("fp8 from fp16", 63, torch.uint8, dtype=torch.float16),
    RecordCase("fp8 one token", 1, torch.uint8),
    RecordCase("fp8 no token", 0, torch.uint8),
    RecordCase("fp8 zeros", 9, torch.uint8, values="zeros"),
    RecordCase("fp8 huge", 9, torch.uint8, values="huge"),
    RecordCase("fp8 tiny", 9, torch.uint8, values="tiny", dtype=torch.float32),
    RecordCase("fp8 special", 9, torch.uint8, values="special"),
    RecordCase("fp8 powers", 21, torch.uint8, values="powers"),
    RecordCase("fp8 powers fp32", 21, torch.uint8, values="powers", dtype=torch.float32),
    RecordCase("fp8 axk2", 70, torch.uint8, latent=128, rope=32),
    RecordCase("fp8 short group", 5, torch.uint8, latent=192, rope=0, index_dim=32),
    RecordCase("fp8 small", 5, torch.uint8, latent=64, rope=32, index_dim=64),
    RecordCase("bf16", 65, torch.bfloat16),
    RecordCase("bf16 special", 9, torch.bfloat16, values="special"),
    RecordCase("bf16 from fp32", 7, torch.bfloat16, dtype=torch.float32),
    RecordCase("fp16", 7, torch.float16, dtype=torch.float16, latent=128, rope=32),
    RecordCase("fp32", 65, torch.float32, dtype=torch.float32, latent=64, rope=0, index_dim=32),
)
