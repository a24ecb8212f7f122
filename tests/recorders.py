"""Stand-ins for peers' kernels: they hold what they are given to the peer's documented call, and
answer by the reference, as untidily as the peer does (garbage where it leaves memory unwritten).
"""

from __future__ import annotations

from typing import Any

import torch

from topkapi import reference
from topkapi.layout.index_key import fp8_page_views

GARBAGE = 3.7e5


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = reference.sparse_mla(
        q.double(), cache, slots, scale=scale, v_dim=512, sinks=sinks, logit_cap=cap
    )
    return out.to(q.dtype), lse.float()


def _hold(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert tensor.dtype == dtype, f"{name}: {tensor.dtype}"
    assert tuple(tensor.shape) == shape, f"{name}: {list(tensor.shape)}"


class FlashMlaPrefill:
    """FlashMLA's sparse prefill: whole tiles of 128 slots, a fixed set of head counts."""

    def __init__(self, heads: tuple[int, ...] = (64, 128)) -> None:
        self.heads = heads
        self.largest_kv = 0
        self.calls = 0

    def call(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, _ = q.shape
        assert rows > 0
        assert heads in self.heads
        _hold("q", q, torch.bfloat16, rows, heads, 576)
        _hold("kv", kv, torch.bfloat16, kv.shape[0], 1, 576)
        width = indices.shape[2]
        _hold("indices", indices, torch.int32, rows, 1, width)
        assert width % 128 == 0
        assert width > 0
        assert bool(((indices >= -1) & (indices < kv.shape[0])).all())
        assert q.is_contiguous()
        assert indices.is_contiguous()
        if sinks is not None:
            _hold("sinks", sinks, torch.float32, heads)
        self.calls += 1
        self.largest_kv = max(self.largest_kv, kv.numel() * 2)
        out, lse = _attend(q, kv, indices[:, 0], scale, sinks)
        return out, lse.masked_fill(lse == float("-inf"), float("inf"))


class FlashMlaDecode:
    """FlashMLA's decode over records of 656 bytes; `schedules` are the metadata it was handed."""

    def __init__(self) -> None:
        self.schedules: list[torch.Tensor | None] = []
        self.pages: list[int] = []

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sinks: torch.Tensor | None,
        metadata: torch.Tensor | None,
        splits: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, ...]:
        rows, _, heads, _ = q.shape
        assert heads in (64, 128)
        _hold("q", q, torch.bfloat16, rows, 1, heads, 576)
        _hold("kv", kv, torch.uint8, kv.shape[0], kv.shape[1], 1, 656)
        width = indices.shape[2]
        _hold("indices", indices, torch.int32, rows, 1, width)
        assert width % 64 == 0
        assert width > 0
        assert bool(((indices >= -1) & (indices < kv.shape[0] * kv.shape[1])).all())
        shape = torch.tensor([rows, heads, width])
        if metadata is None:
            assert splits is None
            metadata, splits = shape, torch.arange(rows + 1)
        assert torch.equal(metadata, shape), "a schedule of another shape"
        assert splits is not None
        self.schedules.append(metadata)
        self.pages.append(kv.shape[1])
        out, lse = _attend(q[:, 0], kv.view(-1, 1, 656), indices[:, 0], scale, sinks)
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        return out[:, None], lse[:, :, None], metadata, splits


def fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor,
    page_table: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 3: nothing invalid inside the counted length; its peak loses a NaN."""
    rows, _, heads, _ = q.shape
    slots, width = k.shape[0], page_table.shape[1]
    _hold("q", q, torch.bfloat16, rows, 1, heads, 64)
    _hold("qv", qv, torch.bfloat16, rows, 1, heads, 512)
    _hold("k", k, torch.bfloat16, slots, 1, 1, 64)
    _hold("v", v, torch.bfloat16, slots, 1, 1, 512)
    _hold("page_table", page_table, torch.int32, rows, width)
    _hold("counts", counts, torch.int32, rows)
    assert page_table.stride(-1) == 1
    assert bool(((page_table >= 0) & (page_table < slots)).all())
    assert bool((counts <= width).all())
    inside = torch.arange(width) < counts[:, None]
    chosen = torch.where(inside, page_table, -1)
    # What is past the length is read, and multiplied by 0.
    read = torch.cat((k, v), 3)[page_table.long()].isnan().flatten(1).any(1)
    whole = torch.cat((v, k), 3)[:, 0]
    out, lse = _attend(torch.cat((qv, q), 3)[:, 0], whole, chosen, scale, cap=cap)
    lse = lse.masked_fill(lse.isnan(), float("-inf"))
    out = out.masked_fill((read & (counts > 0))[:, None, None], float("nan"))
    return out[:, None], lse[:, :, None]


def aiter(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    out: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    *,
    sm_scale: float,
    logit_cap: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """AITER's decode: one flat list of one-token pages, no -1; rows without any are not written."""
    rows, heads, _ = q.shape
    _hold("q", q, torch.bfloat16, rows, heads, 576)
    _hold("kv_buffer", kv_buffer, torch.bfloat16, kv_buffer.shape[0], 1, 1, 576)
    _hold("out", out, torch.bfloat16, rows, heads, 512)
    _hold("qo_indptr", qo_indptr, torch.int32, rows + 1)
    _hold("kv_indptr", kv_indptr, torch.int32, rows + 1)
    _hold("kv_last_page_lens", kv_last_page_lens, torch.int32, rows)
    assert qo_indptr.tolist() == list(range(rows + 1))
    assert kv_last_page_lens.tolist() == [1] * rows
    assert (max_seqlen_q, logit_cap, return_lse) == (1, 0.0, True)
    assert kv_indices.dtype == torch.int32
    assert kv_indices.dim() == 1
    assert int(kv_indptr[0]) == 0
    assert int(kv_indptr[-1]) <= kv_indices.shape[0]
    assert bool(((kv_indices >= 0) & (kv_indices < kv_buffer.shape[0])).all())
    lse = torch.full((rows, heads), GARBAGE)
    for row in range(rows):
        chosen = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])]
        if chosen.numel():
            part = slice(row, row + 1)
            out[part], lse[part] = _attend(q[part], kv_buffer[:, 0], chosen[None], sm_scale)
        else:
            out[row] = float("nan")
    return torch.full((1,), GARBAGE), lse


