"""Is a step's metadata the oracle's, and the same bits eagerly, at capture and at replay?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.oracle import ExpectedMetadata, expected_metadata
from attention.world import CONFIG, World
from topkapi.attention import ForwardMode, NSAMetadata, SpecInfo
from topkapi.attention.step_metadata import StepBuffers, step_metadata
from topkapi.errors import ConfigError, ShapeError

K = CONFIG.index_topk
MAX_CONTEXT = 100
WORLD = World(requests=6, max_context=MAX_CONTEXT)
MODES = [mode for mode in ForwardMode if mode is not ForwardMode.IDLE]
GRAPH_MODES = [mode for mode in MODES if not mode.is_extend_without_speculative()]
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Batch:
    """A mode and true lengths of each request, the new tokens included."""

    mode: ForwardMode
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


@st.composite
def batches(draw: st.DrawFn, modes: Sequence[ForwardMode] = MODES, drafts: int = 0) -> Batch:
    mode = draw(st.sampled_from(modes))
    size = draw(st.integers(0, 6))
    fixed = drafts or draw(st.integers(1, 5))
    q_lens, kv_lens = [], []
    for _ in range(size):
        if mode.is_decode():
            q = 1
        elif mode.is_target_verify() or mode.is_draft_extend_v2():
            q = fixed
        else:
            q = draw(st.integers(0 if mode.is_extend_without_speculative() else 1, fixed))
        least = q + 1 if mode.is_target_verify() else max(q, 1)
        around_k = st.integers(max(least, K - 2), K + 2)
        kv_lens.append(draw(st.integers(least, MAX_CONTEXT) | around_k))
        q_lens.append(q)
    return Batch(mode, tuple(q_lens), tuple(kv_lens))


def same_tensors(one: NSAMetadata, other: NSAMetadata) -> None:
    for name, left in one.buffers.tensors().items():
        right = other.buffers.tensors()[name]
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name
    for name in ("cu_seqlens_k", "nsa_cu_seqlens_q", "nsa_cu_seqlens_k"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def check_expected(metadata: NSAMetadata, want: ExpectedMetadata) -> None:
    for item in fields(ExpectedMetadata):
        if item.name == "request_of_live_row":
            continue
        got = getattr(metadata, item.name)
        if isinstance(got, torch.Tensor):
            assert got.dtype == torch.int32, item.name
            got = got.tolist()
        assert got == getattr(want, item.name), item.name
    owner = metadata.buffers.request_of_row.tolist()
    assert owner[: len(want.request_of_live_row)] == want.request_of_live_row
    assert all(0 <= b < max(len(want.cache_seqlens_int32), 1) for b in owner)


def eager(batch: Batch) -> NSAMetadata:
    backend = WORLD.new_backend()
    backend.init_forward_metadata(WORLD.batch(batch.mode, batch.q_lens, batch.kv_lens))
    assert backend.forward_metadata is not None
    return backend.forward_metadata


@SETTINGS
@given(batches())
def test_an_eager_step_is_the_oracles(batch: Batch) -> None:
    rows = sum(batch.q_lens)
    want = expected_metadata(batch.q_lens, batch.kv_lens, topk=K, num_rows=rows)
    metadata = eager(batch)
    check_expected(metadata, want)
    assert metadata.nsa_extend_seq_lens_list == list(batch.q_lens)
    assert metadata.nsa_max_seqlen_q == 1
    assert metadata.flashmla_metadata == {}


@SETTINGS
@given(batches())
def test_wide_tables_name_each_positions_slot(batch: Batch) -> None:
    metadata = eager(batch)
    for request, (row, n) in enumerate(zip(WORLD.rows, batch.kv_lens, strict=False)):
        slots = WORLD.table.req_to_token[row, :n].tolist()
        assert metadata.page_table_1[request, :n].tolist() == slots
        pages = metadata.real_page_table[request].tolist()
        assert [pages[p // 64] * 64 + p % 64 for p in range(n)] == slots


@dataclass(frozen=True)
class GraphCall:
    """What an engine hands to a replay."""

    bs: int
    rows: torch.Tensor
    seq_lens: torch.Tensor
    spec_info: SpecInfo
    out_cache_loc: torch.Tensor


def graph_call(batch: Batch, drafts: int) -> GraphCall:
    size, verify = len(batch.q_lens), batch.mode.is_target_verify()
    lens = [n - q * verify for q, n in zip(batch.q_lens, batch.kv_lens, strict=True)]
    accepted = torch.tensor(batch.q_lens, dtype=torch.int32)
    loc = WORLD.batch(batch.mode, batch.q_lens, batch.kv_lens).out_cache_loc
    return GraphCall(
        bs=size,
        rows=torch.tensor(WORLD.rows[:size]),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        spec_info=SpecInfo(draft_token_num=drafts, accept_length=accepted),
        out_cache_loc=loc,
    )


@SETTINGS
@given(batches(GRAPH_MODES, drafts=3))
def test_capture_and_replay_are_the_eager_steps_bits(batch: Batch) -> None:
    size = len(batch.q_lens)
    if size == 0:
        return
    call, want = graph_call(batch, 3), eager(batch)
    backend = WORLD.new_backend()
    backend.init_cuda_graph_state(size, sum(batch.q_lens))
    # With as many rows as the batch has, nothing is padded and all three must agree.
    arguments = (call.rows, call.seq_lens)
    backend.init_forward_metadata_capture_cuda_graph(
        size, sum(batch.q_lens), *arguments, None, batch.mode, call.spec_info
    )
    captured = backend.forward_metadata
    assert captured is not None
    same_tensors(captured, want)
    assert captured.max_seq_len_k == MAX_CONTEXT
    for loc in (None, call.out_cache_loc):
        for tensor in captured.buffers.tensors().values():
            tensor.fill_(77)
        backend.init_forward_metadata_replay_cuda_graph(
            size, *arguments, 0, None, batch.mode, call.spec_info, call.seq_lens, loc
        )
        replayed = backend.forward_metadata
        assert replayed is not None
        same_tensors(replayed, want)
        assert replayed.max_seq_len_k == want.max_seq_len_k
        assert replayed.buffers.lengths.data_ptr() == captured.buffers.lengths.data_ptr()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(batches(GRAPH_MODES, drafts=3), min_size=2, max_size=6), st.booleans())
def test_replays_that_grow_and_shrink_leave_nothing_behind(
    sequence: list[Batch], filled: bool
) -> None:
    """One graph of 6 requests a mode, interleaved. Smaller batches are filled up by the engine, and
    slot 0 marks padding, or are left short, and nothing does.
    """
    backend = WORLD.new_backend()
    backend.init_cuda_graph_state(6, 18)
    for mode in GRAPH_MODES:
        rows = 6 if mode.is_decode() else 18
        full = torch.ones(6, dtype=torch.int64)
        spec = SpecInfo(draft_token_num=3)
        backend.init_forward_metadata_capture_cuda_graph(6, rows, full, full, None, mode, spec)
    for batch in sequence:
        call = graph_call(batch, 3)
        rows = 6 if batch.mode.is_decode() else 18
        loc = torch.zeros(rows, dtype=torch.int64)
        loc[: len(call.out_cache_loc)] = call.out_cache_loc
        indices, lens, spec, missing = call.rows, call.seq_lens, call.spec_info, 6 - call.bs
        if filled:
            fill = backend.get_cuda_graph_seq_len_fill_value()
            indices = torch.cat((indices, indices.new_zeros(missing)))
            lens = torch.cat((lens, lens.new_full((missing,), fill)))
            accepted = torch.cat((spec.accept_length, lens.new_ones(missing)))
            spec = SpecInfo(draft_token_num=3, accept_length=accepted)
        backend.init_forward_metadata_replay_cuda_graph(
            6, indices, lens, 0, None, batch.mode, spec, lens, loc if filled else None
        )
        metadata = backend.forward_metadata
        assert metadata is not None
        live = sum(batch.q_lens)
        want = expected_metadata(batch.q_lens, batch.kv_lens, topk=K, num_rows=rows)
        assert metadata.nsa_seqlens_expanded.tolist() == want.nsa_seqlens_expanded
        assert metadata.nsa_cache_seqlens_int32.tolist() == want.nsa_cache_seqlens_int32
        assert metadata.buffers.request_of_row[:live].tolist() == want.request_of_live_row
        assert metadata.cu_seqlens_q[: call.bs + 1].tolist() == want.cu_seqlens_q
        assert metadata.buffers.table_rows.tolist() == WORLD.rows[: call.bs] + [0] * missing
        if not filled:
            assert metadata.cache_seqlens_int32.tolist() == [*batch.kv_lens] + [0] * missing


def test_rows_that_write_to_slot_0_are_inert() -> None:
    batch = WORLD.batch(ForwardMode.EXTEND, (3, 2), (9, 20))
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, torch.zeros(4, dtype=torch.int64)))
    backend = WORLD.new_backend()
    backend.init_forward_metadata(batch)
    assert backend.metadata.nsa_seqlens_expanded.tolist() == [7, 8, 9, 19, 20, 0, 0, 0, 0]
    batch.out_cache_loc[3] = 0
    backend.init_forward_metadata(batch)
    want = expected_metadata((3, 2), (9, 20), topk=K, num_rows=9, inert_rows=(3,))
    check_expected(backend.metadata, want)


def test_a_request_of_length_0_is_inert_in_a_verify_step() -> None:
    """The drafts that the backend adds must not bring it to life."""
    batch = WORLD.batch(ForwardMode.TARGET_VERIFY, (3, 3), (8, 6))
    batch.seq_lens[1] = 0
    backend = WORLD.new_backend()
    backend.init_forward_metadata(batch)
    assert backend.metadata.nsa_seqlens_expanded.tolist() == [6, 7, 8, 0, 0, 0]


def test_an_idle_rank_replays_the_decode_graph() -> None:
    backend = WORLD.new_backend()
    backend.init_cuda_graph_state(4, 4)
    ones = torch.ones(4, dtype=torch.int64)
    backend.init_forward_metadata_capture_cuda_graph(
        4, 4, ones, ones, None, ForwardMode.DECODE, None
    )
    none = ones[:0]
    backend.init_forward_metadata_replay_cuda_graph(
        4, none, none, 0, None, ForwardMode.IDLE, None, none, none
    )
    assert not backend.metadata.nsa_seqlens_expanded.any()
    assert backend.metadata.max_seq_len_k == 0


def test_graph_buffers_do_not_grow_with_the_context() -> None:
    """640 rows at 163,840 tokens: the reference's page table alone is 419 MB."""
    world = World(requests=1, max_context=163_840)
    backend = world.backend
    backend.init_cuda_graph_state(160, 640)
    ones = torch.ones(160, dtype=torch.int64)
    spec = SpecInfo(draft_token_num=4)
    backend.init_forward_metadata_capture_cuda_graph(
        160, 640, ones, ones, None, ForwardMode.TARGET_VERIFY, spec
    )
    rows, requests = 640, 160
    assert backend.cuda_graph_bytes() == 12 * rows + 16 * requests + 4
    assert backend.cuda_graph_bytes() < 4 * 640 * 163_840 // 10_000


