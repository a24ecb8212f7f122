"""What attach changes, what detach gives back, and everything that is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear

import topkapi
from peers.tiny_models import BY_NAME, prompt, twins
from topkapi.attention.backend import NativeSparseAttnBackend
from topkapi.attention.forward_batch import ForwardBatch, ForwardMode
from topkapi.cache import NSATokenToKVPool, ReqToTokenPool
from topkapi.errors import ConfigError, RequestError, UnsupportedModelError
from topkapi.models.absorbed import AbsorbedWeights
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import compute_logits, run_decoder
from where import DEVICE

pytestmark = pytest.mark.any_device

FAMILY = BY_NAME["deepseek_v32"]
IDS, MASK = prompt([30, 21])


def logits(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=MASK, **options).logits[MASK.bool()]


def attributes(model: Any) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_shared", "axk2"])
def test_detach_gives_the_model_back_to_the_bit(name: str) -> None:
    model, oracle = twins(BY_NAME[name])
    before, expected = attributes(model), logits(model)
    assert topkapi.attach(model) is model
    attached = logits(model)
    assert not torch.equal(attached, expected), "another order of summation shows"
    assert topkapi.detach(model) is model
    assert attributes(model) == before
    assert model.config.to_dict() == oracle.config.to_dict()
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks
    assert torch.equal(logits(model), expected)
    tokens = model.generate(IDS, attention_mask=MASK, max_new_tokens=5)
    assert torch.equal(tokens, oracle.generate(IDS, attention_mask=MASK, max_new_tokens=5))
    topkapi.attach(model)
    assert torch.equal(logits(model), attached)


def test_attaching_twice_or_detaching_what_is_not_attached_is_an_error() -> None:
    model = topkapi.attach(FAMILY.build())
    for same in (model, model.model):
        with pytest.raises(ConfigError, match="attached already"):
            topkapi.attach(same)
    topkapi.detach(model)
    with pytest.raises(ConfigError, match="not attached"):
        topkapi.detach(model)


def test_the_decoder_alone_can_be_attached() -> None:
    model, oracle = twins(FAMILY)
    topkapi.attach(model.model)
    assert (logits(model) - logits(oracle)).abs().max() < 1e-4


def test_a_copied_model_stays_attached_and_independent() -> None:
    model = topkapi.attach(FAMILY.build())
    twin = copy.deepcopy(model)
    topkapi.detach(model)
    assert twin.model.layers[0].self_attn.forward._module is twin.model.layers[0].self_attn
    ours = twin.generate(IDS, attention_mask=MASK, max_new_tokens=5)
    assert torch.equal(ours, model.generate(IDS, attention_mask=MASK, max_new_tokens=5))
    with pytest.raises(ConfigError, match="attached already"):
        topkapi.attach(twin)


def test_an_attached_model_may_change_its_dtype_and_be_saved(tmp_path: Path) -> None:
    model, oracle = twins(FAMILY)
    topkapi.attach(model).to(torch.bfloat16)
    with torch.no_grad():
        out = model(input_ids=IDS, use_cache=True)
    assert out.logits.dtype == torch.bfloat16
    assert out.cache._pool.get_key_buffer(0).dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    saved = type(oracle).from_pretrained(tmp_path)
    assert (logits(saved.float().to(DEVICE)) - logits(oracle)).abs().median() < 0.2
    assert saved.model.layers[0].self_attn.kv_b_proj.weight.dtype == torch.float32


def test_what_is_no_dsa_model_is_refused_by_name() -> None:
    sizes = {"vocab_size": 11, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    with pytest.raises(UnsupportedModelError, match=r"kv_lora_rank.*index_topk"):
        topkapi.attach(LlamaForCausalLM(LlamaConfig(**sizes)))
    model = FAMILY.build()
    with pytest.raises(UnsupportedModelError, match="Sequential"):
        topkapi.attach(nn.Sequential(model))
    del model.model.layers[1].self_attn.indexer.k_norm
    with pytest.raises(UnsupportedModelError, match=r"layer 1 has no indexer\.k_norm"):
        topkapi.attach(model)
    assert "forward" not in vars(model.model.layers[0].self_attn), "a refusal changes nothing"


class Adapter(nn.Module):
    """Stands for an adapter that is not merged: its weight is only the base's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.weight, self.bias = base.weight, None


