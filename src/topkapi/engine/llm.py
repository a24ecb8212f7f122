"""`topkapi.LLM`: a model by name, and text in, text out.

Loads model and tokenizer, sizes the cache, and drives the engine; turns prompts and conversations
into token ids. One calling thread; one process and one device, unless the model is split.

What is wrong with one request never stops the others: `generate` and `chat` give it an output whose
`finish_reason` is `error` and whose `error` says why; `stream`, having only one, raises that
`RequestError`. What is wrong with the call itself (a list of sampling params of another length, no
chat template) raises `ConfigError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from jinja2 import TemplateError
from tqdm import tqdm

from topkapi.config import BackendOptions, DsaConfig
from topkapi.engine.engine import Engine
from topkapi.engine.launch import EngineOptions, eos_token_ids, make_engine
from topkapi.engine.parallel import RemoteEngine, make_parallel_engine, rank_spec
from topkapi.engine.prompts import as_prompts, completions, one_each
from topkapi.engine.rank import ParallelOptions
from topkapi.engine.request import (
    Prompt,
    RequestOutput,
    RequestUpdate,
    SamplingParams,
    Urgency,
)
from topkapi.engine.stats import EngineStats
from topkapi.errors import ConfigError, RequestError
from topkapi.models.decoder import install
from topkapi.models.loading import find_tokenizer, load_model, read_config, resolve_model_path

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A DSA model ready to generate.

    Attributes:
        config: the model's `DsaConfig`.
        model: the Transformers model, whose attention now runs on Topkapi and belongs to this LLM;
            None where it is split.
        tokenizer: the Transformers tokenizer, or None.
        device: where the model and its cache are.
        engine: the engine underneath, for step-by-step use.
        max_length: tokens that prompt and output of one request may have together.
    """

    def __init__(
        self,
        model: str | Path | Any,
        *,
        tokenizer: Any = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        kv_cache_dtype: str = "auto",
        max_tokens_in_cache: int | None = None,
        max_context_len: int | None = None,
        max_batch_tokens: int = 2048,
        max_running_requests: int = 64,
        page_size: int = 64,
        memory_fraction: float = 0.8,
        speculative_num_steps: int | Literal["auto"] = 0,
        enable_prefix_cache: bool = True,
        host_cache_tokens: int = 0,
        trace: str | Path | None = None,
        selection_stats_every: int = 0,
        cuda_graphs: bool = True,
        cuda_graph_batch_sizes: Sequence[int] | None = None,
        compile: bool = False,
        backend_options: BackendOptions | None = None,
        config_overrides: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        verify_selection: int = 64,
        parallel_timeout: float = 600.0,
    ) -> None:
        """Load and make ready.

        Args:
            model: `demo`, a local Hugging Face directory, or a loaded Transformers model (which
                keeps its own device and dtype, and whose attention this LLM takes over for good;
                pass its `tokenizer` too, or only token ids work).
            device: `auto` (the GPU if there is one), `cpu`, `cuda`, `cuda:1`.
            dtype: `auto` (the checkpoint's), `bf16`, `fp16`, `fp32`.
            kv_cache_dtype: `auto` (the model's), `bf16`, `fp16`, `fp32`, `fp8`.
            max_tokens_in_cache: tokens of all running requests together, rounded up to whole
                pages; None sizes the cache to the memory at hand.
            max_context_len: bounds prompt and output of a request; None is the model's context.
            max_batch_tokens: tokens of one step; longer prompts are computed in chunks.
            max_running_requests: requests computed at once; more of them wait.
            memory_fraction: share of the free device memory that the cache may take.
            speculative_num_steps: tokens that the checkpoint's next-token-prediction layer drafts
                for each request and step, 0 to 4; `auto` goes by what pays off as it runs, and is
                0 where the checkpoint has no such layer.
            enable_prefix_cache: keep computed pages, so that a prompt that begins as an earlier one
                (or goes on from its answer) starts behind what they share.
            host_cache_tokens: tokens whose pages are kept in host memory (page-locked beside a GPU)
                when the cache has no room for them, and brought back when they are wanted again.
            trace: a file that gets a Chrome trace of every step; on a GPU steps are timed with
                events then, which costs a little.
            selection_stats_every: look at what the indexers select in every Nth forward pass, for
                `stats`; 0 is never.
            cuda_graphs: on a GPU, replay decoding and verifying steps as CUDA graphs; what cannot
                be captured runs as it is, with a warning. Not over several ranks.
            cuda_graph_batch_sizes: a batch is filled up to the next of these sizes, whose decoding
                steps are captured at once; None is powers of two, each captured when it is met.
            compile: run what is not attention through `torch.compile`.
            backend_options: None reads the `TOPKAPI_` environment variables.
            config_overrides: fields of the model's config to change before loading, such as
                `{"index_topk": 1024}`.
            tensor_parallel_size: ranks to split the model over, each a process with a device of its
                own. More than 1 needs a path, and leaves `model` None in this process.
            verify_selection: every so many steps the ranks compare what they selected; 0 is never.
            parallel_timeout: seconds a rank waits for the others inside a step.

        Raises `CheckpointError`, `UnsupportedModelError` or `ConfigError`, and `ParallelError` when
        a rank fails.
        """
        options = EngineOptions(
            kv_cache_dtype=kv_cache_dtype,
            max_tokens_in_cache=max_tokens_in_cache,
            max_context_len=max_context_len,
            max_batch_tokens=max_batch_tokens,
            max_running_requests=max_running_requests,
            page_size=page_size,
            memory_fraction=memory_fraction,
            speculative_num_steps=speculative_num_steps,
            enable_prefix_cache=enable_prefix_cache,
            host_cache_tokens=host_cache_tokens,
            trace=None if trace is None else Path(trace),
            selection_stats_every=selection_stats_every,
            cuda_graphs=cuda_graphs,
            cuda_graph_batch_sizes=None
            if cuda_graph_batch_sizes is None
            else tuple(cuda_graph_batch_sizes),
            compile=compile,
            backend=BackendOptions.from_environment()
            if backend_options is None
            else backend_options,
        )
        self.engine: Engine | RemoteEngine
        self._end: Callable[[], object] | None = None
        loading = (model, tokenizer, device, dtype, config_overrides)
        parallel = ParallelOptions(tensor_parallel_size, verify_selection, parallel_timeout)
        if parallel.size > 1:
            spec = rank_spec(*loading, options, parallel)
            self.model, self.tokenizer = None, spec.tokenizer
            self.config = DsaConfig.from_hf(read_config(spec.path, config_overrides))
            self.device = torch.device(spec.device)
            self.engine, self._end = make_parallel_engine(spec)
        else:
            self.model, self.tokenizer = _load(*loading)
            self.config = install(self.model)
            self.device = next(self.model.parameters()).device
            eos = eos_token_ids(self.model, self.tokenizer)
            self.engine = make_engine(self.model, self.config, self.tokenizer, eos, options)
        self._inboxes: dict[int, deque[RequestUpdate]] = {}

    @property
    def max_length(self) -> int:
        return self.engine.limits.max_length

    def stats(self) -> EngineStats:
        """What the engine has done so far: steps and their times, the cache and its hit rate, and
        what the indexers select where `selection_stats_every` says so.
        """
        return self.engine.stats()

    def close(self) -> None:
        """End the ranks of a split model; else nothing. So does leaving a `with` block."""
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a text, or token ids as they are. Outputs are in prompts' order,
        the `n` completions of a prompt one after another.

        `sampling_params` is one for all or one for each; `priority` (lower runs first) and
        `timeout` (seconds) hold for all, see `Urgency`. A bad prompt gets an output with
        `finish_reason="error"`; the others finish.
        """
        wanted = as_prompts(prompts)
        urgency = Urgency(priority, timeout)
        return self._complete(wanted, one_each(sampling_params, len(wanted)), use_tqdm, urgency)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several: always a list, `n` outputs a conversation.

        A message is `{"role": ..., "content": ...}`; the tokenizer's chat template lays them out.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast("list[Messages]", list(messages) if several else [messages])
        if not messages:
            conversations = []
        prompts: list[Prompt | RequestError] = []
        for conversation in conversations:
            try:
                prompts.append(self.encode_chat(conversation))
            except RequestError as error:
                prompts.append(error)
        urgency = Urgency(priority, timeout)
        return self._complete(prompts, one_each(sampling_params, len(prompts)), use_tqdm, urgency)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Generator[RequestUpdate, None, None]:
        """Complete one prompt and yield what every step adds; the last update has the output.

        Other requests of this engine move on in the same steps. Closing the iterator ends the
        request. Raises `RequestError` at once for a bad prompt, and later if the request fails.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        ids = self.engine.check(self._encode(prompt), params)
        text = prompt if isinstance(prompt, str) else None
        return self._stream(ids, params, text, Urgency(priority, timeout))

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation through the tokenizer's chat template, ready to be answered.

        Raises `ConfigError` without a template, `RequestError` for messages it does not take.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ConfigError(
                "chat: this model's tokenizer has no chat template; use generate with the "
                "conversation laid out as the model expects it"
            )
        if not messages:
            raise RequestError("the conversation is empty: expected at least one message")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return self._tokenize(text, add_special_tokens=False)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("the prompt is text, but the model has no tokenizer: pass token ids")
        if not prompt:
            raise RequestError("the prompt is empty: expected at least one character")
        return self._tokenize(prompt, add_special_tokens=True)

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the tokenizer refuses this text: {error}") from error
        return cast("list[int]", ids)

    def _complete(
        self,
        prompts: Sequence[Prompt | RequestError],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        urgency: Urgency,
    ) -> list[RequestOutput]:
        """Run all to the end. Whatever interrupts it, no request of this call is left behind."""
        outputs: dict[int, RequestOutput] = {}
        order: list[int] = []
        pending: set[int] = set()
        try:
            for prompt, choice in completions(prompts, params):
                admitted = self._admit(prompt, choice, urgency)
                if isinstance(admitted, RequestOutput):
                    outputs[admitted.request_id] = admitted
                    order.append(admitted.request_id)
                else:
                    pending.add(admitted)
                    order.append(admitted)
            with tqdm(total=len(order), disable=not use_tqdm, unit="request") as bar:
                bar.update(len(outputs))
                while pending:
                    for update in self._advance():
                        if update.output is not None and update.request_id in pending:
                            pending.remove(update.request_id)
                            outputs[update.request_id] = update.output
                            bar.update()
        finally:
            for request_id in pending:
                self.engine.abort(request_id)
        return [outputs[request_id] for request_id in order]

    def _admit(
        self, prompt: Prompt | RequestError, params: SamplingParams, urgency: Urgency
    ) -> int | RequestOutput:
        """Queue a prompt and return its id, or the output that says why it cannot run."""
        text = prompt if isinstance(prompt, str) else None
        try:
            if isinstance(prompt, RequestError):
                raise prompt
            return self.engine.add(self._encode(prompt), params, text, urgency)
        except RequestError as error:
            return RequestOutput(self.engine.new_id(), text, [], "", [], "error", error=error)

    def _stream(
        self, ids: list[int], params: SamplingParams, text: str | None, urgency: Urgency
    ) -> Generator[RequestUpdate, None, None]:
        request_id = self.engine.add(ids, params, text, urgency)
        inbox = self._inboxes[request_id] = deque()
        try:
            while True:
                while not inbox:
                    self._advance()
                update = inbox.popleft()
                if update.output is not None and update.output.error is not None:
                    raise update.output.error
                yield update
                if update.output is not None:
                    return
        finally:
            del self._inboxes[request_id]
            self.engine.abort(request_id)

    def _advance(self) -> list[RequestUpdate]:
        """One step; streams that are not being read right now find their updates later."""
        updates = self.engine.step()
        for update in updates:
            if update.request_id in self._inboxes:
                self._inboxes[update.request_id].append(update)
        return updates


def _load(
    model: str | Path | Any,
    tokenizer: Any,
    device: str | torch.device,
    dtype: str | torch.dtype,
    config_overrides: Mapping[str, Any] | None,
) -> tuple[Any, Any]:
    if not isinstance(model, str | Path):
        if device != "auto" or dtype != "auto" or config_overrides:
            raise ConfigError(
                "a loaded model keeps its device, dtype and config: leave device, dtype and "
                "config_overrides out, or pass a path"
            )
        return model.eval(), tokenizer
    path = resolve_model_path(model)
    if tokenizer is None:
        tokenizer = find_tokenizer(path)
    return load_model(path, dtype, device, config_overrides=config_overrides), tokenizer
