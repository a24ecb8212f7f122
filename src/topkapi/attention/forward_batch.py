"""What is one forward pass asked to do? The batch, its mode, and the two numbers a request.

A mode is nothing but a way to read `(query length, kv length)` of each request off a batch;
`lengths_of` is that table, and the only place that looks at the mode. Knows no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from topkapi.cache import ReqToTokenPool
from topkapi.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from topkapi.cache import NSATokenToKVPool


class ForwardMode(Enum):
    """The forward modes of the reference backend."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    DRAFT_EXTEND_V2 = auto()

    def is_decode(self) -> bool:
        """One new token a request."""
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        """Nothing to do; kept in step with other data-parallel ranks."""
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        """Goes to `forward_decode`."""
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_mixed(self) -> bool:
        """Chunks of prompts and single new tokens in one batch."""
        return self is ForwardMode.MIXED

    def is_target_verify(self) -> bool:
        """The target model checks a chain of draft tokens."""
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        """The draft model catches up with the accepted tokens."""
        fixed = include_v2 and self is ForwardMode.DRAFT_EXTEND_V2
        return fixed or self is ForwardMode.DRAFT_EXTEND

    def is_draft_extend_v2(self) -> bool:
        """Draft-extend over a fixed number of tokens, accepted or not."""
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_extend(self) -> bool:
        """Goes to `forward_extend`."""
        return not self.is_decode_or_idle()

    def is_extend_without_speculative(self) -> bool:
        """Prompt tokens only, or with decode rows among them."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass(frozen=True)
class SpecInfo:
    """What speculation adds to a batch.

    Attributes:
        draft_token_num: tokens a request verifies (TARGET_VERIFY), or extends by
            (DRAFT_EXTEND_V2), the root token included.
        accept_length: `[B]` int, tokens a request extends by in DRAFT_EXTEND, the bonus token
            included.
    """

    draft_token_num: int = 0
    accept_length: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer as the backend sees it, in absorbed (latent) form.

    `head_dim` is L + P, `v_head_dim` is L, `scaling` multiplies scores. `sinks [H]` fp32 join the
    softmax's denominator; `logit_cap` > 0 bounds scores by `cap * tanh(score / cap)`.
    `w_kc [H, nope, L]` and `w_vc [H, L, V]` are kv_b_proj's two halves, for the dense path.
    """

    tp_q_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float
    layer_id: int
    tp_k_head_num: int = 1
    logit_cap: float = 0.0
    is_cross_attention: bool = False
    sinks: torch.Tensor | None = None
    w_kc: torch.Tensor | None = None
    w_vc: torch.Tensor | None = None


@dataclass
class ForwardBatch:
    """B requests of one forward pass; query rows of a request are contiguous, in request order.

    Attributes:
        forward_mode: see `lengths_of` for what each mode reads.
        batch_size: B.
        seq_lens: `[B]` int, cached and new tokens together; in TARGET_VERIFY without the drafts.
        seq_lens_cpu: the same on the host, so that no step synchronises; None costs tight bounds.
        req_pool_indices: `[B]` int, each request's row of the request-to-token table.
        out_cache_loc: `[T]` int64, the slot each new token is written to. A row that writes to
            slot 0 is padding: it selects nothing and gives zeros.
        positions: `[T]` int64.
        extend_seq_lens: `[B]` int, new tokens of each request; `extend_seq_lens_cpu` on the host.
        extend_prefix_lens_cpu: tokens of each request that were cached before.
    """

    forward_mode: ForwardMode
    batch_size: int
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    positions: torch.Tensor
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: NSATokenToKVPool
    seq_lens_cpu: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    spec_info: SpecInfo | None = None

    @classmethod
    def from_lengths(
        cls,
        forward_mode: ForwardMode,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        req_pool_indices: Sequence[int],
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: NSATokenToKVPool,
    ) -> ForwardBatch:
        """A batch whose request b has `q_lens[b]` new tokens, the last of its `kv_lens[b]`.

        The table must already name their slots: `out_cache_loc` is read from it. Lengths are the
        true ones in every mode; TARGET_VERIFY's `seq_lens` leaves the drafts out, as it must.
        Host lists in, so nothing synchronises. Raises `ShapeError` for lengths that cannot be.
        """
        _check_lengths(forward_mode, q_lens, kv_lens, req_pool_indices, req_to_token_pool)
        table = req_to_token_pool.req_to_token
        prefix = [n - q for q, n in zip(q_lens, kv_lens, strict=True)]
        rows, positions = _move(_new_tokens(q_lens, prefix, req_pool_indices), table.device)
        seq_lens = prefix if forward_mode.is_target_verify() else list(kv_lens)
        seq_lens_cpu = torch.tensor(seq_lens, dtype=torch.int32)
        extend = _move(torch.tensor(list(q_lens), dtype=torch.int32), table.device)
        indices = torch.tensor(list(req_pool_indices), dtype=torch.int64)
        return cls(
            forward_mode=forward_mode,
            batch_size=len(q_lens),
            seq_lens=_move(seq_lens_cpu, table.device),
            seq_lens_cpu=seq_lens_cpu,
            req_pool_indices=_move(indices, table.device),
            out_cache_loc=table[rows, positions].long(),
            positions=positions,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool=token_to_kv_pool,
            extend_seq_lens=extend,
            extend_seq_lens_cpu=list(q_lens),
            extend_prefix_lens_cpu=prefix,
            spec_info=SpecInfo(draft_token_num=max(q_lens, default=1), accept_length=extend),
        )


