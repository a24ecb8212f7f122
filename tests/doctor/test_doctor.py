"""The doctor's report: on this machine, on an H200 that is not there, and for a checkpoint."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from engine.conftest import make_model, make_tokenizer
from topkapi import ops
from topkapi.cache import NSATokenToKVPool
from topkapi.config import DsaConfig
from topkapi.device import DeviceInfo
from topkapi.doctor import DoctorReport, examine, report
from topkapi.doctor.choices import DEEPSEEK_V32, STEPS, Step, choices, problems
from topkapi.doctor.memory import Budget, cache_costs, tokens_within
from topkapi.doctor.tables import print_report
from topkapi.errors import CheckpointError, ConfigError, UnsupportedModelError
from topkapi.kernels.external import aiter, topk_vllm
from topkapi.layout import PAGE_SIZE

H200 = DeviceInfo("cuda", 90, "NVIDIA H200", 132, 232448, True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor")
    make_model(len(make_tokenizer())).save_pretrained(path)
    return path


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report's view of the machine is an H200 with 100 GB free."""
    monkeypatch.setattr(report, "device_info", lambda device: H200)
    monkeypatch.setattr(report, "free_memory", lambda device: 100 * 10**9)


def text_of(found: DoctorReport) -> str:
    console = Console(width=160, file=io.StringIO())
    print_report(found, console)
    return console.file.getvalue()


def test_every_operation_has_a_choice_on_a_cpu() -> None:
    found = examine("cpu")
    assert {choice.op for choice in found.auto} == set(ops.__all__)
    assert {(choice.phase, choice.rows) for choice in found.auto} == {
        (step.phase, step.rows) for step in STEPS
    }
    assert all((choice.kernel, choice.reason) == ("torch", None) for choice in found.auto)
    assert found.heads == 128
    assert found.model is None
    assert found.budget is None
    assert all(cost.tokens is None for cost in found.cache)


@pytest.mark.usefixtures("on_h200")
def test_an_h200_that_is_not_there() -> None:
    found = examine("cpu", "fp8", heads=8)
    assert found.device == H200
    for phase, kernels in found.kernels.items():
        by_name = {item.kernel: item for item in kernels["sparse_mla"]}
        assert by_name["torch"].reason is None, phase
        assert by_name["tilelang"].reason is not None, phase
        assert by_name["triton"].padded_heads == 8, phase
    taken = {choice.kernel for choice in found.auto if choice.op == "sparse_mla"}
    assert taken <= {item.kernel for item in found.kernels["prefill"]["sparse_mla"]}
    assert "torch" not in taken
    text = text_of(found)
    for words in ("NVIDIA H200 (sm90", "8 heads computed beside the 8", "DeepSeek-V3.2's sizes"):
        assert words in text


