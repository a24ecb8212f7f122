"""How does the demo model run in training, and how is it written to disk?

The modules are those of Transformers' `DeepseekV32ForCausalLM`, plus one multi-token-prediction
layer. Only the forward pass is written out here, because Transformers' own builds a `[T, S]` mask
in every layer and its indexer takes no gradient. Knows nothing of data or optimisers.

Shapes: B sequences, T tokens, S context (= T here), H heads, Hi index heads, R sampled rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

Rope = tuple[Tensor, Tensor]
SELECT_CHUNK = 512
HIDDEN_LOGIT = -1e4
# What Transformers computes from the other fields, and names differently from version to version.
DERIVED_FIELDS = (
    "head_dim",
    "layer_types",
    "mlp_layer_types",
    "qk_head_dim",
    "transformers_version",
)
# What the official checkpoints say beside it, for engines that read it.
OFFICIAL_FIELDS = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def make_config(**overrides: object) -> DeepseekV32Config:
    """The demo's dimensions: 7.5 M parameters with the MTP layer."""
    values: dict[str, object] = {
        "vocab_size": 1536,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 128,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 4,
        "num_nextn_predict_layers": 1,
        **overrides,
    }
    return DeepseekV32Config(**values)


class MtpLayer(nn.Module):
    """DeepSeek-V3's multi-token prediction: (hidden of t, embedding of t+1) -> token t+2."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.enorm = hf.DeepseekV32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = hf.DeepseekV32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = hf.DeepseekV32DecoderLayer(config, config.num_hidden_layers - 1)
        self.norm = hf.DeepseekV32RMSNorm(config.hidden_size, config.rms_norm_eps)


class DemoModel(nn.Module):
    """The causal model and its MTP layer; embedding and head are shared by both."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.config = config
        self.causal = DeepseekV32ForCausalLM(config)
        self.mtp = MtpLayer(config)
        for name, parameter in self.mtp.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.initializer_range)
            else:
                (nn.init.zeros_ if name.endswith("bias") else nn.init.ones_)(parameter)

    def blocks(self) -> list[nn.Module]:
        """All decoder layers, the MTP layer's last."""
        return [*self.causal.model.layers, self.mtp.block]


@dataclass
class Output:
    """What a forward pass gives back."""

    logits: Tensor  # [B, T, V]
    mtp_logits: Tensor | None  # [B, T, V]; row t predicts token t+2
    indexer_loss: Tensor  # mean KL over layers and sampled rows; 0 without rows
    expert_load: list[Tensor]  # tokens per expert, one [E] per MoE layer


def forward(
    net: DemoModel,
    ids: Tensor,
    *,
    topk: int | None = None,
    rows: Tensor | None = None,
    with_mtp: bool = True,
) -> Output:
    """Runs `ids` [B, T]. `topk` None is dense; `rows` [B, R] teach the indexer."""
    model = net.causal.model
    x = model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rope = model.rotary_emb(x, positions)
    losses: list[Tensor] = []
    loads: list[Tensor] = []
    for layer in model.layers:
        x = decoder_layer(layer, x, rope, topk, rows, losses, loads)
    hidden = norm(model.norm, x)
    mtp_logits = None
    if with_mtp:
        following = model.embed_tokens(ids.roll(-1, dims=1))
        pair = torch.cat([norm(net.mtp.enorm, following), norm(net.mtp.hnorm, hidden)], dim=-1)
        y = decoder_layer(net.mtp.block, net.mtp.eh_proj(pair), rope, topk, rows, losses, loads)
        mtp_logits = net.causal.lm_head(norm(net.mtp.norm, y))
    loss = torch.stack(losses).mean() if losses else x.new_zeros(())
    return Output(net.causal.lm_head(hidden), mtp_logits, loss, loads)


def decoder_layer(
    layer: nn.Module,
    x: Tensor,
    rope: Rope,
    topk: int | None,
    rows: Tensor | None,
    losses: list[Tensor],
    loads: list[Tensor],
) -> Tensor:
    """One decoder layer on `x` [B, T, D]; appends its indexer loss and expert load."""
    x = x + attend(layer.self_attn, norm(layer.input_layernorm, x), rope, topk, rows, losses)
    h = norm(layer.post_attention_layernorm, x)
    if isinstance(layer.mlp, hf.DeepseekV32MoE):
        return x + mixture(layer.mlp, h, loads)
    return x + layer.mlp(h)


def norm(module: nn.Module, x: Tensor) -> Tensor:
    return functional.rms_norm(
        x.float(), module.weight.shape, module.weight, module.variance_epsilon
    )


