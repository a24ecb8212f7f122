"""Loading is held against the model that was saved; a fault must name its tensor or file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peers.tiny_models import BY_NAME, prompt
from topkapi.errors import CheckpointError, ConfigError, ShapeError, UnsupportedModelError
from topkapi.models.block_fp8 import dequantize_blocks
from topkapi.models.checkpoint import BlockFp8Tensor
from topkapi.models.loading import load_model, load_tokenizer

FAMILY = BY_NAME["deepseek_v32"]
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
WIDE = {"hidden_size": 200, "intermediate_size": 300, "kv_lora_rank": 136, "qk_nope_head_dim": 44}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    model = FAMILY.build()
    model.save_pretrained(tmp_path)
    return tmp_path, model


def edit(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def quantize(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block in a plain loop: e4m3 values and their scales, edges short."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block), -(-columns // block))
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def quantize_checkpoint(tensors: dict[str, torch.Tensor]) -> None:
    """What DeepSeek's checkpoints quantise: every matrix of attention and mlp but the router."""
    for name in list(tensors):
        kept = ("norm", "embed", "lm_head", "mlp.gate.", "weights_proj", "bias")
        if not any(word in name for word in kept):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name])


def logits(model: Any) -> torch.Tensor:
    ids, _ = prompt([40])
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_a_saved_model_comes_back_bit_for_bit(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    loaded = load_model(directory, device="cpu")
    assert not loaded.training
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["glm_shared", "axk2"])
def test_every_family_comes_back_in_the_dtype_asked_for(tmp_path: Path, name: str) -> None:
    model = BY_NAME[name].build()
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = load_model(tmp_path, dtype="bf16", device="cpu")
    assert loaded.dtype == torch.bfloat16
    for key, value in loaded.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[key].to(value.dtype), rtol=0, atol=0)


def test_block_fp8_loads_at_sizes_that_are_no_multiple_of_the_block(tmp_path: Path) -> None:
    model = FAMILY.build(**WIDE)
    model.save_pretrained(tmp_path)
    edit(tmp_path, quantize_checkpoint)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    edit_config(tmp_path, quantization_config=quantization)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored[KV_B].dtype == torch.float8_e4m3fn
    assert list(stored[f"{KV_B}_scale_inv"].shape) == [2, 2]
    loaded = load_model(tmp_path, dtype="fp32", device="cpu")
    got, original = loaded.state_dict()[KV_B], model.state_dict()[KV_B]
    assert 1e-4 < ((got - original).norm() / original.norm()) < 0.05
    exact = dequantize_blocks(stored[KV_B], stored[f"{KV_B}_scale_inv"], dtype=torch.float32)
    torch.testing.assert_close(got, exact, rtol=0, atol=0)
    assert not hasattr(loaded.config, "quantization_config")
    assert logits(loaded).isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (192, 256), (576, 200)])
