"""Reading a model's config and the user's options, and refusing what cannot work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from topkapi.config import KERNEL_NAMES, BackendOptions, DsaConfig, attention_scaling, indexer_types
from topkapi.errors import ConfigError, UnsupportedModelError


def hf_config(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 2048,
        "max_position_embeddings": 4096,
    }
    return SimpleNamespace(**{**values, **changes})


def test_a_config_is_read_once() -> None:
    config = DsaConfig.from_hf(hf_config())
    assert config.latent_width == 576
    assert config.scaling == pytest.approx(192**-0.5)
    assert config.indexer_types == ("full",) * 4
    assert config.indexer_rope == "half"
    assert config.owns_indexer(3)


@pytest.mark.parametrize(
    ("changes", "style"),
    [
        ({"model_type": "glm_moe_dsa"}, "interleaved"),
        ({"model_type": "axk2"}, "half"),
        ({"model_type": "glm_moe_dsa", "indexer_rope_interleave": False}, "half"),
        ({"model_type": "new", "indexer_rope_interleave": True}, "interleaved"),
    ],
)
def test_the_indexers_rope_style(changes: dict[str, Any], style: str) -> None:
    assert DsaConfig.from_hf(hf_config(**changes)).indexer_rope == style


def test_an_unknown_rope_style_is_not_guessed() -> None:
    with pytest.raises(UnsupportedModelError, match="new: the indexer's rope style is unknown"):
        DsaConfig.from_hf(hf_config(model_type="new"))


def test_a_dense_model_is_named_as_one() -> None:
    config = hf_config(index_topk=None)
    del config.index_n_heads
    with pytest.raises(UnsupportedModelError, match="has no index_n_heads, index_topk"):
        DsaConfig.from_hf(config)


def test_sizes_must_be_positive() -> None:
    assert DsaConfig.from_hf(hf_config(qk_rope_head_dim=0)).qk_rope_head_dim == 0
    with pytest.raises(ConfigError, match="index_topk must be positive, got 0"):
        DsaConfig.from_hf(hf_config(index_topk=0))


@pytest.mark.parametrize(
    ("changes", "letters"),
    [
        ({}, "FFFFFF"),
        ({"indexer_types": ["full", "shared", "shared", "full", "shared", "shared"]}, "FSSFSS"),
        ({"index_topk_pattern": "FSSFSF"}, "FSSFSF"),
        # Layer i is full iff max(i - offset + 1, 0) % freq == 0, offset 2 by default.
        ({"index_topk_freq": 4}, "FFSSSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, "FFFSFS"),
        ({"index_topk_freq": 1}, "FFFFFF"),
    ],
)
def test_which_layers_own_an_indexer(changes: dict[str, Any], letters: str) -> None:
    types = indexer_types(hf_config(num_hidden_layers=6, **changes))
    assert "".join(name[0].upper() for name in types) == letters


@pytest.mark.parametrize("pattern", ["SFFF", "FFF", "FXFF"])
def test_an_impossible_sharing_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="indexer_types: expected 4 entries of full or shared"):
        indexer_types(hf_config(index_topk_pattern=pattern))


def test_yarn_scales_only_with_mscale_all_dim() -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}
    # (0.1 * ln 40 + 1)^2 = 1.3688879454^2
    assert attention_scaling(hf_config(rope_parameters=yarn)) == pytest.approx(
        192**-0.5 * 1.8738542, rel=1e-6
    )
    for other in ({"mscale_all_dim": 0}, {"factor": 1.0}, {"rope_type": "default"}):
        config = hf_config(rope_parameters={**yarn, **other})
        assert attention_scaling(config) == pytest.approx(192**-0.5)


def test_options_come_from_the_environment_in_one_place() -> None:
    assert BackendOptions.from_environment({"PATH": "x"}) == BackendOptions()
    options = BackendOptions.from_environment(
        {
            "TOPKAPI_PREFILL_KERNEL": "torch",
            "TOPKAPI_SCORE_BUDGET_BYTES": "1000000",
            "TOPKAPI_DETERMINISTIC": "true",
        }
    )
    assert options == BackendOptions(
        prefill_kernel="torch", score_budget_bytes=1_000_000, deterministic=True
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TOPKAPI_KERNEL": "torch"}, "TOPKAPI_KERNEL: unknown; known are TOPKAPI_PREFILL_KERNEL"),
        ({"TOPKAPI_DETERMINISTIC": "yes"}, "expected 1, 0, true or false, got 'yes'"),
        ({"TOPKAPI_SCORE_BUDGET_BYTES": "1e9"}, "expected a whole number, got '1e9'"),
        ({"TOPKAPI_SCORE_BUDGET_BYTES": "²"}, "expected a whole number, got '²'"),
        ({"TOPKAPI_SCORE_BUDGET_BYTES": "5"}, "score_budget_bytes: expected at least 65536, got 5"),
    ],
)
def test_no_value_is_swallowed(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackendOptions.from_environment(environ)


def test_a_decode_kernel_that_deterministic_steps_would_not_run_is_refused() -> None:
    for names in (
        {"prefill_kernel": "triton"},
        {"prefill_kernel": "torch", "decode_kernel": "torch"},
    ):
        assert BackendOptions(deterministic=True, **names).deterministic  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"decode_kernel: .*prefill_kernel \(auto\).*got 'triton'"
    ):
        BackendOptions(deterministic=True, decode_kernel="triton")


@pytest.mark.parametrize("option", list(KERNEL_NAMES))
def test_kernel_names_are_known_or_refused(option: str) -> None:
    for name in KERNEL_NAMES[option]:
        assert getattr(BackendOptions(**{option: name}), option) == name  # type: ignore[arg-type]
    known = ", ".join(KERNEL_NAMES[option])
    with pytest.raises(ConfigError, match=f"{option}: expected one of {known}, got 'Triton'"):
        BackendOptions(**{option: "Triton"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{option}: expected one of"):
        BackendOptions.from_environment({f"TOPKAPI_{option.upper()}": "nonesuch"})
