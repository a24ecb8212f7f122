"""How a checkpoint on disk becomes a Transformers model, safely.

Local directories and safetensors only, never remote code; every fault is a `CheckpointError` that
names the file or the tensor. fp8 checkpoints are dequantised while they load: Transformers' own
dequantiser guesses the block size from the shapes, which fails for sizes that are no multiple of
the block (`kv_a_proj_with_mqa` has 576 rows). Knows nothing about attention.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from topkapi.config import DsaConfig
from topkapi.device import resolve_device
from topkapi.errors import CheckpointError, ConfigError
from topkapi.models.checkpoint import check_experts, config_json, open_tensors, weight_files
from topkapi.models.parallel import ModelSplit, check_divisible

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HARMLESS = ("rotary_emb.inv_freq",)


def load_model(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    quantization: Literal["dequantize", "keep"] = "dequantize",
    config_overrides: Mapping[str, Any] | None = None,
    split: ModelSplit | None = None,
) -> Any:
    """Load a DSA model from a local Hugging Face directory, in evaluation mode.

    `dtype` is `auto` (the config's), `bf16`, `fp16`, `fp32` or a torch dtype. An fp8 checkpoint is
    dequantised to it; `quantization="keep"` leaves it to Transformers' quantiser instead, which
    needs a CUDA device and the packages accelerate and kernels. Weights of multi-token-prediction
    layers are passed over. `config_overrides` changes fields of the config, such as `index_topk`.
    `split` loads this rank's share alone; every rank of it must call.

    Raises:
        CheckpointError: no safetensors, remote code, a tensor missing, left over or misshapen.
        UnsupportedModelError: the model is not DSA.
        ConfigError: an unknown dtype, device or override, or a quantiser that cannot run here.
    """
    directory = Path(path)
    config = read_config(directory, config_overrides)
    target = resolve_device(device)
    resolved = resolve_dtype(dtype, config)
    if split is not None:
        check_divisible(config, split.mesh.size())
    if quantization == "keep":
        if split is not None:
            raise ConfigError("quantization: 'keep' cannot be split over ranks; use 'dequantize'")
        return _load_quantized(directory, config, resolved, target)
    if quantization != "dequantize":
        raise ConfigError(f"quantization: expected dequantize or keep, got {quantization!r}")
    block = fp8_block(config)
    config.__dict__.pop("quantization_config", None)
    with ExitStack() as stack:
        tensors = open_tensors(weight_files(directory), stack, block=block, dtype=resolved)
        check_experts(tensors, int(getattr(config, "n_routed_experts", 0) or 0))
        own = {n: t for n, t in tensors.items() if not _is_mtp(n, config.num_hidden_layers)}
        model = assemble(directory, config, None, split=split, dtype=resolved, state_dict=own)
    model.name_or_path = str(directory)
    return model.to(target)


def resolve_model_path(model: str | Path) -> Path:
    """The directory a model name means: `demo` is the model that comes with Topkapi, all else a
    local path. Nothing is ever downloaded; raises `CheckpointError` where there is no directory.
    """
    if str(model) == "demo":
        return Path(__file__).parent.parent / "demo" / "weights"
    path = Path(model).expanduser()
    if not path.is_dir():
        raise CheckpointError(
            f"{model}: expected demo or a local checkpoint directory; Topkapi downloads nothing, "
            "so fetch the checkpoint first"
        )
    return path


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Any:
    """The Transformers config of a local DSA checkpoint; never runs the checkpoint's own code.

    Raises `CheckpointError`; `ConfigError` for an override the config has no field for; and, naming
    what is missing, `UnsupportedModelError`.
    """
    directory = Path(path)
    content = config_json(directory)
    model_type = content.get("model_type")
    if model_type not in CONFIG_MAPPING:
        remote = " Its auto_map asks for its own code, which is never run."
        raise CheckpointError(
            f"{directory}: this Transformers does not know model_type {model_type!r}."
            + (remote if "auto_map" in content else "")
        )
    changes = dict(overrides or {})
    try:
        config = CONFIG_MAPPING[model_type].from_dict({**content, **changes})
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        place = f"{directory / 'config.json'}{' and config_overrides' if changes else ''}"
        raise CheckpointError(f"{place}: {error}") from error
    known = content.keys() | type(config)().to_dict().keys()
    unknown = sorted(changes.keys() - known)
    if unknown:
        raise ConfigError(f"config_overrides: {model_type} has no {', '.join(unknown)}")
    DsaConfig.from_hf(config)
    return config


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a local directory, without remote code. Raises `CheckpointError`."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: expected a local checkpoint directory, found none")
    try:
        return AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"{directory}: its tokenizer cannot be loaded: {error}") from error


def find_tokenizer(directory: Path) -> Any:
    """The tokenizer of a checkpoint, None where it comes without: it then takes token ids only."""
    return load_tokenizer(directory) if any(directory.glob("tokenizer*")) else None


def resolve_dtype(dtype: str | torch.dtype, config: Any) -> torch.dtype:
    """The dtype a checkpoint loads in; `auto` is its config's. Raises `ConfigError`."""
    wanted: Any = getattr(config, "dtype", None) if dtype == "auto" else dtype
    name = str(torch.bfloat16 if wanted is None else wanted).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype: expected auto, bf16, fp16 or fp32, got {dtype!r}")
    return _DTYPES[name]


def fp8_block(config: Any) -> tuple[int, int] | None:
    """Block size of an fp8 checkpoint, None of one that is not quantised."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = settings.get("quant_method")
    if method != "fp8":
        raise CheckpointError(f"quantization_config: expected quant_method fp8, got {method!r}")
    block = settings.get("weight_block_size") or (128, 128)
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise CheckpointError(f"weight_block_size: expected two positive sizes, got {block!r}")
    return block[0], block[1]


def _load_quantized(directory: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    missing = [name for name in ("accelerate", "kernels") if not importlib.util.find_spec(name)]
    if device.type != "cuda" or missing:
        raise ConfigError(
            "quantization: 'keep' needs a CUDA device and the packages accelerate and kernels; "
            f"here the device is {device} and missing is {', '.join(missing) or 'nothing'}"
        )
    weight_files(directory)
    return assemble(directory, config, str(directory), dtype=dtype, device_map={"": device})


def assemble(
    directory: Path,
    config: Any,
    source: str | None,
    *,
    split: ModelSplit | None = None,
    **options: Any,
) -> Any:
    """One call of `from_pretrained`, whose report and errors become `CheckpointError`."""
    if (directory / "generation_config.json").is_file():
        options["generation_config"] = GenerationConfig.from_pretrained(str(directory))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if split is not None:
        options.update(split.load_options(config, options["dtype"]))
    try:
        loader = model_class if split is None else split.loader(model_class)
        model, report = loader.from_pretrained(
            source,
            config=config,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{directory}: cannot be loaded: {error}") from error
    _check_report(directory, report, config.num_hidden_layers)
    if split is not None:
        split.finish(model, model_class)
    return model.eval()


def _is_mtp(name: str, num_layers: int) -> bool:
    """Multi-token-prediction layers are numbered after the model's own."""
    layer = _LAYER.search(name)
    return layer is not None and int(layer[1]) >= num_layers


def _check_report(directory: Path, report: dict[str, Any], num_layers: int) -> None:
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    for name, got, expected in sorted(report["mismatched_keys"]):
        problems.append(f"{name} has shape {list(got)}, expected {list(expected)}")
    problems += [
        f"{name} has no place in the model"
        for name in sorted(report["unexpected_keys"])
        if not _is_mtp(name, num_layers) and not name.endswith(_HARMLESS)
    ]
    problems += [str(message) for message in report.get("error_msgs", ())]
    if problems:
        shown = "; ".join(problems[:8]) + ("; ..." if len(problems) > 8 else "")
        raise CheckpointError(f"{directory}: {len(problems)} faulty tensors: {shown}")
