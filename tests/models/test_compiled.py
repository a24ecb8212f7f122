"""What is compiled computes what it did before, for any number of tokens."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from peers.tiny_models import BY_NAME
from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM
from topkapi.errors import ConfigError
from topkapi.models.compiled import compile_rest

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++")), reason="needs a C++ compiler"
)


@needs_compiler
def test_any_number_of_tokens() -> None:
    plain, compiled = (BY_NAME["deepseek_v32"].build(num_hidden_layers=1) for _ in range(2))
    compile_rest(compiled)
    for tokens in (2, 7, 33):
        x = torch.randn(1, tokens, 56, generator=torch.Generator().manual_seed(tokens))
        with torch.inference_mode():
            layers = [model.model.layers[0] for model in (plain, compiled)]
            want, got = (layer.mlp(layer.post_attention_layernorm(x)) for layer in layers)
        torch.testing.assert_close(got, want)


def test_a_machine_that_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nsee there")

    monkeypatch.setattr(torch.nn.Module, "_call_impl", fails)
    model = BY_NAME["deepseek_v32"].build()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    with pytest.raises(ConfigError, match=r"compile: .*: No working C.. compiler found$"):
        compile_rest(model)
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_the_same_bits_are_not_what_a_compiler_gives() -> None:
    with pytest.raises(ConfigError, match=r"compile: .*deterministic"):
        LLM(
            BY_NAME["deepseek_v32"].build(),
            compile=True,
            backend_options=BackendOptions(deterministic=True),
        )
