"""Cases of `indexer_logits` and `select`: odd batches, plateaus of ties, both formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from cases.contexts import Addressing, make_context
from tolerances import LOGITS
from topkapi import reference
from topkapi.context import Context
from topkapi.layout.index_key import index_key_layout

Values = Literal["normal", "integers", "zeros", "nan row", "nan key", "inf row"]


@dataclass(frozen=True)
class SelectCase:
    """One batch: `q_lens` and `kv_lens` of its requests, the sizes, and what the values are like.

    `integers` gives small whole values: every logit is exact in any order of summation, and most
    are tied, so every implementation must select the very same tokens.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    k: int = 64
    heads: int = 16
    index_dim: int = 128
    cache: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    values: Values = "normal"
    addressing: Addressing = "table"
    padded_rows: int = 0
    seed: int = 0

    @property
    def exact(self) -> bool:
        """Whether there is one right selection, whatever the rounding."""
        return self.values in ("integers", "zeros")

    def make(
        self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """`q`, `weights`, `index_cache`, `context` and `k`; unused slots and padding hold NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        context, num_slots = make_context(
            self.q_lens,
            self.kv_lens,
            padded_rows=self.padded_rows,
            addressing=self.addressing,
            seed=self.seed,
        )
        rows = context.num_rows
        q = self._draw(generator, rows, self.heads, self.index_dim)
        weights = self._draw(generator, rows, self.heads)
        keys = self._draw(generator, num_slots, self.index_dim)
        if self.values == "nan row" and rows > 1:
            q[1, 0, 5] = float("nan")
        if self.values == "inf row" and rows > 1:
            q[1, :, 5] = float("inf")
        if self.values == "nan key":
            keys[int(context.slots(torch.zeros(rows, 1, dtype=torch.int32))[0, 0])] = float("nan")
        q[rows - self.padded_rows :] = float("nan")
        shape = index_key_layout(self.cache).cache_shape(num_slots // 64, 64, self.index_dim)
        index_cache = torch.zeros(shape, dtype=self.cache)
        keys[~_used(context, num_slots)] = float("nan")
        reference.write_index_key(index_cache, torch.arange(num_slots), keys)
        return {
            "q": q.to(dtype or self.dtype).to(device),
            "weights": weights.to(device),
            "index_cache": index_cache.to(device),
            "context": to_device(context, device),
            "k": self.k,
        }

    def _draw(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        if self.values == "integers":
            # Sparse, so that many heads are exactly 0 and logits tie.
            values = torch.randint(-2, 3, shape, generator=generator).float()
            return values * (torch.rand(shape, generator=generator) < 0.1)
        if self.values == "zeros":
            return torch.zeros(shape)
        return torch.randn(shape, generator=generator)

    def compare_logits(self, got: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Hold logits to the float64 definition: -inf exactly where it has it, then values."""
        want = self.expected_logits(inputs)
        assert got.dtype == torch.float32
        assert got.shape == want.shape, f"{self.name}: shape {list(got.shape)}"
        got = got.cpu().double()
        assert torch.equal(got == float("-inf"), want == float("-inf")), f"{self.name}: -inf"
        assert torch.equal(got.isnan(), want.isnan()), f"{self.name}: NaN in other places"
        assert torch.equal(got == float("inf"), want == float("inf")), f"{self.name}: inf"
        finite = want.isfinite()
        error = torch.where(finite, (got - want).abs(), 0.0)
        bound = self._slack(want)
        assert bool((error <= bound).all()), f"{self.name}: error {float(error.max()):.2e}"

    def compare(
        self,
        got: torch.Tensor,
        inputs: dict[str, Any],
        output: Literal["slots", "positions"] = "slots",
    ) -> None:
        """Hold a selection to the float64 definition.

        Exact cases: bit-equal. Others: as many positions as there must be, ascending, each in the
        context, none that is clearly below the k-th value, and none missing that is clearly above.
        """
        context = to_device(inputs["context"], "cpu")
        got = got.cpu()
        want_logits = self.expected_logits(inputs)
        want = reference.topk(want_logits, context.lengths, self.k)
        assert got.dtype == torch.int32
        assert got.shape == want.shape, f"{self.name}: shape {list(got.shape)}"
        if self.exact:
            wanted = want if output == "positions" else context.slots(want)
            assert torch.equal(got, wanted), f"{self.name}: another selection"
            return
        positions = got if output == "positions" else _positions(got, context)
        assert torch.equal(positions < 0, want < 0), f"{self.name}: -1 in other places"
        both = (positions[:, 1:] >= 0) & (positions[:, :-1] >= 0)
        ascending = positions[:, 1:] > positions[:, :-1]
        assert bool((ascending | ~both).all()), f"{self.name}: not ascending"
        assert bool((positions < context.lengths[:, None]).all()), f"{self.name}: out of range"
        self._compare_values(positions, want, want_logits)

    def _compare_values(
        self, positions: torch.Tensor, want: torch.Tensor, logits: torch.Tensor
    ) -> None:
        width = logits.shape[1]
        if width == 0:
            return
        clean = torch.nan_to_num(logits, nan=float("-inf"), posinf=1e300, neginf=-1e300)
        clean = torch.where(logits.isnan(), -1e300, clean)
        slack = self._slack(logits)

        def chosen(at: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(at.shape[0], width + 1, dtype=torch.bool)
            mask.scatter_(1, torch.where(at < 0, width, at.long()), True)
            return mask[:, :width]

        mine, theirs = chosen(positions), chosen(want)
        kth = torch.where(theirs, clean, float("inf")).amin(1, keepdim=True)
        low = mine & (clean < kth - 2 * slack)
        high = ~mine & (clean > kth + 2 * slack)
        inside = (want >= 0).any(1, keepdim=True)
        assert not bool((low & inside).any()), f"{self.name}: took one below the k-th"
        assert not bool((high & inside & (logits > float("-inf"))).any()), f"{self.name}: missed"

    def _slack(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[1] == 0:
            return torch.zeros(logits.shape[0], 1, dtype=torch.float64)
        size = torch.where(logits.isfinite(), logits.abs(), 0.0).amax(1, keepdim=True)
        return LOGITS * size

    def expected_logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """`[R, max_length]` float64 on the CPU, from the very values of the inputs."""
        return reference.indexer_logits(
            inputs["q"].cpu().double(),
            inputs["weights"].cpu(),
            inputs["index_cache"].cpu(),
            to_device(inputs["context"], "cpu"),
        )


def to_device(context: Context, device: torch.device | str) -> Context:
    """The same context on another device."""

    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    return Context(
        lengths=context.lengths.to(device),
        request_of_row=context.request_of_row.to(device),
        cu_seqlens_q=context.cu_seqlens_q.to(device),
        max_length=context.max_length,
        max_seq_len_q=context.max_seq_len_q,
        table=move(context.table),
        table_rows=move(context.table_rows),
        starts=move(context.starts),
        page_size=context.page_size,
    )


def _all_slots(context: Context) -> torch.Tensor:
    """Slots `[R, max_length]` of every position that each row may see, -1 elsewhere."""
    column = torch.arange(context.max_length)
    visible = column < context.lengths[:, None]
    return context.slots(torch.where(visible, column, -1))


def _used(context: Context, num_slots: int) -> torch.Tensor:
    slots = _all_slots(context).flatten()
    used = torch.zeros(num_slots, dtype=torch.bool)
    used[slots[slots >= 0].long()] = True
    return used


def _positions(slots: torch.Tensor, context: Context) -> torch.Tensor:
    """Positions of a selection given as slots: each is looked up in its own row's context."""
    known = _all_slots(context)
    positions = torch.full_like(slots, -1)
    for row in range(slots.shape[0]):
        where = {slot: at for at, slot in enumerate(known[row].tolist()) if slot >= 0}
        found = [where.get(slot, 10**9) if slot >= 0 else -1 for slot in slots[row].tolist()]
        positions[row] = torch.tensor(found, dtype=slots.dtype)
    return positions


_BF16 = torch.bfloat16
_FP8 = torch.uint8

SELECT_CASES = (
    SelectCase("one token", (1,), (1,)),
    SelectCase("empty batch", (), ()),
    SelectCase("empty request", (0, 3, 0), (0, 70, 9)),
    SelectCase("decode", (1, 1, 1), (300, 65, 1)),
    SelectCase("decode, lengths around k", (1,) * 5, (1, 63, 64, 65, 129)),
    SelectCase("prefill", (130,), (130,)),
    SelectCase("prefill with prefix", (65, 3), (700, 3), k=65),
    SelectCase("mixed", (1, 63, 1, 17), (513, 63, 2, 400), k=33, padded_rows=3),
    SelectCase("all padding", (0,), (0,), padded_rows=2),
    SelectCase("k=1", (5, 1), (77, 1025), k=1),
    SelectCase("k over context", (5, 1), (77, 1025), k=2048),
    SelectCase("starts", (1, 9, 5), (100, 300, 5), addressing="starts", padded_rows=1),
    SelectCase("one head", (7, 1), (200, 1000), heads=1),
    SelectCase("64 heads", (3, 1), (130, 500), heads=64),
    SelectCase("dim 32", (7, 1), (200, 1000), index_dim=32, heads=3),
    SelectCase("dim 64", (7, 1), (200, 1000), index_dim=64, heads=5),
    SelectCase("long", (2, 1), (5000, 4097), k=512),
    SelectCase("ties", (65, 1, 9), (700, 1300, 9), values="integers", padded_rows=2),
    SelectCase("ties, one head", (65, 1), (700, 1300), values="integers", heads=1),
    SelectCase("ties, starts", (65, 1), (700, 1300), values="integers", addressing="starts"),
    SelectCase("ties, k=1", (33, 1), (400, 900), values="integers", k=1),
    SelectCase("ties, bf16", (33, 1), (400, 900), values="integers", cache=_BF16, dtype=_BF16),
    SelectCase("all zero", (33, 1), (400, 900), values="zeros"),
    SelectCase("all zero, fp8", (33, 1), (400, 900), values="zeros", cache=_FP8, dtype=_BF16),
    SelectCase("NaN row", (5, 1), (100, 300), values="nan row"),
    SelectCase("NaN key", (5, 1), (100, 300), values="nan key"),
    SelectCase("inf row", (5, 1), (100, 300), values="inf row"),
    SelectCase("bf16", (65, 1), (400, 900), cache=_BF16, dtype=_BF16),
    SelectCase("bf16, starts", (65, 1), (400, 900), cache=_BF16, dtype=_BF16, addressing="starts"),
    SelectCase("fp8", (65, 1, 1), (400, 900, 64), cache=_FP8, dtype=_BF16, padded_rows=1),
    SelectCase("fp8, fp32 query", (5, 1), (400, 900), cache=_FP8),
    SelectCase("fp8, starts", (5, 1), (400, 900), cache=_FP8, dtype=_BF16, addressing="starts"),
    SelectCase("fp8, dim 64", (5, 1), (400, 900), cache=_FP8, dtype=_BF16, index_dim=64, heads=4),
    SelectCase("fp8 NaN row", (5, 1), (100, 300), cache=_FP8, dtype=_BF16, values="nan row"),
)
