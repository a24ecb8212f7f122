"""Two or three random DSA layers as a language model, enough to have hidden states to compare.

A row's hidden state depends on its token, its position and what it attends to. No rope: positions
are embedded.
"""

from __future__ import annotations

import torch

from attention.world import World
from topkapi.attention import ForwardBatch
from topkapi.attention.layer_forward import LayerForward

VOCABULARY = 50


class TinyModel:
    """Random weights over the layers of a world's config."""

    def __init__(self, world: World, seed: int) -> None:
        config = world.config
        draw = torch.Generator().manual_seed(seed)
        self.world = world
        self.width = 20

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw) / shape[0] ** 0.5

        self.tokens = torch.randn(VOCABULARY, self.width, generator=draw)
        self.positions = torch.randn(world.max_context + 8, self.width, generator=draw)
        heads, index_heads = config.num_attention_heads, config.index_n_heads
        self.layers = [
            {
                "q": weight(self.width, heads * config.latent_width),
                "kv": weight(self.width, config.latent_width),
                "index_q": weight(self.width, index_heads * config.index_head_dim),
                "index_k": weight(self.width, config.index_head_dim),
                "weights": weight(self.width, index_heads),
                "out": weight(heads * config.kv_lora_rank, self.width),
            }
            for _ in range(config.num_hidden_layers)
        ]

    def __call__(
        self, tokens: torch.Tensor, batch: ForwardBatch, backend: LayerForward
    ) -> torch.Tensor:
        """`tokens [R]` at `batch.positions` to hidden states `[R, width]`."""
        config = self.world.config
        x = self.tokens[tokens] + self.positions[batch.positions]
        for layer_id, weights in enumerate(self.layers):
            index = None
            if config.owns_indexer(layer_id):
                index_q = (x @ weights["index_q"]).view(
                    -1, config.index_n_heads, config.index_head_dim
                )
                index = backend.forward_indexer(
                    index_q, x @ weights["index_k"], x @ weights["weights"], layer_id, batch
                )
            q = (x @ weights["q"]).view(len(x), config.num_attention_heads, config.latent_width)
            kv = (x @ weights["kv"])[:, None]
            layer = self.world.layer(layer_id)
            out = backend.forward(q, kv, None, layer, batch, topk_indices=index)
            x = x + torch.tanh(out @ weights["out"])
        return x