def test_weights_that_cannot_be_absorbed_are_refused() -> None:
    model = FAMILY.build()
    attention = model.model.layers[2].self_attn
    plain = attention.kv_b_proj
    attention.kv_b_proj = Adapter(plain)
    with pytest.raises(UnsupportedModelError, match="merge adapters"):
        topkapi.attach(model)
    attention.kv_b_proj = copy.deepcopy(plain).to("meta")
    with pytest.raises(UnsupportedModelError, match="one device"):
        topkapi.attach(model)
    attention.kv_b_proj = plain
    attention.forward = attention.forward
    with pytest.raises(UnsupportedModelError, match="someone else"):
        topkapi.attach(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
        ({"rows_at_once": 0}, "rows_at_once"),
        ({"score_budget": 1}, "no option score_budget; known are .*score_budget_bytes"),
        ({"score_budget_bytes": 1}, "at least 65536"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = FAMILY.build()
    with pytest.raises(ConfigError, match=message):
        topkapi.attach(model, **options)
    topkapi.attach(model)


def test_a_named_kernel_is_used_or_refused() -> None:
    model, oracle = twins(FAMILY)
    names = ("prefill_kernel", "decode_kernel", "indexer_kernel")
    topkapi.attach(model, **dict.fromkeys(names, "torch"))
    assert (logits(model) - logits(oracle)).abs().max() < 1e-4
    topkapi.detach(model)
    with pytest.raises(ConfigError, match=r"prefill_kernel: expected one of auto, .* 'nonesuch'"):
        topkapi.attach(model, prefill_kernel="nonesuch")
    topkapi.attach(model, prefill_kernel="fa3")
    with pytest.raises(topkapi.errors.KernelRefusedError, match=r"fa3: (needs sm90|takes bf16)"):
        logits(model)


def test_training_and_gradients_are_refused() -> None:
    model = topkapi.attach(FAMILY.build())
    model.train()
    with pytest.raises(ConfigError, match=r"model\.eval"):
        logits(model)
    model.eval()
    model(input_ids=IDS)
    model.lm_head.weight.requires_grad_(True)
    assert model(input_ids=IDS).logits.requires_grad, "the head alone may be trained"
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="no_grad"):
        model(input_ids=IDS)
    model.model.norm.weight.requires_grad_(False)
    embeds = model.get_input_embeddings()(IDS).requires_grad_(True)
    with pytest.raises(ConfigError, match="no_grad"):
        model(inputs_embeds=embeds)


def test_attention_matrices_and_other_masks_are_refused() -> None:
    model = topkapi.attach(FAMILY.build())
    with pytest.raises(ConfigError, match="output_attentions"):
        logits(model, output_attentions=True)
    wide = torch.zeros(2, 1, 30, 30)
    for mask in (wide, {"indexed_attention": wide}):
        with torch.no_grad(), pytest.raises(RequestError, match="padding mask"):
            model(input_ids=IDS, attention_mask=mask)
    with pytest.raises(ConfigError, match="dsa_step"):
        model.model.layers[0].self_attn(hidden_states=torch.zeros(1, 1, 56))


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_other_caches_are_refused(kind: str) -> None:
    model = topkapi.attach(FAMILY.build())
    with pytest.raises(ConfigError, match=kind):
        model.generate(IDS, cache_implementation=kind, max_new_tokens=2)
    foreign = DynamicCache(config=model.config)
    with pytest.raises(ConfigError, match="DynamicCache"):
        model.generate(IDS, cache=foreign, max_new_tokens=2)
    with torch.no_grad(), pytest.raises(ConfigError, match="DynamicCache"):
        model(input_ids=IDS, cache=foreign)


def test_positional_arguments_and_transformers_own_checks_still_work() -> None:
    model, oracle = twins(FAMILY)
    topkapi.attach(model)
    with torch.no_grad():
        ours = model.model(IDS, MASK).last_hidden_state
        theirs = oracle.model(IDS, MASK).last_hidden_state
    assert (ours - theirs)[MASK.bool()].abs().max() < 1e-4
    with pytest.raises(ValueError, match="exactly one"):
        model.model(attention_mask=MASK)


def fp8_projection(plain: nn.Linear, block: int) -> FP8Linear:
    layer = FP8Linear(plain.in_features, plain.out_features, block_size=(block, block)).to(DEVICE)
    scales = torch.empty_like(layer.weight_scale_inv)
    with torch.no_grad():
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scales[i, j] = plain.weight[at].abs().max() / 448
                quantized = plain.weight[at] / scales[i, j]
                layer.weight[at] = quantized.to(torch.float8_e4m3fn)
        layer.weight_scale_inv.copy_(scales)
    return layer.requires_grad_(False)


def test_an_fp8_projection_is_dequantised_once_and_again_when_it_changes() -> None:
    plain = FAMILY.build().model.layers[0].self_attn.kv_b_proj
    quantized = fp8_projection(plain, 32)
    nope, value = 20, 28
    absorbed = AbsorbedWeights(quantized, nope, value)
    w_kc, w_vc = absorbed.halves(torch.float32)
    exact_kc, exact_vc = AbsorbedWeights(plain, nope, value).halves(torch.float32)
    assert exact_kc.untyped_storage().data_ptr() == plain.weight.untyped_storage().data_ptr()
    for got, exact in ((w_kc, exact_kc), (w_vc, exact_vc)):
        assert 1e-4 < ((got - exact).norm() / exact.norm()) < 0.05
    assert absorbed.halves(torch.float32)[0].data_ptr() == w_kc.data_ptr()
    with torch.no_grad():
        quantized.weight.copy_(torch.ones_like(quantized.weight))
    assert not torch.equal(absorbed.halves(torch.float32)[0], w_kc)
    quantized.weight.data = torch.zeros_like(quantized.weight)
    assert absorbed.halves(torch.float32)[0].abs().max() == 0
    assert absorbed.halves(torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_model_with_fp8_projections_is_near() -> None:
    model, oracle = twins(FAMILY)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = fp8_projection(layer.self_attn.kv_b_proj, 128)
    topkapi.attach(model)
    assert 1e-4 < (logits(model) - logits(oracle)).abs().median() < 0.3


def flat_step(model: Any, lengths: list[int]) -> tuple[DsaStep, torch.Tensor]:
    """What an engine sets up: pools, a table, one batch, and the flattened positions."""
    config = topkapi.DsaConfig.from_hf(model.config)
    pool = NSATokenToKVPool(config, 1 + len(lengths), kv_cache_dtype="fp32", device=DEVICE)
    table = ReqToTokenPool(len(lengths), 64, DEVICE)
    rows = table.alloc(len(lengths))
    for page, row in enumerate(reversed(rows), start=1):
        table.req_to_token[row] = torch.arange(64) + 64 * page
    batch = ForwardBatch.from_lengths(ForwardMode.EXTEND, lengths, lengths, rows, table, pool)
    backend = NativeSparseAttnBackend(
        config, req_to_token_pool=table, token_to_kv_pool=pool, device=DEVICE
    )
    backend.init_forward_metadata(batch)
    return DsaStep(backend, batch), batch.positions


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_shared", "axk2"])
@pytest.mark.parametrize("attached", [False, True])
def test_an_engine_runs_flattened_requests(name: str, attached: bool) -> None:
    model, oracle = twins(BY_NAME[name])
    if attached:
        topkapi.attach(model)
    lengths = [17, 1, 60]
    ids = [prompt([length], seed=length)[0][0] for length in lengths]
    step, positions = flat_step(model, lengths)
    hidden = run_decoder(model, torch.cat(ids), positions, step)
    assert hidden.shape == (sum(lengths), 56)
    got = compute_logits(model, hidden).split(lengths)
    with torch.no_grad():
        for request, answer in zip(ids, got, strict=True):
            expected = oracle(input_ids=request[None]).logits[0]
            assert (answer - expected).abs().max() < 1e-4
    if not attached:
        assert torch.equal(logits(model), logits(oracle)), "without a step it is Transformers' own"
