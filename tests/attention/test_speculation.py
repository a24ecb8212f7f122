"""Does drafting, verifying, accepting and catching up compute what plain decoding computes?"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attention.tiny_model import VOCABULARY, TinyModel
from attention.world import CONFIG, World, make_stream, parts_of, run_layer
from tolerances import OUTPUT, assert_close
from topkapi.attention import ForwardBatch, ForwardMode, NativeSparseAttnMultiStepBackend
from topkapi.config import DsaConfig
from topkapi.errors import ConfigError

ROUNDS = 50
DRAFTS = 4
DRAFT_CONFIG = replace(CONFIG, num_hidden_layers=1)
PROMPTS = (6, 15)


def plain_hidden(config: DsaConfig, seed: int, tokens: torch.Tensor) -> torch.Tensor:
    """`[B, N, width]`: a prompt of one token, then plain decoding one by one."""
    world = World(config, requests=len(tokens), max_context=tokens.shape[1])
    model, hidden = TinyModel(world, seed), []
    for n in range(1, tokens.shape[1] + 1):
        batch = world.batch(ForwardMode.DECODE, [1] * len(tokens), [n] * len(tokens))
        world.backend.init_forward_metadata(batch)
        hidden.append(model(tokens[:, n - 1], batch, world.backend))
    return torch.stack(hidden, dim=1)


class Speculation:
    """A target and a draft model that both know the true sequence of every request.

    Drafts are the true tokens up to a random place and wrong from there, so acceptance is known,
    and the hidden state of every right token must be plain decoding's.
    """

    def __init__(self, seed: int, fixed: bool) -> None:
        self.random = random.Random(seed)
        length = max(PROMPTS) + ROUNDS * DRAFTS + DRAFTS
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (len(PROMPTS), length), generator=draw)
        shape = {"requests": len(PROMPTS), "max_context": length}
        self.target = TinyModel(World(CONFIG, **shape), seed=1)
        self.draft = TinyModel(World(DRAFT_CONFIG, seed=9, **shape), seed=2)
        self.want_target = plain_hidden(CONFIG, 1, self.tokens)
        self.want_draft = plain_hidden(DRAFT_CONFIG, 2, self.tokens)
        self.steps = NativeSparseAttnMultiStepBackend(self.draft.world.backend, 1, DRAFTS - 1)
        self.lens = list(PROMPTS)
        self.fixed = fixed

    def run(self, model: TinyModel, mode: ForwardMode, q_lens, kv_lens, rows) -> torch.Tensor:
        batch = model.world.batch(mode, q_lens, kv_lens)
        model.world.backend.init_forward_metadata(batch)
        return model(rows, batch, model.world.backend)

    def compare(self, name: str, hidden, want, q_lens, first, right) -> None:
        """Rows of request b are positions `first[b]..`; the first `right[b]` hold true tokens."""
        start = 0
        for b, q in enumerate(q_lens):
            got = hidden[start : start + right[b]]
            place = slice(first[b], first[b] + right[b])
            assert_close(f"{name}, request {b}", got, want[b, place], OUTPUT[torch.float32])
            start += q

    def prefill(self) -> None:
        rows = torch.cat([self.tokens[b, :n] for b, n in enumerate(PROMPTS)])
        zeros = [0] * len(PROMPTS)
        for model, want in ((self.target, self.want_target), (self.draft, self.want_draft)):
            hidden = self.run(model, ForwardMode.EXTEND, PROMPTS, PROMPTS, rows)
            self.compare("prefill", hidden, want, PROMPTS, zeros, PROMPTS)

    def round(self) -> None:
        accepted = [self.random.randrange(DRAFTS) for _ in PROMPTS]
        chains = torch.stack([self.tokens[b, n : n + DRAFTS] for b, n in enumerate(self.lens)])
        for b, right in enumerate(accepted):
            chains[b, right + 1 :] = (chains[b, right + 1 :] + 1) % VOCABULARY
        committed = [right + 1 for right in accepted]
        self.draft_chain(chains, committed)
        self.verify(chains, committed)
        self.lens = [n + q for n, q in zip(self.lens, committed, strict=True)]
        self.draft_extend(chains, committed)

    def draft_chain(self, chains: torch.Tensor, right: list[int]) -> None:
        """All draft steps from one call of the multi-step backend."""
        world, size = self.draft.world, len(PROMPTS)
        before = world.batch(ForwardMode.DECODE, [1] * size, self.lens)
        self.steps.init_forward_metadata(before)
        for step, backend in enumerate(self.steps.attn_backends):
            lens = [n + step + 1 for n in self.lens]
            batch = world.batch(ForwardMode.DECODE, [1] * size, lens)
            assert backend.metadata.nsa_seqlens_expanded.tolist() == lens
            hidden = self.draft(chains[:, step], batch, backend)
            first = [n + step for n in self.lens]
            holds = [int(step < n) for n in right]
            self.compare(f"draft step {step}", hidden, self.want_draft, [1] * size, first, holds)

    def verify(self, chains: torch.Tensor, right: list[int]) -> None:
        q_lens = [DRAFTS] * len(PROMPTS)
        kv_lens = [n + DRAFTS for n in self.lens]
        rows = chains.flatten()
        hidden = self.run(self.target, ForwardMode.TARGET_VERIFY, q_lens, kv_lens, rows)
        self.compare("verify", hidden, self.want_target, q_lens, self.lens, right)

    def draft_extend(self, chains: torch.Tensor, committed: list[int]) -> None:
        before = [n - q for n, q in zip(self.lens, committed, strict=True)]
        if self.fixed:
            q_lens = [DRAFTS] * len(PROMPTS)
            rows, mode = chains.flatten(), ForwardMode.DRAFT_EXTEND_V2
        else:
            q_lens = committed
            rows = torch.cat([chain[:q] for chain, q in zip(chains, committed, strict=True)])
            mode = ForwardMode.DRAFT_EXTEND
        kv_lens = [n + q for n, q in zip(before, q_lens, strict=True)]
        hidden = self.run(self.draft, mode, q_lens, kv_lens, rows)
        self.compare(mode.name, hidden, self.want_draft, q_lens, before, committed)


@pytest.mark.parametrize("fixed", [False, True], ids=["variable", "fixed"])
def test_fifty_rounds_are_plain_decoding(fixed: bool) -> None:
    speculation = Speculation(seed=3, fixed=fixed)
    speculation.prefill()
    for _ in range(ROUNDS):
        speculation.round()
    assert all(n > 100 for n in speculation.lens)


def test_draft_steps_replay_as_they_start_eagerly() -> None:
    """Growing and shrinking batches over one captured chain; short batches are padded."""
    world = World(requests=5, max_context=100)
    steps = NativeSparseAttnMultiStepBackend(world.backend, 1, 3)
    steps.init_cuda_graph_state(5, 5)
    ones = torch.ones(5, dtype=torch.int64)
    steps.init_forward_metadata_capture_cuda_graph(5, 5, ones, ones, None, ForwardMode.DECODE, None)
    addresses = [backend.metadata.buffers.lengths.data_ptr() for backend in steps.attn_backends]
    for lens in ([9, 80, 3, 7, 1], [4], [50, 2, 8], [1, 1, 1, 1, 97]):
        host = torch.tensor(lens)
        rows = torch.tensor(world.rows[: len(lens)])
        steps.init_forward_metadata_replay_cuda_graph(
            5, rows, host, 0, None, ForwardMode.DECODE, None, host
        )
        for step, backend in enumerate(steps.attn_backends, 1):
            metadata = backend.metadata
            assert metadata.buffers.lengths.data_ptr() == addresses[step - 1]
            padding = [0] * (5 - len(lens))
            assert metadata.nsa_seqlens_expanded.tolist() == [n + step for n in lens] + padding
            assert metadata.max_seq_len_k == max(lens) + step
    shared = {backend.metadata.buffers.table_rows.data_ptr() for backend in steps.attn_backends}
    assert len(shared) == 1
    assert steps.cuda_graph_bytes() == 3 * (4 + 4 + 4) * 5 + (8 + 4) * 5 + 4 * 6


def test_what_a_chain_cannot_do_is_refused() -> None:
    world = World()
    with pytest.raises(ConfigError, match="expected topk 1"):
        NativeSparseAttnMultiStepBackend(world.backend, 2, 3)
    steps = NativeSparseAttnMultiStepBackend(world.backend, 1, 2)
    with pytest.raises(ConfigError, match="init_cuda_graph_state"):
        steps.cuda_graph_bytes()
    steps.init_cuda_graph_state(2, 2)
    ones = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="decodes one row a request"):
        steps.init_forward_metadata_capture_cuda_graph(
            2, 4, ones, ones, None, ForwardMode.TARGET_VERIFY, None
        )


def test_a_replayed_verify_step_attends_like_an_eager_one() -> None:
    """Static buffers, an engine's static input rows, a smaller batch in a larger graph."""
    streams = [make_stream(CONFIG, n, seed=n) for n in (40, 12)]
    outputs = []
    for graph in (False, True):
        world = World()
        world.step(streams, (36, 8), (36, 8), ForwardMode.EXTEND)
        batch: ForwardBatch = world.batch(ForwardMode.TARGET_VERIFY, (4, 4), (40, 12))
        part = parts_of(streams, (4, 4), (40, 12))
        if not graph:
            world.backend.init_forward_metadata(batch)
            outputs.append(run_layer(world.backend, world.layer(0), batch, part))
            continue
        padding = torch.zeros(8, dtype=torch.int64)
        batch.out_cache_loc = torch.cat((batch.out_cache_loc, padding))
        part = parts_of([part, make_stream(CONFIG, 8, seed=0)], (8, 8), (8, 8))
        backend, ones = world.backend, torch.ones(4, dtype=torch.int64)
        backend.init_cuda_graph_state(4, 16)
        mode, spec = ForwardMode.TARGET_VERIFY, batch.spec_info
        backend.init_forward_metadata_capture_cuda_graph(4, 16, ones, ones, None, mode, spec)
        backend.init_forward_metadata_replay_cuda_graph(
            4,
            torch.cat((batch.req_pool_indices, ones[:2])),
            torch.cat((batch.seq_lens, ones[:2].int())),
            0,
            None,
            mode,
            spec,
            batch.seq_lens_cpu,
            batch.out_cache_loc,
        )
        outputs.append(run_layer(backend, world.layer(0), batch, part))
    assert torch.equal(outputs[1][:8], outputs[0])
    assert not outputs[1][8:].any()