def test_wrong_graph_calls_teach() -> None:
    backend = WORLD.new_backend()
    ones = torch.ones(4, dtype=torch.int64)
    with pytest.raises(ConfigError, match="init_cuda_graph_state"):
        backend.cuda_graph_bytes()
    backend.init_cuda_graph_state(2, 8)
    with pytest.raises(ConfigError, match="at most 2 requests and 8 tokens"):
        backend.init_forward_metadata_capture_cuda_graph(
            4, 4, ones, ones, None, ForwardMode.DECODE, None
        )
    with pytest.raises(ConfigError, match="EXTEND reads extend_seq_lens"):
        backend.init_forward_metadata_capture_cuda_graph(
            2, 4, ones, ones, None, ForwardMode.EXTEND, None
        )
    backend.init_forward_metadata_capture_cuda_graph(
        2, 2, ones, ones, None, ForwardMode.DECODE, None
    )
    with pytest.raises(ConfigError, match="TARGET_VERIFY x 2; captured are: DECODE x 2"):
        backend.init_forward_metadata_replay_cuda_graph(
            2, ones, ones, 0, None, ForwardMode.TARGET_VERIFY, None, ones
        )
    with pytest.raises(ConfigError, match="no encoder"):
        backend.init_forward_metadata_replay_cuda_graph(
            2, ones, ones, 0, ones, ForwardMode.DECODE, None, ones
        )


