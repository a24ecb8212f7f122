"""What every layer of one step needs to know, under the reference's names.

`build_metadata` is the one way to make it. Narrow tensors are filled once a step; wide tables that
only some peer kernel reads are built when asked for. Knows no layers and no caches' contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from topkapi import ops
from topkapi.attention.forward_batch import StepLengths
from topkapi.attention.step_metadata import StepBuffers, step_metadata
from topkapi.attention.transform import prefill_slots
from topkapi.context import Context
from topkapi.errors import ConfigError

Transform = Literal["fused", "unfused", "ragged"]


@dataclass(eq=False)
class StepSelection:
    """The last slots a layer of this step selected, for layers that share them."""

    slots: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class NSAMetadata:
    """One step's metadata. B requests, R query rows; names are the reference's.

    Attributes:
        page_size: of `real_page_table`.
        max_seq_len_q: host bound on query lengths.
        max_seq_len_k: host bound on kv lengths.
        topk: tokens a row selects.
        nsa_extend_seq_lens_list: query length of each request; empty where only the device knows.
        req_to_token: `[requests, max_context]` int32.
        buffers: the step's tensors.
        selection: what the last full layer of this step selected.
        captured: a graph is captured over it.
    """

    page_size: int
    max_seq_len_q: int
    max_seq_len_k: int
    topk: int
    nsa_extend_seq_lens_list: list[int]
    req_to_token: torch.Tensor
    buffers: StepBuffers
    nsa_max_seqlen_q: int = 1
    selection: StepSelection = field(default_factory=StepSelection)
    captured: bool = False

    def for_capture(self) -> NSAMetadata:
        """The same step over the same buffers, without what layers have made of it on their way (a
        selection, wide tables): a graph must make that itself, or it would read a warm-up's.
        """
        return replace(self, selection=StepSelection(), captured=True)

    @property
    def num_rows(self) -> int:
        """R, padding included."""
        return self.buffers.num_rows

    @property
    def selects_everything(self) -> bool:
        """No context is longer than k, so that there is nothing to score."""
        return self.max_seq_len_k <= self.topk

    @cached_property
    def context(self) -> Context:
        """The same lengths and addresses, as kernels take them."""
        return Context(
            lengths=self.buffers.lengths,
            request_of_row=self.buffers.request_of_row,
            cu_seqlens_q=self.buffers.cu_seqlens_q,
            max_length=self.max_seq_len_k,
            max_seq_len_q=self.max_seq_len_q,
            table=self.req_to_token,
            table_rows=self.buffers.table_rows,
            page_size=self.page_size,
        )

    @property
    def cache_seqlens_int32(self) -> torch.Tensor:
        """`[B]` int32, kv lengths with the new tokens."""
        return self.buffers.kv_lens

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """`[B+1]` int32."""
        return self.buffers.cu_seqlens_q

    @property
    def nsa_seqlens_expanded(self) -> torch.Tensor:
        """`[R]` int32, tokens each row sees."""
        return self.buffers.lengths

    @property
    def nsa_cache_seqlens_int32(self) -> torch.Tensor:
        """`[R]` int32, tokens each row selects: `min(nsa_seqlens_expanded, topk)`."""
        return self.buffers.selected_lens

    @cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """`[B+1]` int32. Built when first asked for."""
        return _cumulated(self.buffers.kv_lens)

    @cached_property
    def nsa_cu_seqlens_q(self) -> torch.Tensor:
        """`[R+1]` int32, `0..R`: each row is its own sequence. Built when first asked for."""
        device = self.buffers.lengths.device
        return torch.arange(self.num_rows + 1, dtype=torch.int32, device=device)

    @cached_property
    def nsa_cu_seqlens_k(self) -> torch.Tensor:
        """`[R+1]` int32. Built when first asked for."""
        return _cumulated(self.buffers.selected_lens)

    @cached_property
    def page_table_1(self) -> torch.Tensor:
        """`[B, max_seq_len_k]` int32, slot of each position. Wide: built only when asked for."""
        return self.req_to_token[self.buffers.table_rows, : self.max_seq_len_k]

    @cached_property
    def real_page_table(self) -> torch.Tensor:
        """`[B, pages]` int32, page of each `page_size` positions. Built only when asked for."""
        first = slice(0, self.max_seq_len_k, self.page_size)
        return self.req_to_token[:, first][self.buffers.table_rows] // self.page_size

    @property
    def flashmla_metadata(self) -> dict[Any, object]:
        """Kernel state that depends on this step's sizes (tile schedules), by kernel and shape.
        Owned by the step's buffers, so that no two graphs or backends share it.
        """
        return self.buffers.kernel_state


def build_metadata(
    lengths: StepLengths,
    req_to_token: torch.Tensor,
    *,
    topk: int,
    page_size: int,
    buffers: StepBuffers | None = None,
) -> NSAMetadata:
    """Metadata of one step, in fresh buffers or in a graph's static ones.

    The formula is `step_metadata`'s. No synchronisation; with `buffers`, nothing is allocated
    that outlives the call.
    """
    if buffers is None:
        num_requests = lengths.kv_lens.shape[0]
        buffers = StepBuffers.allocate(num_requests, lengths.num_rows, req_to_token.device)
    step_metadata(
        buffers,
        q_lens=lengths.q_lens,
        kv_lens=lengths.kv_lens,
        request_rows=lengths.request_rows,
        topk=topk,
        kv_shift=lengths.kv_shift,
        out_cache_loc=lengths.out_cache_loc,
    )
    return NSAMetadata(
        page_size=page_size,
        max_seq_len_q=lengths.max_q,
        max_seq_len_k=lengths.max_kv,
        topk=topk,
        nsa_extend_seq_lens_list=lengths.q_lens_cpu or [],
        req_to_token=req_to_token,
        buffers=buffers,
    )


@dataclass(frozen=True)
class NSAIndexerMetadata:
    """A step's metadata as an indexer reads it, and how its choice is addressed.

    `transform`: `fused` gives physical slots; `unfused` gives positions, which `map_positions`
    turns into slots; `ragged` gives places in a KV where the requests lie one after another.
    """

    attn_metadata: NSAMetadata
    transform: Transform = "fused"
    topk_kernel: str = "auto"

    @property
    def context(self) -> Context:
        """Lengths and addresses, as kernels take them."""
        return self.attn_metadata.context

    def get_seqlens_int32(self) -> torch.Tensor:
        """`[B]` int32 kv lengths."""
        return self.attn_metadata.cache_seqlens_int32

    def get_page_table_64(self) -> torch.Tensor:
        """`[B, pages]` int32. Raises `ConfigError` when the pool's pages are not 64 tokens."""
        if self.attn_metadata.page_size != 64:
            raise ConfigError(
                f"get_page_table_64: the pool's page size is {self.attn_metadata.page_size}"
            )
        return self.attn_metadata.real_page_table

    def get_page_table_1(self) -> torch.Tensor:
        """`[B, max_seq_len_k]` int32 slots."""
        return self.attn_metadata.page_table_1

    def get_seqlens_expanded(self) -> torch.Tensor:
        """`[R]` int32, tokens each row sees."""
        return self.attn_metadata.nsa_seqlens_expanded

    def topk_transform(
        self,
        logits: torch.Tensor,
        topk: int,
        starts: torch.Tensor | None = None,
        kernel: str | None = None,
    ) -> torch.Tensor:
        """Choose `topk` tokens a row from `logits [R, S]` fp32; `[R, topk]` int32, ascending by
        position, -1 pads at the end.

        Column `starts[r] + p` (default 0) scores position p of row r; columns outside the row's
        context are not candidates, whatever they hold. Inert rows give -1 throughout. `kernel` is
        `topk_kernel` unless given. Capture-safe.
        """
        lengths = self.attn_metadata.nsa_seqlens_expanded
        positions = ops.topk(
            logits, lengths, topk, starts=starts, kernel=kernel or self.topk_kernel
        )
        if self.transform == "unfused":
            return positions
        if self.transform == "ragged":
            first = self.attn_metadata.cu_seqlens_k[self.context.request_of_row.long()]
            return torch.where(positions < 0, positions, positions + first[:, None])
        return self.context.slots(positions)

    def map_positions(self, positions: torch.Tensor, page_size: int = 1) -> torch.Tensor:
        """The second half of `unfused`: `positions [R, K]` to slots, -1 kept.

        Through `page_table_1`, or with `page_size` 64 through `real_page_table`.
        """
        metadata = self.attn_metadata
        if page_size not in (1, metadata.page_size):
            raise ConfigError(
                f"map_positions: expected page size 1 or {metadata.page_size}, got {page_size}"
            )
        table = metadata.page_table_1 if page_size == 1 else metadata.real_page_table
        return prefill_slots(table, positions, self.context.request_of_row, page_size)


def _cumulated(lens: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=total[1:])
    return total
