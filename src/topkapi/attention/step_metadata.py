"""Which request does each query row belong to, and how many tokens does it see?

The one formula behind every mode, from `(query length, kv length)` a request, written into given
buffers: eager, graph capture and graph replay all call it. Row j of a request with q queries and
kv length n sees `n - q + j + 1` tokens. Knows no modes, pools or layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from topkapi.dispatch import Kernel, Op, Problem
from topkapi.kernels import triton as triton_kernels
from topkapi.ops.registry import problem_for


@dataclass(frozen=True)
class StepBuffers:
    """What a step's metadata is, as tensors of fixed size: B requests, R query rows.

    Attributes:
        table_rows: `[B]` int64, each request's row of the request-to-token table.
        kv_lens: `[B]` int32.
        cu_seqlens_q: `[B+1]` int32.
        request_of_row: `[R]` int32, clamped into `0..B-1` for padding rows.
        lengths: `[R]` int32, tokens each row sees; 0 for padding.
        selected_lens: `[R]` int32, `min(lengths, topk)`.
        kernel_state: what kernels keep for the layers of a step of these sizes (tile schedules),
            by kernel and shape. It lives as long as the buffers, so that a captured graph may read
            it, and no other graph's buffers hold the same.
    """

    table_rows: torch.Tensor
    kv_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    request_of_row: torch.Tensor
    lengths: torch.Tensor
    selected_lens: torch.Tensor
    kernel_state: dict[Any, object] = field(default_factory=dict)

    @classmethod
    def allocate(cls, num_requests: int, num_rows: int, device: torch.device) -> StepBuffers:
        """Zeroed buffers: 16 B a request and 12 B a row, whatever the context length."""

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            table_rows=zeros(num_requests, torch.int64),
            kv_lens=zeros(num_requests),
            cu_seqlens_q=zeros(num_requests + 1),
            request_of_row=zeros(num_rows),
            lengths=zeros(num_rows),
            selected_lens=zeros(num_rows),
        )

    @property
    def num_requests(self) -> int:
        """B."""
        return self.kv_lens.shape[0]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.lengths.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The step's metadata by name, without what kernels keep."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if name != "kernel_state"}

    def another_step(self) -> StepBuffers:
        """Buffers for the same requests and rows at other lengths: addresses are shared."""
        return replace(
            self,
            kv_lens=torch.zeros_like(self.kv_lens),
            lengths=torch.zeros_like(self.lengths),
            selected_lens=torch.zeros_like(self.selected_lens),
            kernel_state={},
        )


def allocate_steps(
    num_steps: int, num_requests: int, num_rows: int, device: torch.device
) -> list[StepBuffers]:
    """Buffers of several steps of the same requests and rows."""
    first = StepBuffers.allocate(num_requests, num_rows, device)
    return [first, *(first.another_step() for _ in range(num_steps - 1))]


def nbytes_of(steps: list[StepBuffers]) -> int:
    """Bytes of several steps' buffers; what they share counts once."""
    tensors = [tensor for step in steps for tensor in step.tensors().values()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def step_metadata(
    out: StepBuffers,
    *,
    q_lens: torch.Tensor | int,
    kv_lens: torch.Tensor,
    request_rows: torch.Tensor,
    topk: int,
    kv_shift: int = 0,
    out_cache_loc: torch.Tensor | None = None,
    kernel: str = "auto",
) -> None:
    """Fill every element of `out`.

    `q_lens` (`[b]` int, or one int for all), `kv_lens [b]` and `request_rows [b]` may describe
    fewer requests than `out` has: the rest have kv length 0. `kv_shift` is added to every kv length
    that is not 0. A row is inert (length 0) when it lies past the last query, when its formula
    gives no token, or when `out_cache_loc [r]` names slot 0 for it (r may be short, too).

    No synchronisation, no shape that depends on data: may be captured.
    """
    problem = problem_for("step_metadata", out.lengths, cache_format="none", topk=topk)
    STEP_METADATA.choose(problem, kernel).launch(
        table_rows=out.table_rows,
        kv_lens_out=out.kv_lens,
        cu_seqlens_q=out.cu_seqlens_q,
        request_of_row=out.request_of_row,
        lengths=out.lengths,
        selected_lens=out.selected_lens,
        q_lens=q_lens,
        kv_lens=kv_lens,
        request_rows=request_rows,
        topk=topk,
        kv_shift=kv_shift,
        out_cache_loc=out_cache_loc,
    )


def _torch_step_metadata(
    *,
    table_rows: torch.Tensor,
    kv_lens_out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    request_of_row: torch.Tensor,
    lengths: torch.Tensor,
    selected_lens: torch.Tensor,
    q_lens: torch.Tensor | int,
    kv_lens: torch.Tensor,
    request_rows: torch.Tensor,
    topk: int,
    kv_shift: int = 0,
    out_cache_loc: torch.Tensor | None = None,
) -> None:
    """The definition, in plain torch on any device."""
    num_requests, given = kv_lens_out.shape[0], kv_lens.shape[0]
    table_rows.zero_()
    table_rows[:given] = request_rows
    kv_lens_out.zero_()
    kv_lens_out[:given] = torch.where(kv_lens > 0, kv_lens + kv_shift, 0)
    q_of = torch.zeros_like(kv_lens_out)
    if isinstance(q_lens, int):
        q_of.fill_(q_lens)
    else:
        q_of[: q_lens.shape[0]] = q_lens
    cu_seqlens_q[:1].zero_()
    torch.cumsum(q_of, 0, dtype=torch.int32, out=cu_seqlens_q[1:])
    if num_requests == 0:
        return
    row = torch.arange(lengths.shape[0], dtype=torch.int32, device=lengths.device)
    request = torch.searchsorted(cu_seqlens_q[1:], row, right=True).clamp_max(num_requests - 1)
    seen = kv_lens_out[request] - (cu_seqlens_q[request + 1] - row) + 1
    live = row < cu_seqlens_q[-1]
    if out_cache_loc is not None:
        live[: out_cache_loc.shape[0]] &= out_cache_loc > 0
        live[out_cache_loc.shape[0] :] = False
    request_of_row.copy_(request)
    lengths.copy_(torch.where(live, seen.clamp_min(0), 0))
    torch.clamp(lengths, max=topk, out=selected_lens)


def _take_all(problem: Problem) -> str | None:
    return None


STEP_METADATA = Op(
    "step_metadata",
    (
        *(kernel for kernel in triton_kernels.KERNELS if kernel.op == "step_metadata"),
        Kernel("torch", "step_metadata", _take_all, _torch_step_metadata),
    ),
)