def mixture(moe: nn.Module, x: Tensor, loads: list[Tensor]) -> Tensor:
    """The routed and shared experts; all routed experts run as one wide MLP with gated columns."""
    experts = moe.experts
    with torch.autocast(x.device.type, enabled=False):
        _, weights, chosen = moe.gate(x.float())
    gates = torch.zeros(weights.shape[0], experts.num_experts, device=x.device)
    gates = gates.scatter(1, chosen, weights)  # [N, E]
    loads.append((gates.detach() > 0).sum(0))
    flat = x.reshape(-1, x.shape[-1])
    gate_up = functional.linear(flat, experts.gate_up_proj.flatten(0, 1))
    gate, up = gate_up.view(-1, experts.num_experts, 2, experts.intermediate_dim).unbind(2)
    act = functional.silu(gate) * up * gates[..., None].to(up.dtype)  # [N, E, I]
    routed = functional.linear(act.flatten(1), experts.down_proj.transpose(0, 1).flatten(1))
    return routed.view(x.shape) + moe.shared_experts(x)


def attend(
    attn: nn.Module,
    x: Tensor,
    rope: Rope,
    topk: int | None,
    rows: Tensor | None,
    losses: list[Tensor],
) -> Tensor:
    """Latent attention over the causal context, or over the indexer's top `topk` of it."""
    batch, length, _ = x.shape
    q_resid = norm(attn.q_a_layernorm, attn.q_a_proj(x))
    q = attn.q_b_proj(q_resid).view(batch, length, attn.num_heads, -1).transpose(1, 2)
    latent, k_rope = attn.kv_a_proj_with_mqa(x).split(
        [attn.kv_lora_rank, attn.qk_rope_head_dim], dim=-1
    )
    kv = attn.kv_b_proj(norm(attn.kv_a_layernorm, latent))
    kv = kv.view(batch, length, attn.num_heads, -1).transpose(1, 2)
    k_nope, v = kv.split([attn.qk_nope_head_dim, attn.v_head_dim], dim=-1)
    q_nope, q_rope = q.split([attn.qk_nope_head_dim, attn.qk_rope_head_dim], dim=-1)
    cos, sin = (table.to(q.dtype) for table in rope)
    q_rope, k_rope = hf.apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], cos, sin)
    q = torch.cat([q_nope, q_rope], dim=-1)  # [B, H, T, D]
    k = torch.cat([k_nope, k_rope.expand(-1, attn.num_heads, -1, -1)], dim=-1)
    selected = None if topk is None else select(attn.indexer, x, q_resid, (cos, sin), topk)
    if rows is not None:
        losses.append(indexer_loss(attn, x, q_resid, q, k, (cos, sin), rows, selected))
    out = functional.scaled_dot_product_attention(
        q,
        k,
        functional.pad(v, (0, q.shape[-1] - v.shape[-1])),
        attn_mask=None if selected is None else selected[:, None],
        is_causal=selected is None,
        scale=attn.scaling,
    )[..., : attn.v_head_dim]
    return attn.o_proj(out.transpose(1, 2).flatten(2))


def index_keys(indexer: nn.Module, x: Tensor, rope: Rope) -> Tensor:
    """The indexer's keys [B, S, Di]."""
    keys = indexer.k_norm(indexer.wk(x)).to(rope[0].dtype)
    turned, rest = keys.split([indexer.qk_rope_head_dim, rest_of(indexer)], dim=-1)
    return torch.cat([half_split_rope(turned, *rope), rest], dim=-1)


def index_queries(
    indexer: nn.Module, x: Tensor, q_resid: Tensor, rope: Rope
) -> tuple[Tensor, Tensor]:
    """The queries [B, R, Hi, Di] and fp32 head weights [B, R, Hi], both scalings in."""
    queries = indexer.wq_b(q_resid).view(*x.shape[:2], indexer.n_heads, indexer.head_dim)
    turned, rest = queries.split([indexer.qk_rope_head_dim, rest_of(indexer)], dim=-1)
    cos, sin = (table[:, :, None] for table in rope)
    queries = torch.cat([half_split_rope(turned, cos, sin), rest], dim=-1)
    with torch.autocast(x.device.type, enabled=False):
        weights = functional.linear(x.float(), indexer.weights_proj.weight)
    return queries, weights * (indexer.n_heads * indexer.head_dim) ** -0.5


def rest_of(indexer: nn.Module) -> int:
    return indexer.head_dim - indexer.qk_rope_head_dim


def half_split_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + hf.rotate_half(x) * sin