class DeepGemm:
    """DeepGEMM's logits; `garbage` in every column that it does not promise."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.most_keys = 0

    def fp8_mqa_logits(
        self,
        q: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        begins: torch.Tensor,
        ends: torch.Tensor,
        clean_logits: bool = False,
        max_seqlen_k: int = 0,
    ) -> torch.Tensor:
        values, scales = keys
        rows, heads, dims = q.shape
        count = values.shape[0]
        _hold("q", q, torch.float8_e4m3fn, rows, heads, 128)
        _hold("keys", values, torch.float8_e4m3fn, count, dims)
        _hold("scales", scales, torch.float32, count)
        _hold("weights", weights, torch.float32, rows, heads)
        _hold("begins", begins, torch.int32, rows)
        _hold("ends", ends, torch.int32, rows)
        assert heads in (32, 64)
        assert not clean_logits
        assert bool(((begins >= 0) & (begins <= ends) & (ends <= count)).all())
        assert bool((ends - begins <= max_seqlen_k).all())
        assert all(tensor.is_contiguous() for tensor in (q, values, scales, weights))
        self.calls.append("ragged")
        self.most_keys = max(self.most_keys, count)
        column = torch.arange(max_seqlen_k)
        place = (begins[:, None] + column).clamp_max(count - 1).long()
        logits = _score(q, values[None].expand(rows, -1, -1), scales.expand(rows, -1), weights)
        inside = column < (ends - begins)[:, None]
        return torch.where(inside, logits.gather(1, place), GARBAGE)

    def get_paged_mqa_logits_metadata(
        self, lengths: torch.Tensor, page: int, num_sms: int
    ) -> torch.Tensor:
        _hold("lengths", lengths, torch.int32, lengths.shape[0], 1)
        assert page == 64
        return lengths.clone()

    def fp8_paged_mqa_logits(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        weights: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        schedule: torch.Tensor,
        width: int,
        clean_logits: bool = False,
    ) -> torch.Tensor:
        rows, _, heads, _ = q.shape
        pages = cache.shape[0]
        _hold("q", q, torch.float8_e4m3fn, rows, 1, heads, 128)
        _hold("cache", cache, torch.uint8, pages, 64, 1, 132)
        _hold("weights", weights, torch.float32, rows, heads)
        _hold("table", table, torch.int32, rows, table.shape[1])
        assert heads in (32, 64)
        assert not clean_logits
        assert torch.equal(schedule, lengths), "a schedule of other lengths"
        assert bool(((table >= 0) & (table < pages)).all())
        assert table.shape[1] * 64 >= width
        assert bool((lengths <= width).all())
        self.calls.append("paged")
        values, scales = fp8_page_views(cache.view(pages, -1), 128, 64)
        values = values.view(torch.uint8)[table.long()].flatten(1, 2).view(torch.float8_e4m3fn)
        logits = _score(q[:, 0], values, scales[table.long()].flatten(1), weights)
        return torch.where(torch.arange(width) < lengths, logits[:, :width], GARBAGE)


def _score(
    q: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Logits `[R, S]` fp32 of `values [R, S, 128]`; a relu of NaN is 0, as DeepGEMM's is."""
    products = torch.einsum("rhd,rsd->rhs", q.double(), values.double())
    heads = torch.where(products > 0, products, 0.0) * weights.double()[:, :, None]
    return (heads.sum(1) * scales.double()).float()


class Topk:
    """A top-k in any order that leaves what it does not fill as it was, or garbage in it."""

    def __init__(self) -> None:
        self.calls = 0

    def choose(self, logits: torch.Tensor, begins: Any, lengths: torch.Tensor, k: int) -> Any:
        _hold("logits", logits, torch.float32, *logits.shape)
        _hold("lengths", lengths, torch.int32, logits.shape[0])
        assert logits.stride(1) == 1
        self.calls += 1
        return reference.topk(logits, lengths, k, starts=begins).flip(1)

    def sgl_kernel(
        self, logits: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor, starts: Any
    ) -> None:
        _hold("out", out, torch.int32, logits.shape[0], 2048)
        out.copy_(self.choose(logits, starts, lengths, 2048))

    def vllm(
        self, logits: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, out: torch.Tensor,
        rows: int, row_stride: int, column_stride: int, k: int,
    ) -> None:  # fmt: skip
        _hold("begins", begins, torch.int32, rows)
        _hold("out", out, torch.int32, rows, k)
        assert (row_stride, column_stride) == logits.stride()
        found = self.choose(logits, begins, ends - begins, k)
        # Past a short row it writes positions that do not exist.
        out.copy_(torch.where(found < 0, logits.shape[1] + 5, found))

    def flashinfer(
        self, logits: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, k: int
    ) -> torch.Tensor:
        _hold("offsets", offsets, torch.int32, logits.shape[0])
        assert not offsets.any()
        assert k <= logits.shape[1]
        found: torch.Tensor = self.choose(logits, None, lengths, k)
        return found