def _move(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device without waiting for what it is doing; the copy is read before this returns."""
    return host.to(device, non_blocking=True)


def _new_tokens(q_lens: Sequence[int], prefix: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    """`[2, T]` int64 on the host: each new token's table row and position."""
    lens = torch.tensor(list(q_lens), dtype=torch.int64)
    # A token's position is its prefix plus its place among its request's new tokens.
    per_request = torch.tensor([list(rows), list(prefix)], dtype=torch.int64).reshape(2, -1)
    first = torch.cumsum(lens, 0) - lens
    per_request[1] -= first
    tokens = torch.repeat_interleave(per_request, lens, dim=1)
    tokens[1] += torch.arange(tokens.shape[1])
    return tokens


def _check_lengths(
    mode: ForwardMode,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    req_pool_indices: Sequence[int],
    table: ReqToTokenPool,
) -> None:
    if not len(q_lens) == len(kv_lens) == len(req_pool_indices):
        raise ShapeError(
            f"from_lengths: expected one query length, kv length and row a request, got "
            f"{len(q_lens)}, {len(kv_lens)} and {len(req_pool_indices)}"
        )
    for q, n in zip(q_lens, kv_lens, strict=True):
        if not 0 <= q <= n <= table.max_context_len:
            raise ShapeError(
                "from_lengths: expected 0 <= query length <= kv length <= "
                f"{table.max_context_len}, got {q} and {n}"
            )
    fixed = mode.is_target_verify() or mode.is_draft_extend_v2()
    if fixed and len(set(q_lens)) > 1:
        raise ShapeError(
            f"from_lengths: {mode.name} has one query length for all, got {list(q_lens)}"
        )
    if mode.is_decode() and set(q_lens) - {1}:
        raise ShapeError(f"from_lengths: DECODE has query length 1, got {list(q_lens)}")


@dataclass(frozen=True)
class StepLengths:
    """A mode's reading of a batch: all that the metadata builder knows of it.

    Attributes:
        q_lens: `[B]` int tensor, or one int for every request.
        kv_lens: `[B]` int; `kv_shift` is added to each that is not 0.
        request_rows: `[B]` int.
        num_rows: R, padding included.
        q_lens_cpu: per request, where the host knows them.
        max_q, max_kv: host bounds.
        out_cache_loc: `[R]` int64 or None; rows that write to slot 0 are padding.
    """

    q_lens: torch.Tensor | int
    kv_lens: torch.Tensor
    kv_shift: int
    request_rows: torch.Tensor
    num_rows: int
    q_lens_cpu: list[int] | None
    max_q: int
    max_kv: int
    out_cache_loc: torch.Tensor | None = None


def query_lens(
    mode: ForwardMode,
    spec_info: SpecInfo | None,
    extend_seq_lens: torch.Tensor | None,
) -> tuple[torch.Tensor | int, int]:
    """The mode table: `(query lengths, tokens to add to seq_lens)`.

    | mode | query length | kv length |
    |---|---|---|
    | DECODE | 1 | seq_lens |
    | IDLE | 1, of no request | seq_lens |
    | EXTEND, MIXED | extend_seq_lens | seq_lens |
    | TARGET_VERIFY | draft_token_num | seq_lens + draft_token_num |
    | DRAFT_EXTEND | extend_seq_lens, else accept_length | seq_lens |
    | DRAFT_EXTEND_V2 | draft_token_num | seq_lens |

    Raises `ConfigError` when the batch lacks what its mode reads.
    """
    if mode.is_decode_or_idle():
        return 1, 0
    if mode.is_target_verify() or mode.is_draft_extend_v2():
        if spec_info is None or spec_info.draft_token_num < 1:
            raise ConfigError(f"{mode.name} reads spec_info.draft_token_num, got {spec_info}")
        drafts = spec_info.draft_token_num
        return drafts, drafts if mode.is_target_verify() else 0
    if extend_seq_lens is None and spec_info is not None:
        extend_seq_lens = spec_info.accept_length
    if extend_seq_lens is None:
        raise ConfigError(f"{mode.name} reads extend_seq_lens, and the batch has none")
    return extend_seq_lens, 0


def lengths_of(batch: ForwardBatch) -> StepLengths:
    """Read a batch. Never synchronises: host bounds come from its host fields."""
    q_lens, shift = query_lens(batch.forward_mode, batch.spec_info, batch.extend_seq_lens)
    q_lens_cpu = batch.extend_seq_lens_cpu
    if isinstance(q_lens, int):
        q_lens_cpu = [q_lens] * batch.batch_size
    num_rows = batch.out_cache_loc.shape[0]
    if q_lens_cpu is not None and sum(q_lens_cpu) > num_rows:
        raise ShapeError(
            f"out_cache_loc: expected a slot for each of {sum(q_lens_cpu)} query rows, "
            f"got {num_rows}"
        )
    return StepLengths(
        q_lens=q_lens,
        kv_lens=batch.seq_lens,
        kv_shift=shift,
        request_rows=batch.req_pool_indices,
        num_rows=num_rows,
        q_lens_cpu=q_lens_cpu,
        max_q=num_rows if q_lens_cpu is None else max(q_lens_cpu, default=0),
        max_kv=longest(batch.seq_lens_cpu, batch.req_to_token_pool, shift),
        out_cache_loc=batch.out_cache_loc,
    )


def graph_lengths_of(
    mode: ForwardMode,
    *,
    bs: int,
    num_tokens: int,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    spec_info: SpecInfo | None,
    max_kv: int,
    out_cache_loc: torch.Tensor | None = None,
) -> StepLengths:
    """Read what a graph's capture or replay is given: `bs` requests in `num_tokens` rows.

    Tensors may be shorter than `bs`: the requests they lack are inert. Where `spec_info` does not
    say, each request has `num_tokens / bs` rows.
    """
    per_request = num_tokens // max(bs, 1)
    spec_info = spec_info or SpecInfo()
    accepted = None if spec_info.accept_length is None else spec_info.accept_length[:bs]
    q_lens: torch.Tensor | int
    if mode.is_draft_extend() and accepted is None:
        q_lens, shift = per_request, 0
    else:
        drafts = spec_info.draft_token_num or per_request
        q_lens, shift = query_lens(mode, SpecInfo(drafts, accepted), None)
    return StepLengths(
        q_lens=q_lens,
        kv_lens=seq_lens[:bs],
        kv_shift=shift,
        request_rows=req_pool_indices[:bs],
        num_rows=num_tokens,
        q_lens_cpu=[q_lens] * bs if isinstance(q_lens, int) else None,
        max_q=q_lens if isinstance(q_lens, int) else num_tokens,
        max_kv=max_kv,
        out_cache_loc=None if out_cache_loc is None else out_cache_loc[:num_tokens],
    )


def longest(seq_lens_cpu: torch.Tensor | None, table: ReqToTokenPool, shift: int) -> int:
    """Host bound on the kv lengths, `shift` added: exact from `seq_lens_cpu`, else the table's
    width. No sync.
    """
    if seq_lens_cpu is None:
        return table.max_context_len
    longest_cpu = int(seq_lens_cpu.max()) + shift if seq_lens_cpu.numel() else 0
    return min(longest_cpu, table.max_context_len)