def test_a_batch_that_cannot_be_is_refused() -> None:
    with pytest.raises(ShapeError, match="query length <= kv length"):
        WORLD.batch(ForwardMode.EXTEND, (5,), (4,))
    with pytest.raises(ShapeError, match="query length 1"):
        WORLD.batch(ForwardMode.DECODE, (2,), (4,))
    with pytest.raises(ShapeError, match="one query length for all"):
        WORLD.batch(ForwardMode.TARGET_VERIFY, (2, 3), (4, 9))
    batch = WORLD.batch(ForwardMode.EXTEND, (5,), (5,))
    batch.out_cache_loc = batch.out_cache_loc[:3]
    with pytest.raises(ShapeError, match="each of 5 query rows, got 3"):
        WORLD.new_backend().init_forward_metadata(batch)


def test_the_builder_never_asks_the_host() -> None:
    """On the meta device any read of a value fails, so what runs there can be captured."""
    buffers = StepBuffers.allocate(3, 8, torch.device("meta"))
    lens = torch.empty(3, dtype=torch.int32, device="meta")
    step_metadata(
        buffers,
        q_lens=lens,
        kv_lens=lens,
        request_rows=lens,
        topk=K,
        kv_shift=2,
        out_cache_loc=torch.empty(8, dtype=torch.int64, device="meta"),
    )
    assert buffers.lengths.shape == (8,)