def index_logits(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`sum_h weights[r, h] * relu(queries[r, h] . keys[s])`, [B, R, S] fp32."""
    scores = queries.flatten(1, 2) @ keys.transpose(1, 2)
    return weigh(scores.view(*queries.shape[:3], -1), weights)


def weigh(scores: Tensor, weights: Tensor) -> Tensor:
    return (scores.float().relu() * weights[..., None]).sum(2)


@torch.no_grad()
def select(indexer: nn.Module, x: Tensor, q_resid: Tensor, rope: Rope, topk: int) -> Tensor:
    """True where a row may look: its `topk` best causal positions, [B, T, S] bool."""
    length = x.shape[1]
    keys = index_keys(indexer, x, rope)
    position = torch.arange(length, device=x.device)
    selected = torch.zeros(x.shape[0], length, length, dtype=torch.bool, device=x.device)
    for start in range(0, length, SELECT_CHUNK):
        stop = min(start + SELECT_CHUNK, length)
        part = slice(start, stop)
        tables = (rope[0][:, part], rope[1][:, part])
        queries, weights = index_queries(indexer, x[:, part], q_resid[:, part], tables)
        logits = index_logits(queries, weights, keys[:, :stop])
        causal = position[:stop] <= position[part, None]
        best = logits.masked_fill(~causal, -torch.inf).topk(min(topk, stop), dim=-1).indices
        chunk = torch.zeros_like(logits, dtype=torch.bool).scatter_(2, best, True)
        selected[:, part, :stop] = chunk & causal
    return selected


def indexer_loss(
    attn: nn.Module,
    x: Tensor,
    q_resid: Tensor,
    q: Tensor,
    k: Tensor,
    rope: Rope,
    rows: Tensor,
    selected: Tensor | None,
) -> Tensor:
    """KL(attention summed over heads || softmax of the index logits), mean over the sampled rows.

    Both run over the selected positions, or over the causal context when nothing is selected yet.
    The indexer's input and its target are detached: this loss trains the indexer alone.
    """
    x, q_resid = x.detach(), q_resid.detach()
    if selected is None:
        visible = torch.arange(x.shape[1], device=x.device) <= rows[..., None]
    else:
        visible = selected.gather(1, rows[..., None].expand(-1, -1, x.shape[1]))  # [B, R, S]
    with torch.no_grad():
        picked = q.gather(2, rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        scores = (picked @ k.transpose(2, 3)).float() * attn.scaling
        target = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).mean(1)
    tables = (rope[0][0][rows], rope[1][0][rows])
    queries, weights = index_queries(
        attn.indexer, take_rows(x, rows), take_rows(q_resid, rows), tables
    )
    logits = index_logits(queries, weights, index_keys(attn.indexer, x, rope))
    log_guess = logits.masked_fill(~visible, HIDDEN_LOGIT).log_softmax(-1)
    return (target * (target.clamp_min(1e-9).log() - log_guess)).sum(-1).mean()


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def compile_parts() -> None:
    """Fuses the one step whose intermediate is large: relu, weigh and sum over index heads."""
    globals()["weigh"] = torch.compile(weigh, dynamic=True)


def official_tensors(net: DemoModel) -> dict[str, Tensor]:
    """All tensors in bf16 under the names of the official DeepSeek-V3.2 checkpoints."""
    last = net.config.num_hidden_layers
    named = dict(net.causal.state_dict())
    for name, tensor in net.mtp.state_dict().items():
        name = name.removeprefix("block.")
        name = "shared_head.norm.weight" if name == "norm.weight" else name
        named[f"model.layers.{last}.{name}"] = tensor
    named[f"model.layers.{last}.embed_tokens.weight"] = named["model.embed_tokens.weight"]
    named[f"model.layers.{last}.shared_head.head.weight"] = named["lm_head.weight"]
    tensors: dict[str, Tensor] = {}
    for name, tensor in named.items():
        for part, value in split_experts(name, tensor):
            dtype = torch.float32 if part.endswith("e_score_correction_bias") else torch.bfloat16
            tensors[part] = value.detach().to("cpu", dtype).clone().contiguous()
    return tensors


def split_experts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Stacked expert weights as one entry an expert and projection; anything else as it is."""
    stem, _, kind = name.rpartition(".experts.")
    if kind == "down_proj":
        return [(f"{stem}.experts.{i}.down_proj.weight", w) for i, w in enumerate(tensor)]
    if kind == "gate_up_proj":
        halves = [zip(("gate_proj", "up_proj"), w.chunk(2), strict=True) for w in tensor]
        return [
            (f"{stem}.experts.{i}.{projection}.weight", w)
            for i, pair in enumerate(halves)
            for projection, w in pair
        ]
    return [(name, tensor)]


def save_model(net: DemoModel, folder: Path) -> None:
    """Writes `model.safetensors`, `config.json` and `generation_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(official_tensors(net), folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in net.config.to_diff_dict().items() if k not in DERIVED_FIELDS}
    config |= OFFICIAL_FIELDS | {"rope_theta": config["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 4, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_model(folder: Path) -> DemoModel:
    """Reads back what `save_model` wrote, into fp32 modules."""
    net = DemoModel(DeepseekV32Config.from_pretrained(folder))
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        own = {
            **net.causal.state_dict(),
            **{f"mtp.{k}": v for k, v in net.mtp.state_dict().items()},
        }
        for name, tensor in own.items():
            official = name
            if name.startswith("mtp."):
                rest = name.removeprefix("mtp.").removeprefix("block.")
                rest = "shared_head.norm.weight" if rest == "norm.weight" else rest
                official = f"model.layers.{net.config.num_hidden_layers}.{rest}"
            parts = [stored[part] for part, _ in split_experts(official, tensor)]
            if len(parts) == 1:
                tensor.copy_(parts[0])
            else:
                tensor.copy_(torch.cat(parts).view(tensor.shape))
    return net