def test_dequantised_blocks_match_a_loop(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    values, scales = quantize(weight)
    got = dequantize_blocks(values, scales, dtype=torch.float32)
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 2)):
        expected = values[row, column].float() * scales[row // 128, column // 128]
        assert got[row, column] == expected
    assert ((got - weight).norm() / weight.norm()) < 0.05


WINDOWS = [
    (slice(0, 96), slice(0, 300)),
    (slice(96, 192), slice(130, 260)),
    (slice(127, 129), slice(None)),
    (slice(190, None), slice(299, 300)),
    (slice(5, 120, 3), slice(0, 256, 2)),
    (slice(7, 7), slice(0, 10)),
    (slice(130, 140),),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window_of_an_fp8_tensor_has_the_bits_of_the_whole(window: tuple[slice, ...]) -> None:
    weight = torch.randn(192, 300, generator=torch.Generator().manual_seed(8))
    read: list[int] = []

    class Counted:
        """A stored tensor that notes how much of it is read."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def get_shape(self) -> list[int]:
            return list(self.tensor.shape)

        def __getitem__(self, index: Any) -> torch.Tensor:
            read.append(self.tensor[index].numel())
            return self.tensor[index]

    values, scales = quantize(weight)
    stored = BlockFp8Tensor(Counted(values), Counted(scales), (128, 128), torch.float32)
    whole = stored[...]
    read.clear()
    assert torch.equal(stored[window], whole[window])
    rows = window[0].indices(192)
    assert read[0] <= (rows[1] - rows[0] // 128 * 128) * 300


def test_dequantising_refuses_scales_that_do_not_fit() -> None:
    values, scales = quantize(torch.ones(192, 128))
    with pytest.raises(ShapeError, match=r"expected \[2, 1\]"):
        dequantize_blocks(values, scales[:1])
    ue8m0 = torch.full((2, 1), 0.25).to(torch.float8_e8m0fnu)
    assert dequantize_blocks(values, ue8m0)[0, 0] == 112
    assert dequantize_blocks(values, torch.tensor(0.5), None)[0, 0] == 224


def test_a_missing_tensor_is_named(saved: tuple[Path, Any]) -> None:
    edit(saved[0], lambda tensors: tensors.pop(KV_B))
    with pytest.raises(CheckpointError, match=f"{KV_B} is missing"):
        load_model(saved[0], device="cpu")


def test_a_misshapen_tensor_is_named(saved: tuple[Path, Any]) -> None:
    edit(saved[0], lambda tensors: tensors.update({KV_B: tensors[KV_B][:-1].clone()}))
    with pytest.raises(
        CheckpointError, match=rf"{KV_B} has shape \[143, 40\], expected \[144, 40\]"
    ):
        load_model(saved[0], device="cpu")


def test_a_missing_expert_is_an_error(saved: tuple[Path, Any]) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    edit(saved[0], lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_model(saved[0], device="cpu")


def test_mtp_layers_are_passed_over_and_other_extras_are_not(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    edit(directory, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(4, 4)}))
    loaded = load_model(directory, device="cpu")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    edit(directory, lambda t: t.update({"model.layers.1.self_attn.sinks": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.sinks has no place"):
        load_model(directory, device="cpu")


@pytest.mark.parametrize("fault", ["no scales", "no weight", "bad scales"])
def test_faulty_fp8_pairs_are_named(saved: tuple[Path, Any], fault: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[KV_B], scales = quantize(tensors[KV_B])
        if fault != "no scales":
            tensors[f"{KV_B}_scale_inv"] = scales[:1] if fault == "bad scales" else scales
        if fault == "no weight":
            del tensors[KV_B]

    edit(saved[0], change)
    edit_config(saved[0], quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=KV_B):
        load_model(saved[0], device="cpu")


def test_pickles_are_refused(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    (directory / "model.safetensors").unlink()
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*runs code"):
        load_model(directory, device="cpu")


def test_remote_code_is_refused(saved: tuple[Path, Any]) -> None:
    (saved[0] / "modeling_evil.py").write_text("raise SystemExit('remote code ran')")
    edit_config(
        saved[0],
        model_type="evil",
        auto_map={
            "AutoConfig": "modeling_evil.Config",
            "AutoModelForCausalLM": "modeling_evil.Model",
        },
    )
    with pytest.raises(CheckpointError, match="auto_map"):
        load_model(saved[0], device="cpu")
    edit_config(saved[0], model_type="deepseek_v32")
    assert type(load_model(saved[0], device="cpu")).__module__.startswith("transformers.")


def test_a_truncated_file_is_named(saved: tuple[Path, Any]) -> None:
    path = saved[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(saved[0], device="cpu")


def test_directories_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="local checkpoint directory"):
        load_model(tmp_path / "org" / "name", device="cpu")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="index_topk"):
        load_model(tmp_path, device="cpu")
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_a_field_of_another_type_is_named(saved: tuple[Path, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json and config_overrides: .*'index_topk'"):
        load_model(saved[0], device="cpu", config_overrides={"index_topk": "x"})
    edit_config(saved[0], index_n_heads="many")
    with pytest.raises(CheckpointError, match=r"config\.json: .*'index_n_heads'"):
        load_model(saved[0], device="cpu")


def test_an_index_may_not_point_outside_its_directory(saved: tuple[Path, Any]) -> None:
    index = {"weight_map": {KV_B: "../../other.safetensors"}}
    (saved[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="plain file name"):
        load_model(saved[0], device="cpu")


def test_options_are_checked(saved: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        load_model(saved[0], dtype="int4", device="cpu")
    with pytest.raises(ConfigError, match="accelerate"):
        load_model(saved[0], device="cpu", quantization="keep")
