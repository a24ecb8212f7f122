"""The attention backend an engine embeds: one step's metadata, then every layer over it.

Method names and argument orders are the reference's (`NativeSparseAttnBackend`). What a mode means
is `forward_batch`, the formula `step_metadata`, a layer's work `layer_forward`; this file wires
them to the three ways a step starts: eagerly, at a graph's capture, at its replay.
"""

from __future__ import annotations

import torch

from topkapi.attention.forward_batch import (
    ForwardBatch,
    ForwardMode,
    SpecInfo,
    StepLengths,
    graph_lengths_of,
    lengths_of,
    longest,
)
from topkapi.attention.graph import SEQ_LEN_FILL_VALUE, GraphState
from topkapi.attention.layer_forward import LayerForward
from topkapi.attention.metadata import NSAMetadata, build_metadata
from topkapi.attention.step_metadata import StepBuffers
from topkapi.errors import ConfigError


class NativeSparseAttnBackend(LayerForward):
    """DeepSeek Sparse Attention over paged pools. Two of them in one process share no state."""

    _graphs: GraphState | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Start an eager step. Reads host fields of the batch; never synchronises."""
        self.forward_metadata = self._build(lengths_of(batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Set the largest graph that may be captured; forgets graphs captured before."""
        self._graphs = GraphState(max_bs, max_num_tokens)

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
        """Make the buffers of one graph, and start a step over them.

        Host bounds are those of any replay: contexts as long as the request table is wide. Raises
        `ConfigError` above the limits, or for a mode whose lengths a graph cannot know (EXTEND).
        """
        _no_encoder(encoder_lens)
        (buffers,) = self._graph_state.add(forward_mode, bs, num_tokens, self.device)
        lengths = graph_lengths_of(
            forward_mode,
            bs=bs,
            num_tokens=num_tokens,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            spec_info=spec_info,
            max_kv=self.req_to_token_pool.max_context_len,
        )
        self.forward_metadata = self._build(lengths, buffers)

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
        """Refill every element of a captured graph's buffers; nothing of an earlier replay stays.

        `bs` is the captured batch size. Tensors shorter than it leave the remaining requests inert,
        and so does slot 0 in `out_cache_loc [T]`; without either, padding requests read one token.
        Host bounds are this batch's, for an eager run over the buffers: a graph keeps those of its
        capture. Raises `ConfigError` when nothing was captured for this mode and size.
        """
        _no_encoder(encoder_lens)
        (buffers,) = self._graph_state.of(forward_mode, bs)
        host = None if seq_lens_cpu is None else seq_lens_cpu[:bs]
        drafts = buffers.num_rows // bs if forward_mode.is_target_verify() else 0
        lengths = graph_lengths_of(
            forward_mode,
            bs=bs,
            num_tokens=buffers.num_rows,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            spec_info=spec_info,
            max_kv=longest(host, self.req_to_token_pool, drafts),
            out_cache_loc=out_cache_loc,
        )
        self.forward_metadata = self._build(lengths, buffers)

    @property
    def _graph_state(self) -> GraphState:
        if self._graphs is None:
            raise ConfigError("no graph state: call init_cuda_graph_state(max_bs, max_num_tokens)")
        return self._graphs

    def _build(self, lengths: StepLengths, buffers: StepBuffers | None = None) -> NSAMetadata:
        return build_metadata(
            lengths,
            self.req_to_token_pool.req_to_token,
            topk=self.config.index_topk,
            page_size=self.token_to_kv_pool.page_size,
            buffers=buffers,
        )


def _no_encoder(encoder_lens: torch.Tensor | None) -> None:
    if encoder_lens is not None:
        raise ConfigError("encoder_lens: DSA models have no encoder; pass None")
