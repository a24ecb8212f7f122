"""The options that several commands share: how an engine is made, how tokens are chosen.

A group is a frozen dataclass whose fields are Typer options. A command decorated with `takes` lists
a group as one parameter and gets one option a field; names, help and defaults are said once.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from topkapi.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from topkapi.engine.request import SamplingParams

_engine = functools.partial(typer.Option, rich_help_panel="Engine")
_sampling = functools.partial(typer.Option, rich_help_panel="Sampling")
_FILE = {"exists": True, "dir_okay": False}


@dataclass(frozen=True)
class EngineChoices:
    """How the engine is made; the names are those of `topkapi.LLM`."""

    model: Annotated[str, _engine(help="demo, or a local Hugging Face directory.")] = "demo"
    device: Annotated[str, _engine(help="auto, cpu or cuda[:N].")] = "auto"
    dtype: Annotated[str, _engine(help="auto, bf16, fp16 or fp32.")] = "auto"
    kv_cache_dtype: Annotated[str, _engine(help="auto, bf16, fp16, fp32 or fp8.")] = "auto"
    max_tokens_in_cache: Annotated[
        int | None, _engine(help="Tokens of all requests together; else by memory.")
    ] = None
    max_context_len: Annotated[
        int | None, _engine(help="Prompt and output of a request; else the model's.")
    ] = None
    max_batch_tokens: Annotated[int, _engine(help="Tokens of one step.")] = 2048
    max_running_requests: Annotated[int, _engine(help="Requests computed at once.")] = 64
    page_size: Annotated[int, _engine(help="Tokens of one page of the cache.")] = 64
    memory_fraction: Annotated[
        float, _engine(help="Share of the free device memory that the cache may take.")
    ] = 0.8
    prefix_cache: Annotated[bool, _engine(help="Keep computed pages for prompts alike.")] = True
    host_cache_tokens: Annotated[
        int, _engine(help="Tokens whose pages may wait in host memory.")
    ] = 0
    speculative_num_steps: Annotated[
        str, _engine(help="Drafts a step by the model's MTP layer: 0 to 4, or auto.")
    ] = "0"
    cuda_graphs: Annotated[bool, _engine(help="Replay decoding steps as CUDA graphs.")] = True
    cuda_graph_batch_sizes: Annotated[
        str | None, _engine(help="Sizes to capture at once, as 1,8,64; else when they are met.")
    ] = None
    compile: Annotated[bool, _engine("--compile", help="What is not attention compiled.")] = False
    tensor_parallel_size: Annotated[
        int, _engine(help="Processes, with a device each, to split the model over.")
    ] = 1
    verify_selection: Annotated[
        int, _engine(help="Steps after which those compare what they selected; 0 is never.")
    ] = 64
    parallel_timeout: Annotated[float, _engine(help="Seconds they wait for each other.")] = 600.0
    deterministic: Annotated[
        bool, _engine("--deterministic", help="The same bits whatever shares the batch.")
    ] = False
    trace: Annotated[
        Path | None, _engine(dir_okay=False, help="A file for a Chrome trace of every step.")
    ] = None
    selection_stats_every: Annotated[
        int, _engine(help="Passes after which to look at what is selected; 0 is never.")
    ] = 0
    config_overrides: Annotated[
        str | None, _engine(help="JSON: fields of the model's config to change before loading.")
    ] = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`, all but the model. Raises `ConfigError` for a text that does
        not parse.
        """
        from topkapi.config import BackendOptions

        given = {item.name: getattr(self, item.name) for item in fields(self)}
        del given["model"]
        steps = given["speculative_num_steps"]
        given["speculative_num_steps"] = int(steps) if steps.isdecimal() else steps
        given["enable_prefix_cache"] = given.pop("prefix_cache")
        if given["cuda_graph_batch_sizes"] is not None:
            given["cuda_graph_batch_sizes"] = _sizes(given["cuda_graph_batch_sizes"])
        if given["config_overrides"] is not None:
            given["config_overrides"] = _overrides(given["config_overrides"])
        backend = BackendOptions.from_environment()
        if given.pop("deterministic"):
            backend = replace(backend, deterministic=True)
        return {**given, "backend_options": backend}


@dataclass(frozen=True)
class SamplingChoices:
    """How tokens are chosen and when the answer ends; the names are `SamplingParams`'."""

    max_tokens: Annotated[int, _sampling(help="New tokens at most.")] = 256
    min_tokens: Annotated[int, _sampling(help="New tokens at least.")] = 0
    temperature: Annotated[float, _sampling(help="0 is greedy.")] = 0.0
    top_p: Annotated[float, _sampling(help="Keep this much probability.")] = 1.0
    top_k: Annotated[int, _sampling(help="Keep this many tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, _sampling(help="Drop what is this much less likely.")] = 0.0
    repetition_penalty: Annotated[float, _sampling(help="Above 1 against repetition.")] = 1.0
    presence_penalty: Annotated[float, _sampling(help="Against tokens of the answer.")] = 0.0
    frequency_penalty: Annotated[float, _sampling(help="The same, by their number.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, _sampling(help="TOKEN_ID=NUMBER, added to its logit; repeatable.")
    ] = None
    stop: Annotated[list[str] | None, _sampling(help="A text to end at; repeatable.")] = None
    seed: Annotated[int | None, _sampling(help="Makes sampling repeatable.")] = None
    regex: Annotated[str | None, _sampling(help="What the whole answer must match.")] = None
    json_schema: Annotated[
        Path | None, _sampling(help="A file: the answer is JSON of this schema.", **_FILE)
    ] = None
    grammar: Annotated[
        Path | None, _sampling(help="A file: a grammar of the answer, Lark or GBNF.", **_FILE)
    ] = None

    def params(self) -> SamplingParams:
        """Raises `RequestError` for a value out of range, naming it."""
        from topkapi.engine.request import SamplingParams

        given = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("json_schema", "grammar"):
            if given[name] is not None:
                given[name] = _text_of(given[name], name)
        given["stop"] = given["stop"] or ()
        given["logit_bias"] = dict(_bias(item) for item in given["logit_bias"] or ())
        return SamplingParams(**given)


def takes(**groups: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command: each parameter named here is a group, made of one option a field."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        parameters = []
        for parameter in inspect.signature(command).parameters.values():
            group = groups.get(parameter.name)
            if group is None:
                parameters.append(parameter.replace(annotation=hints[parameter.name]))
                continue
            types = get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(
                    item.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=item.default,
                    annotation=types[item.name],
                )
                for item in fields(group)
            ]

        @functools.wraps(command)
        def call(**given: Any) -> Any:
            made = {
                name: group(**{item.name: given.pop(item.name) for item in fields(group)})
                for name, group in groups.items()
            }
            return command(**made, **given)

        ordered = sorted(parameters, key=lambda parameter: parameter.kind)
        call.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        call.__annotations__ = {item.name: item.annotation for item in ordered}
        return call

    return decorate


def _text_of(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option}: {path}: {error}") from error


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"cuda_graph_batch_sizes: expected numbers with commas, got {text!r}"
        ) from None


def _overrides(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"config_overrides: expected JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"config_overrides: expected a JSON object, got {text!r}")
    return found


def _bias(text: str) -> tuple[int, float]:
    token_id, _, number = text.partition("=")
    try:
        return int(token_id), float(number)
    except ValueError:
        raise RequestError(f"logit_bias: expected TOKEN_ID=NUMBER, got {text!r}") from None
