"""`topkapi.attach(model)`: a loaded Transformers DSA model, made truly sparse.

Attention modules compute on Topkapi's backend, `generate()` gets a `DsaCache`, and no mask of
[S, T] is ever built: a hook before the decoder turns Transformers' padding mask and cache into a
`DsaStep`. `detach(model)` gives everything back as it was. Embeddings, norms, mixture of experts,
rotary tables, sampling: all stay Transformers'.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from transformers.masking_utils import find_packed_sequence_indices

from topkapi.config import BackendOptions, DsaConfig
from topkapi.errors import ConfigError, RequestError, UnsupportedModelError
from topkapi.models.attention import DsaStep
from topkapi.models.decoder import decoder_of, install, uninstall
from topkapi.models.generation_cache import DsaCache

Model = TypeVar("Model")

_ATTRIBUTE = "_topkapi_attachment"
_PREPARE_CACHE = "_prepare_cache_for_generation"
_CACHE_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NO_MASK = {"indexed_attention": None}


def attach(
    model: Model, *, kv_cache_dtype: str = "auto", rows_at_once: int = 2048, **options: Any
) -> Model:
    """Run a Transformers DSA model's attention on Topkapi, and return the same model.

    Args:
        model: deepseek_v32, glm_moe_dsa (shared indexer layers included) or axk2, on one device.
        kv_cache_dtype: `auto` (the model's dtype), `bf16`, `fp16`, `fp32`, or `fp8`: latents and
            index keys quantised, for less memory and inexact results.
        rows_at_once: query rows whose per-head values exist together; bounds a prefill's memory.
        **options: fields of `BackendOptions` (`prefill_kernel`, `score_budget_bytes`, ...); what is
            not given comes from the environment.

    Forwards run in evaluation mode and without gradients. Raises `UnsupportedModelError` naming
    what a model lacks, and `ConfigError` for a bad option or a model that is attached already.
    """
    decoder = decoder_of(model)
    if _ATTRIBUTE in decoder.__dict__:
        raise ConfigError(
            "attach: this model is attached already; call topkapi.detach(model) first"
        )
    if rows_at_once < 1:
        raise ConfigError(f"rows_at_once: expected at least 1, got {rows_at_once}")
    backend = _backend_options(options)
    if kv_cache_dtype not in ("auto", "fp8", *_CACHE_DTYPES.values()):
        raise ConfigError(
            f"kv_cache_dtype: expected auto, bf16, fp16, fp32 or fp8, got {kv_cache_dtype!r}"
        )
    config = install(model, exclusive=True)
    attachment = Attachment(model, decoder, config, backend, kv_cache_dtype, rows_at_once)
    attachment.hook()
    return model


def detach(model: Model) -> Model:
    """Undo `attach`: the model is Transformers' own again, to the bit. Returns the same model.

    Raises `ConfigError` for a model that is not attached.
    """
    attachment = decoder_of(model).__dict__.get(_ATTRIBUTE)
    if attachment is None:
        raise ConfigError("detach: this model is not attached")
    attachment.unhook()
    uninstall(model)
    return model


def _backend_options(changes: dict[str, Any]) -> BackendOptions:
    known = [item.name for item in fields(BackendOptions)]
    unknown = sorted(set(changes) - set(known))
    if unknown:
        raise ConfigError(f"attach: no option {', '.join(unknown)}; known are {', '.join(known)}")
    return replace(BackendOptions.from_environment(), **changes)


class Attachment:
    """What attaching changed on one model, and what its forwards need."""

    def __init__(
        self,
        model: Any,
        decoder: Any,
        config: DsaConfig,
        options: BackendOptions,
        kv_cache_dtype: str,
        rows_at_once: int,
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._config = config
        self._options = options
        self._kv_cache_dtype = kv_cache_dtype
        self._rows_at_once = rows_at_once
        self._parameters = list(inspect.signature(decoder.forward).parameters)
        # Transformers before 5.24 calls it past_key_values.
        self._cache_name = "cache" if "cache" in self._parameters else "past_key_values"
        self._handles: tuple[Any, ...] = ()

    def hook(self) -> None:
        decoder = self._decoder
        self._handles = (
            decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True),
            decoder.register_forward_hook(self._after_decoder, with_kwargs=True, always_call=True),
        )
        self._decoder.__dict__[_ATTRIBUTE] = self
        if hasattr(type(self._model), _PREPARE_CACHE):
            self._model.__dict__[_PREPARE_CACHE] = self._prepare_cache

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        del self._decoder.__dict__[_ATTRIBUTE]
        self._model.__dict__.pop(_PREPARE_CACHE, None)

    def new_cache(self) -> DsaCache:
        """An empty cache in the model's dtype, on its device."""
        weight = self._decoder.get_input_embeddings().weight
        dtype = self._kv_cache_dtype
        if dtype == "auto":
            if weight.dtype not in _CACHE_DTYPES:
                raise UnsupportedModelError(
                    f"kv_cache_dtype: auto follows fp32, bf16 or fp16, the model is {weight.dtype}"
                )
            dtype = _CACHE_DTYPES[weight.dtype]
        return DsaCache(
            self._config,
            kv_cache_dtype=dtype,
            device=weight.device,
            options=self._options,
            rows_at_once=self._rows_at_once,
        )

    def _prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """In place of `generate()`'s own choice of a cache."""
        given = model_kwargs.get(self._cache_name)
        if given is not None:
            self._check_cache(given)
        elif generation_config.use_cache is not False:
            wanted = generation_config.cache_implementation
            if wanted not in (None, "dynamic"):
                raise ConfigError(
                    f"cache_implementation: an attached model keeps its tokens in Topkapi's paged "
                    f"cache, {wanted!r} cannot be used; leave it out"
                )
            model_kwargs[self._cache_name] = self.new_cache()
            return
        getattr(type(self._model), _PREPARE_CACHE)(
            self._model, generation_config, model_kwargs, *args, **kwargs
        )

    def _check_cache(self, cache: Any) -> None:
        if not isinstance(cache, DsaCache):
            raise ConfigError(
                f"{self._cache_name}: an attached model cannot continue a {type(cache).__name__}; "
                "pass a cache that it returned, or none"
            )
        if cache.config != self._config:
            raise ConfigError(f"{self._cache_name}: belongs to a model of other sizes")

    def _before_decoder(
        self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook before the decoder's forward: put a `DsaStep` in place of mask and cache."""
        kwargs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        if kwargs.get("dsa_step") is not None:
            return (), kwargs
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        inputs = embeds if ids is None else ids
        if inputs is None or (ids is not None and embeds is not None):
            return (), kwargs  # Transformers says what is wrong
        self._refuse(kwargs)
        cache = kwargs.pop("past_key_values", None)
        cache = kwargs.get("cache") if cache is None else cache
        if cache is not None:
            self._check_cache(cache)
        use_cache = kwargs.get("use_cache")
        use_cache = self._decoder.config.use_cache if use_cache is None else use_cache
        kept = cache if cache is not None else self.new_cache()
        if kwargs.get("position_ids") is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device) + kept.columns
            kwargs["position_ids"] = positions[None]
        kwargs["dsa_step"] = self._step(
            kwargs, inputs, kept, packed=not use_cache and cache is None
        )
        kwargs["attention_mask"] = _NO_MASK
        kwargs[self._cache_name] = kept if use_cache or cache is not None else None
        return (), kwargs

    def _after_decoder(
        self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A forward that failed (no output) must not leave columns without contents behind."""
        cache = kwargs.get(self._cache_name)
        if isinstance(cache, DsaCache):
            cache.end_step(failed=output is None)

    def _step(
        self, kwargs: dict[str, Any], inputs: torch.Tensor, cache: DsaCache, *, packed: bool
    ) -> DsaStep:
        batch_size, columns = inputs.shape[:2]
        mask = kwargs.get("attention_mask")
        if packed and mask is None:
            positions = kwargs["position_ids"].expand(batch_size, -1)
            sequence = find_packed_sequence_indices(positions)
            if sequence is not None:
                # One number a sequence, also across the rows of the batch.
                first = torch.arange(batch_size, device=sequence.device)[:, None] * columns
                counts = (sequence + first).flatten().unique_consecutive(return_counts=True)[1]
                return cache.begin_packed_step(counts.tolist(), inputs.device)
        return cache.begin_step(batch_size, columns, mask, inputs.device)

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        decoder = self._decoder
        if decoder.training:
            raise ConfigError("an attached model is for inference: call model.eval() first")
        embeds = kwargs.get("inputs_embeds")
        if torch.is_grad_enabled() and (
            any(parameter.requires_grad for parameter in decoder.parameters())
            or (embeds is not None and embeds.requires_grad)
        ):
            raise ConfigError(
                "an attached model computes no gradients: call it under torch.no_grad() or "
                "torch.inference_mode(), or topkapi.detach(model) to train"
            )
        if kwargs.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
            raise ConfigError(
                "output_attentions: sparse attention never holds the attention matrix"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
            came = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise RequestError(
                f"attention_mask: expected a padding mask [batch, tokens] or None, got {came}"
            )
