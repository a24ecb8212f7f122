"""The MTP layer of a checkpoint, against the same layer by Transformers' own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.drafting import split_experts
from peers.tiny_models import BY_NAME
from topkapi.attention import ForwardBatch, ForwardMode, NativeSparseAttnBackend
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.errors import CheckpointError, UnsupportedModelError
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import install
from topkapi.models.loading import load_model
from topkapi.models.mtp import MtpLayer, load_mtp

TOKENS = 41  # well past index_topk


class Reference:
    """The layer in fp32 by Transformers' own modules, masks and all."""

    def __init__(self, family: str) -> None:
        self.model = BY_NAME[family].build()
        config = self.model.config
        hidden = config.hidden_size
        # The family's decoder layer, one that owns an indexer and has experts; other weights.
        whole = BY_NAME[family].build()
        types = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        number = max(i for i, kind in enumerate(types) if kind == "full")
        self.layer: Any = whole.model.layers[number]
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.norms = {name: torch.rand(hidden, generator=generator) + 0.5 for name in "ehs"}
        self.head: torch.Tensor = self.model.lm_head.weight.detach()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under official names."""
        own = {
            "enorm.weight": self.norms["e"],
            "hnorm.weight": self.norms["h"],
            "eh_proj.weight": self.eh_proj.weight.detach(),
            "shared_head.norm.weight": self.norms["s"],
            "shared_head.head.weight": self.head,
            "embed_tokens.weight": self.model.model.embed_tokens.weight.detach(),
            **split_experts(self.layer.state_dict()),
        }
        number = self.model.config.num_hidden_layers
        return {f"model.layers.{number}.{k}": v.clone().contiguous() for k, v in own.items()}

    def save(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.model.save_pretrained(path)
        stored = load_file(path / "model.safetensors")
        save_file(stored | tensors, path / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def logits(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        decoder, eps = self.model.model, self.model.config.rms_norm_eps

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return nn.functional.rms_norm(x, x.shape[-1:], self.norms[name], eps)

        pair = torch.cat((norm(decoder.embed_tokens(token_ids), "e"), norm(hidden, "h")), dim=-1)
        x = self.eh_proj(pair)[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), -torch.inf).triu(1)
        out = self.layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=decoder.rotary_emb(x, position_ids=positions),
            cache=None,
            use_cache=False,
        )
        out = out[0] if isinstance(out, tuple) else out
        return norm(out[0], "s") @ self.head.T


def run(mtp: MtpLayer, config: Any, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of the layer on the backend: a prompt, then two tokens, then one."""
    size, layers = len(token_ids), range(config.num_hidden_layers + 1)
    rows = ReqToTokenPool(1, size)
    rows.req_to_token[0] = torch.arange(8, 8 + size)
    pool = NSATokenToKVPool(config, 9, page_size=8, kv_cache_dtype="fp32", layers=layers)
    backend = NativeSparseAttnBackend(config, req_to_token_pool=rows, token_to_kv_pool=pool)
    parts, start = [], 0
    for mode, end in (
        (ForwardMode.EXTEND, size - 3),
        (ForwardMode.DRAFT_EXTEND, size - 1),
        (ForwardMode.DECODE, size),
    ):
        batch = ForwardBatch.from_lengths(mode, [end - start], [end], [0], rows, pool)
        backend.init_forward_metadata(batch)
        step = DsaStep(backend, batch)
        part = slice(start, end)
        parts.append(mtp.logits(mtp.run(token_ids[part], hidden[part], batch.positions, step)))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize("family", [name for name in BY_NAME if "axk2" not in name])
def test_logits_are_those_of_transformers_own_layer(tmp_path: Path, family: str) -> None:
    reference = Reference(family)
    reference.save(tmp_path, reference.tensors())
    model = load_model(tmp_path, "fp32", "cpu")
    config = install(model)
    mtp = load_mtp(model, config)
    assert mtp.layer_id == config.num_hidden_layers
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(0, model.config.vocab_size, (TOKENS,), generator=generator)
    hidden = torch.randn(TOKENS, model.config.hidden_size, generator=generator)
    got = run(mtp, config, token_ids, hidden)
    torch.testing.assert_close(got, reference.logits(token_ids, hidden), atol=2e-4, rtol=2e-4)
    # Repeated in the checkpoint, embedding and head are the model's own.
    assert mtp._parts["head"] is model.get_output_embeddings()
    assert mtp._parts["embedding"] is model.get_input_embeddings()


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    reference = Reference("deepseek_v32")
    reference.head = reference.head * 2
    reference.save(tmp_path, reference.tensors())
    model = load_model(tmp_path, "fp32", "cpu")
    config = install(model)
    mtp = load_mtp(model, config)
    token_ids, hidden = torch.arange(TOKENS), torch.ones(TOKENS, model.config.hidden_size)
    got = run(mtp, config, token_ids, hidden)
    torch.testing.assert_close(got, reference.logits(token_ids, hidden), atol=4e-4, rtol=4e-4)


def test_faulty_layers_are_named(tmp_path: Path) -> None:
    reference = Reference("deepseek_v32")
    number = reference.model.config.num_hidden_layers
    prefix = f"model.layers.{number}."
    tensors = reference.tensors()

    def load(changed: dict[str, torch.Tensor], name: str) -> None:
        path = tmp_path / name
        reference.save(path, changed)
        model = load_model(path, "fp32", "cpu")
        load_mtp(model, install(model))

    with pytest.raises(UnsupportedModelError, match="no MTP layer"):
        load({}, "none")
    without = {k: v for k, v in tensors.items() if not k.endswith("hnorm.weight")}
    with pytest.raises(CheckpointError, match=prefix + "hnorm.weight"):
        load(without, "hnorm")
    without = {k: v for k, v in tensors.items() if not k.endswith("indexer.wk.weight")}
    with pytest.raises(CheckpointError, match=r"indexer.wk.weight is missing"):
        load(without, "indexer")
    with pytest.raises(CheckpointError, match=r"eh_proj.weight of the MTP layer: expected shape"):
        load({**tensors, prefix + "eh_proj.weight": torch.ones(3, 3)}, "shape")
    with pytest.raises(UnsupportedModelError, match="local directory"):
        load_mtp(reference.model, install(reference.model))