def test_what_was_never_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would stand on a machine that has the package."""
    for package in (aiter, topk_vllm):
        monkeypatch.setattr(package, "refuse_package", lambda providers: None)
    mi300 = DeviceInfo("hip", "gfx942", "MI300X", 304, 65536, True)
    monkeypatch.setattr(report, "device_info", lambda device: mi300)
    found = examine("cpu", heads=16)
    rows = {item.kernel: item for item in found.kernels["decode"]["sparse_mla"]}
    assert (rows["aiter"].reason, rows["aiter"].auto) == (None, False)
    said = " ".join(text_of(found).split())
    assert "decode: yes, by name; never run: no AMD machine was at hand" in said
    assert {item.note for item in found.kernels["decode"]["topk"]} >= {"", "inexact"}


def test_operations_are_asked_what_a_step_asks() -> None:
    asked = problems(DEEPSEEK_V32, H200, "fp8", Step("decode", 64))
    assert asked["sparse_mla"].num_heads == 128
    assert (asked["sparse_mla"].latent_dim, asked["sparse_mla"].rope_dim) == (512, 64)
    assert asked["sparse_mla"].dtype == torch.bfloat16
    # fp8 keys take fp8 queries where the device multiplies them.
    assert asked["select"].dtype == torch.float8_e4m3fn
    assert (asked["select"].num_heads, asked["select"].index_dim) == (64, 128)
    assert (asked["select"].rows, asked["select"].context) == (64, 65536)
    assert asked["topk"].dtype == torch.float32
    assert {problem.phase for problem in asked.values()} >= {"decode"}
    ampere = replace(H200, arch=80)
    assert problems(DEEPSEEK_V32, ampere, "fp8", STEPS[0])["select"].dtype == torch.bfloat16
    short = replace(DEEPSEEK_V32, max_position_embeddings=4096)
    assert problems(short, H200, "bf16", STEPS[0])["topk"].context == 4096


def test_a_machine_without_a_kernel_says_why() -> None:
    """No kernel takes queries that are no floats of its cache: a reason stands for the name."""
    mps = DeviceInfo("mps", name="mps")
    for choice in choices(DEEPSEEK_V32, mps, "bf16"):
        assert (choice.kernel is None) == (choice.reason is not None)


def test_json_has_only_plain_values(tiny: Path) -> None:
    plain = examine("cpu", model=str(tiny)).to_json()
    assert json.loads(json.dumps(plain))["heads"] == plain["heads"]
    assert set(plain) == {
        "versions", "device", "driver", "memory_bytes", "free_bytes", "model", "config", "dtype",
        "cache_format", "heads", "kernels", "auto", "cache", "budget",
    }  # fmt: skip
    assert set(plain["auto"][0]) == {"op", "phase", "rows", "context", "kernel", "reason"}
    assert set(plain["cache"][0]) == {
        "cache_format", "latent_bytes", "index_bytes", "layers", "indexers", "bytes_per_token",
        "tokens",
    }  # fmt: skip
    assert set(plain["budget"]) == {
        "free_bytes", "weight_bytes", "fraction", "assumption", "cache_bytes",
    }  # fmt: skip
    assert set(plain["kernels"]["decode"]["topk"][0]) == {
        "kernel", "reason", "padded_heads", "auto", "provider", "note",
    }  # fmt: skip


def test_a_model_brings_its_own_sizes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "free_memory", lambda device: 10**8)
    model = make_model(len(make_tokenizer()))
    found = examine("cpu", "fp32", model=str(tiny))
    assert found.heads == model.config.num_attention_heads
    assert found.config == DsaConfig.from_hf(model.config)
    assert found.budget is not None
    numbers = sum(item.numel() for item in model.state_dict().values())
    assert found.budget.weight_bytes == numbers * 4
    assert found.budget.cache_bytes == int((10**8 - numbers * 4) * 0.8)
    assert "float32" in found.budget.assumption
    assert all(cost.tokens for cost in found.cache)
    assert examine("cpu", model=str(tiny), heads=1).heads == 1
    assert "fit" in text_of(found)


def test_weights_that_do_not_fit_leave_no_room(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "free_memory", lambda device: 1000)
    assert all(cost.tokens == 0 for cost in examine("cpu", model=str(tiny)).cache)
    monkeypatch.setattr(report, "free_memory", lambda device: None)
    assert examine("cpu", model=str(tiny)).budget is None


def test_a_config_without_weights(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    found = examine("cpu", model=str(tmp_path))
    assert found.budget is not None
    assert found.budget.weight_bytes == 0
    assert "not found" in found.budget.assumption


def test_the_demo_model() -> None:
    found = examine("cpu", model="demo")
    assert found.config.model_type == "deepseek_v32"
    assert found.config.index_topk == 128
    assert found.budget is not None
    assert found.budget.weight_bytes > 10**6


def test_faults_are_typed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        examine("cpu", model="/nowhere")
    with pytest.raises(CheckpointError):
        examine("cpu", model=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="not a DSA model"):
        examine("cpu", model=str(tmp_path))
    with pytest.raises(ConfigError, match="cache_format"):
        examine("cpu", "int3")
    with pytest.raises(ConfigError, match="device"):
        examine("abacus")


def shared(config: DsaConfig) -> DsaConfig:
    return replace(config, num_hidden_layers=4, indexer_types=("full", "shared", "full", "shared"))


@pytest.mark.parametrize("cache_format", ["bf16", "fp16", "fp32", "fp8"])
@pytest.mark.parametrize(
    "config", [replace(DEEPSEEK_V32, num_hidden_layers=3), shared(DEEPSEEK_V32)]
)
@pytest.mark.parametrize("spare", [0, 1, 12345])
def test_what_fits_is_what_the_pool_takes(cache_format: str, config: Any, spare: int) -> None:
    """A pool of the tokens that fit, and its reserved page, is within the budget; one page more is
    not.
    """
    pool = NSATokenToKVPool(config, 4, kv_cache_dtype=cache_format)
    [cost] = [
        cost
        for cost in cache_costs(config, Budget(pool.nbytes() + spare, 0, 1.0, ""))
        if cost.cache_format == cache_format
    ]
    assert cost.bytes_per_token == pool.bytes_per_token() == pool.nbytes() // pool.size
    assert cost.tokens == pool.size - PAGE_SIZE
    assert tokens_within(pool.nbytes() - 1, cost.bytes_per_token) == cost.tokens - PAGE_SIZE
    assert (
        cost.layers * cost.latent_bytes + cost.indexers * cost.index_bytes == cost.bytes_per_token
    )


def test_records_of_the_published_sizes() -> None:
    by_format = {cost.cache_format: cost for cost in cache_costs(DEEPSEEK_V32, None)}
    assert (by_format["fp8"].latent_bytes, by_format["fp8"].index_bytes) == (656, 132)
    assert by_format["fp8"].bytes_per_token == 61 * 788
    assert by_format["bf16"].bytes_per_token == 61 * (1152 + 256)
    odd = replace(DEEPSEEK_V32, index_head_dim=30)
    assert "fp8" not in {cost.cache_format for cost in cache_costs(odd, None)}
