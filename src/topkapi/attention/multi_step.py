"""How are the steps of a draft chain started at once?

Draft step i writes position `seq_lens + i` and sees `seq_lens + i + 1` tokens: the decode of the
one builder, with shifted lengths. The steps share addresses (rows of the request table, query
offsets); only their lengths are their own. Chains, not trees: one candidate a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from topkapi.attention.forward_batch import (
    ForwardBatch,
    ForwardMode,
    SpecInfo,
    graph_lengths_of,
    longest,
)
from topkapi.attention.graph import SEQ_LEN_FILL_VALUE, GraphState
from topkapi.attention.layer_forward import LayerForward
from topkapi.attention.metadata import build_metadata
from topkapi.attention.step_metadata import StepBuffers, allocate_steps
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.config import BackendOptions, DsaConfig
from topkapi.errors import ConfigError


class DraftRunner(Protocol):
    """What owns the draft model's pools; a `NativeSparseAttnBackend` of the draft model is one."""

    config: DsaConfig
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: NSATokenToKVPool
    device: torch.device
    options: BackendOptions


class NativeSparseAttnMultiStepBackend:
    """Metadata of `speculative_num_steps` draft steps, one builder call each, no N backends.

    Attributes:
        attn_backends: one `LayerForward` a step, over its own metadata.
    """

    def __init__(self, runner: DraftRunner, topk: int, speculative_num_steps: int) -> None:
        """`topk` is the branching of the draft tree. Raises `ConfigError` unless it is 1."""
        if topk != 1 or speculative_num_steps < 1:
            raise ConfigError(
                "NativeSparseAttnMultiStepBackend: expected topk 1 (a chain: sparse attention has "
                f"no tree mask) and at least 1 step, got {topk} and {speculative_num_steps}"
            )
        self.runner = runner
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [
            LayerForward(
                runner.config,
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool=runner.token_to_kv_pool,
                device=runner.device,
                options=runner.options,
            )
            for _ in range(speculative_num_steps)
        ]
        self._graphs: GraphState | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Start all steps eagerly. `batch.seq_lens` counts the tokens before the first of them.
        No synchronisation.
        """
        size, device = batch.batch_size, self.runner.device
        buffers = allocate_steps(self.speculative_num_steps, size, size, device)
        max_kv = longest(batch.seq_lens_cpu, batch.req_to_token_pool, 0)
        self._start(buffers, batch.req_pool_indices, batch.seq_lens, max_kv)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Set the largest graph that may be captured; forgets graphs captured before."""
        self._graphs = GraphState(max_bs, max_num_tokens, self.speculative_num_steps)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """What to fill `seq_lens` with for requests that only pad a graph."""
        return SEQ_LEN_FILL_VALUE

    def cuda_graph_bytes(self) -> int:
        """Bytes of static metadata that all captured graphs hold."""
        return self._graph_state.nbytes

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
    ) -> None:
        """Make the buffers of one graph over all steps, and start them; see the backend's.

        A draft step has one row a request: `num_tokens` must be `bs`, and the mode DECODE.
        """
        _check_call(bs, num_tokens, encoder_lens, forward_mode)
        buffers = self._graph_state.add(forward_mode, bs, bs, self.runner.device)
        max_kv = self.runner.req_to_token_pool.max_context_len
        self._start(buffers, req_pool_indices, seq_lens, max_kv)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
        seq_lens_cpu: torch.Tensor | None,
        out_cache_loc: torch.Tensor | None = None,
    ) -> None:
        """Refill the buffers of all steps; see the backend's. `out_cache_loc [bs]` are the first
        step's slots: a request that writes to slot 0 is padding in every step.
        """
        _check_call(bs, bs, encoder_lens, forward_mode)
        buffers = self._graph_state.of(forward_mode, bs)
        host = None if seq_lens_cpu is None else seq_lens_cpu[:bs]
        max_kv = longest(host, self.runner.req_to_token_pool, 0)
        self._start(buffers, req_pool_indices, seq_lens, max_kv, out_cache_loc)

    @property
    def _graph_state(self) -> GraphState:
        if self._graphs is None:
            raise ConfigError("no graph state: call init_cuda_graph_state(max_bs, max_num_tokens)")
        return self._graphs

    def _start(
        self,
        buffers: list[StepBuffers],
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        max_kv: int,
        out_cache_loc: torch.Tensor | None = None,
    ) -> None:
        """Build step i with every kv length raised by i + 1."""
        runner, size = self.runner, buffers[0].num_requests
        lengths = graph_lengths_of(
            ForwardMode.DECODE,
            bs=size,
            num_tokens=size,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            spec_info=None,
            max_kv=max_kv,
            out_cache_loc=out_cache_loc,
        )
        width = runner.req_to_token_pool.max_context_len
        for step, (backend, own) in enumerate(zip(self.attn_backends, buffers, strict=True), 1):
            backend.forward_metadata = build_metadata(
                replace(lengths, kv_shift=step, max_kv=min(max_kv + step, width)),
                runner.req_to_token_pool.req_to_token,
                topk=runner.config.index_topk,
                page_size=runner.token_to_kv_pool.page_size,
                buffers=own,
            )


def _check_call(
    bs: int, num_tokens: int, encoder_lens: torch.Tensor | None, mode: ForwardMode
) -> None:
    if num_tokens != bs or encoder_lens is not None or not mode.is_decode_or_idle():
        raise ConfigError(
            "a draft step decodes one row a request, without an encoder; got "
            f"{num_tokens} rows of {bs} requests in {mode.name}"
        )
