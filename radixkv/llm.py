"""`LLM`: offline generation, with vLLM's names and shapes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from tqdm.auto import tqdm

from radixkv.cache import Pin
from radixkv.cache.arguments import check_seconds
from radixkv.engine.engine import Engine
from radixkv.engine.explain_prompts import add_tiers, decode_explanations, explain_cached
from radixkv.engine.needed_packages import import_packages
from radixkv.engine.pool_setup import log_length
from radixkv.engine.request_output import beam_output, delta_output, request_output, with_texts
from radixkv.llm_options import LLM_OPTIONS, LLMOptions, llm_configs
from radixkv.model.loader import load_model
from radixkv.observe.inspect.snapshot import CacheSnapshot, take_snapshot
from radixkv.observe.prompt_explanation import PromptExplanation
from radixkv.option_words import refuse_unknown
from radixkv.outputs import BeamSearchOutput, RequestOutput
from radixkv.process_bound import ProcessBound
from radixkv.prompts import (
    ChatOptions,
    Message,
    Prompt,
    PromptInput,
    as_chat_prompts,
    as_prompts,
    as_single_prompt,
    is_prompt,
    one_for_each,
    with_answer_form,
)
from radixkv.sampling_defaults import check_beam_search_params, given_or_default
from radixkv.sampling_params import BeamSearchParams, SamplingParams, prompt_only_params
from radixkv.scheduling.request import Request
from radixkv.serving.answer_reader import AnswerReader
from radixkv.serving.exclusive_use import ExclusiveUse
from radixkv.serving.interrupts import deferred_interrupt
from radixkv.tools.definitions import as_tool_options
from radixkv.vllm_options import CALLS, takes_vllm_options, without_vllm_options


class LLM(ProcessBound):
    """A language model whose prompts share the keys and values of their common prefixes.

    Several threads may share one LLM: calls of `generate` run one after the other, and streams alternate step by step. (For
    many users at once, see `AsyncLLM`.) While an `AsyncLLM` runs on this LLM, its methods raise RuntimeError.

    Args:
        model: hub id, local folder, GGUF file or a loaded transformers model; None: the default one,
            SmolLM2-135M-Instruct.
        options: the fields of [`ModelConfig`][radixkv.config.ModelConfig] and [`EngineConfig`][radixkv.config.EngineConfig],
            such as ``block_size=32``. vLLM's other options are accepted if their value would change nothing here, such as
            ``tensor_parallel_size=1``.

    Raises:
        ModelLoadError: the model does not exist or cannot be read; the message says what to do.
        UnsupportedModelError: the model cannot run over blocks; the message says why.
        TypeError: ``model`` has another type, or an option is unknown; the message names the nearest known one.
        ValueError: an option is out of its range, or has no effect without another one.
        MissingPackageError: an option needs a package that is not installed; the message says which extra brings it.
    """

    def __init__(self, model: Any | str | Path | None = None, **options: Unpack[LLMOptions]) -> None:
        own: Any = without_vllm_options(options)
        refuse_unknown("LLM.__init__", own, LLM_OPTIONS)
        model_config, engine_config = llm_configs(own)
        import_packages(engine_config)
        loaded = load_model(
            model, model_config, native=not engine_config.enable_torch_compile, fingerprint=engine_config.has_tiers
        )
        self.engine = Engine(loaded, engine_config)
        log_length(self.engine.loaded, asked_for=model_config.max_model_len is not None)
        self._ids = itertools.count()
        self._use = ExclusiveUse(self.engine)

    @takes_vllm_options(CALLS)
    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = 0,
    ) -> list[RequestOutput]:
        """Complete prompts: strings, lists of token ids, or dictionaries (see `radixkv.prompts`).

        Args:
            sampling_params: for all prompts, or one for each; None: `get_default_sampling_params`.
            use_tqdm: whether to show a progress bar; or a callable that makes one, such as a subclass of tqdm.
            priority: for all prompts, or one for each; lower values are admitted earlier, as in vLLM. None: 0.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            TypeError, ValueError: a prompt or parameter is impossible; nothing has run then.
            StructuredOutputError, NoBlocksLeftError: one prompt failed while running; a note gives its position. The others
                are aborted, and answers that were complete are lost. `stream` and `AsyncLLM` fail only the one.
        """
        return self._generate(as_prompts(prompts, self.engine.loaded), sampling_params, use_tqdm, priority)

    @takes_vllm_options(CALLS)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | Path | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        cache: Mapping[str, bool] | None = None,
        priority: int | Sequence[int] | None = 0,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of ``{"role": ..., "content": ...}``; otherwise like `generate`.

        The parts of an answer are in the ``answer`` of each output, as a `ParsedAnswer`: text, reasoning and tool calls.

        Args:
            tools: functions that the model may call, in OpenAI's form.
            tool_choice: "auto" (the default), "none", "required", or ``{"type": "function", "function": {"name": ...}}``.
            parallel_tool_calls: whether an answer may hold several calls.
            chat_template: Jinja, or a file of it, in place of the model's own chat template. Do not take one from strangers.
            chat_template_kwargs: variables for the chat template, such as ``enable_thinking``.
            add_generation_prompt: False: do not begin the assistant's message, so that the model may begin one of any role.
            continue_final_message: continue the last message, which must be the assistant's; needs
                ``add_generation_prompt=False``.
            cache_salt: only prompts with the same one share blocks.
            cache: ``{"read": bool, "write": bool}``: whether to reuse what is cached, and to publish what is computed.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=as_tool_options(tools, tool_choice, parallel_tool_calls),
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = as_chat_prompts(messages, self.engine.loaded, cache_salt, cache, options)
        return self._generate(prompts, sampling_params, use_tqdm, priority, with_answers=True)

    def stream(
        self,
        prompt: PromptInput | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | Path | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        cache: Mapping[str, bool] | None = None,
        priority: int | None = 0,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, or answer one conversation, piece by piece.

        Options that are not described here are those of `chat`, and only for conversations.

        Args:
            prompt: as for `generate`, or a conversation as for `chat`.
            sampling_params: None: `get_default_sampling_params`.
            cache_salt: as for `chat`; it replaces a prompt's own.
            cache: likewise.
            priority: as for `generate`.

        Yields:
            The request with what is new in each of its outputs: ``text`` and ``token_ids`` hold only that. The last one
            has ``finished`` set. For a conversation, ``pieces`` has what is new as text, reasoning and tool calls, and an
            output that has ended has its ``answer``. Leaving the iteration early aborts the request.

        Raises:
            TypeError, ValueError: what `chat` raises, or a prompt comes with options that only conversations have.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=as_tool_options(tools, tool_choice, parallel_tool_calls),
            chat_template_kwargs=chat_template_kwargs,
        )
        params = given_or_default(sampling_params, self.engine.loaded.sampling_defaults)
        single = as_single_prompt(prompt, self.engine.loaded, cache_salt, cache, options)
        request = self._make_request(single, params, priority)
        return self._stream(request, None if is_prompt(prompt) else AnswerReader(single, params))

    def stream_prompt(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[RequestOutput]:
        """Answer a conversation that has been tokenized already; otherwise like `stream`."""
        params = given_or_default(sampling_params, self.engine.loaded.sampling_defaults)
        return self._stream(self._make_request(prompt, params), AnswerReader(prompt, params))

    @takes_vllm_options(CALLS)
    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` best continuations of each prompt, best first; equal to transformers' beam search."""
        check_beam_search_params(params)
        requests = [self._make_request(prompt, params) for prompt in as_prompts(prompts, self.engine.loaded)]
        self._run(requests, use_tqdm)
        engine = self.engine
        return [with_texts(beam_output(each, engine.decode_token), engine.loaded.tokenizer) for each in requests]

    def explain(
        self,
        prompt: PromptInput | Sequence[Message],
        *,
        cache_salt: str | None = None,
        cache: Mapping[str, bool] | None = None,
    ) -> PromptExplanation:
        """Which tokens of a prompt or a conversation would be reused now, and why not more. Runs and changes nothing.

        Args:
            cache_salt: as for `chat`; it replaces a prompt's own.
            cache: likewise.

        Raises:
            TypeError, ValueError: it is not one prompt or conversation, or has no tokens, or some that the model lacks.
        """
        single = as_single_prompt(prompt, self.engine.loaded, cache_salt, cache)
        engine = self.engine
        with self._use.hold():
            explained = explain_cached(engine, [single], look_elsewhere=True)
        decoded = decode_explanations(explained, [single], engine.loaded.tokenizer)
        return add_tiers(decoded, [single], engine.tiers)[0]

    def pin(
        self,
        prompt: PromptInput | Sequence[Message],
        ttl: float | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Pin:
        """Keep a prompt from eviction, for ``ttl`` seconds or until `unpin`. Its uncached part is computed now.

        Only whole blocks are pinned: for a prompt shorter than a block, the pin has ``num_tokens`` 0.
        With ``disk_cache``, the pin survives a restart, and takes effect again when the prompt is next used. Pinning a prompt
        again replaces its stored pin.

        Raises:
            PinQuotaExceeded: half of all blocks would be pinned; nothing is computed then.
            TypeError, ValueError: the prompt or ``ttl`` is impossible, or nothing is cached, by
                ``enable_prefix_caching=False`` or by the prompt's own ``cache``.
        """
        engine, cache = self.engine, self.engine.cache
        single = as_single_prompt(prompt, engine.loaded, cache_salt)
        whole = len(single.token_ids) // cache.block_size * cache.block_size
        with self._use.hold():
            engine.check_pin(single, ttl)
            if cache.match(single.token_ids, single.namespace) < whole:
                self._run([self._make_request(single, prompt_only_params())], use_tqdm=False)
            return engine.pins.pin(single.token_ids, single.namespace, ttl)

    def pins(self) -> list[Pin]:
        """The active pins."""
        with self._use.hold():
            return self.engine.cache.pins()

    def unpin(self, pin: Pin) -> None:
        """Release a pin, so that its prompt can be evicted again."""
        with self._use.hold():
            self.engine.pins.release(pin)

    def inspect(self) -> CacheSnapshot:
        """What is cached now: as a tree, figures, JSON or a picture (see `radixkv.observe.inspect`).

        It has texts if there is a tokenizer.
        """
        decode = getattr(self.engine.loaded.tokenizer, "decode", None)
        with self._use.hold():
            return take_snapshot(self.engine.cache, decode, self.engine.pool.block_nbytes)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.loaded.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate`, `chat` and `stream` use by default: what the model's generation_config says, and otherwise
        `SamplingParams`' own defaults (see the option ``generation_config``)."""
        return given_or_default(None, self.engine.loaded.sampling_defaults)

    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix, including pinned ones and those in tiers, except on a disk that this process only reads.

        Returns:
            Whether the pool is empty now, because no request was running.
        """
        with self._use.hold():
            return self.engine.reset_prefix_cache()

    def shutdown(self, grace_seconds: float = 30.0) -> None:
        """Write what is cached into the tiers below the pool, and close them; events are no longer published.

        Leaving ``with LLM(...) as llm:`` calls this. Without it, blocks used only once and not evicted are not written.
        Afterwards, pinning, unpinning and clearing affect memory only.

        Args:
            grace_seconds: how long writing may take; the most recently used blocks are written first.

        Raises:
            ValueError: ``grace_seconds`` is not a number of at least 0.
        """
        check_seconds("grace_seconds", grace_seconds)
        with self._use.hold():
            until = time.monotonic() + grace_seconds
            self.engine.shutdown(lambda: until - time.monotonic())

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
        *,
        with_answers: bool = False,
    ) -> list[RequestOutput]:
        given = one_for_each("sampling_params", sampling_params, len(prompts))
        params = [given_or_default(each, self.engine.loaded.sampling_defaults) for each in given]
        priorities = one_for_each("priority", priority, len(prompts))
        requests = list(map(self._make_request, prompts, params, priorities))
        self._run(requests, use_tqdm)
        outputs = [request_output(request) for request in requests]
        if with_answers:
            for prompt, own_params, output in zip(prompts, params, outputs, strict=True):
                AnswerReader(prompt, own_params).read(output)
        return outputs

    def _make_request(
        self, prompt: Prompt, params: SamplingParams | BeamSearchParams, priority: int | None = 0
    ) -> Request:
        params = with_answer_form(params, prompt.answer_form)
        rank = 0 if priority is None else priority
        return self.engine.request_factory.make(f"{next(self._ids)}", prompt, params, priority=rank)

    def _run(self, requests: list[Request], use_tqdm: bool | Callable[..., Any]) -> None:
        """Run requests to their end. Whatever is raised here, none of them stays in the engine."""
        if not (callable(use_tqdm) or isinstance(use_tqdm, bool)):
            raise TypeError(
                f"use_tqdm: expected True, False or a function that makes a progress bar, got {use_tqdm!r:.80}"
            )
        make_bar: Callable[..., Any] = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with self._use.hold(), deferred_interrupt() as interrupt:
            try:
                self.engine.add(*requests)
                unfinished = set(requests)
                with make_bar(total=len(requests), desc="Processed prompts") as bar:
                    # A bar may use this LLM, too, and so have ended the rest.
                    while unfinished and self.engine.has_unfinished_requests:
                        interrupt.deliver()
                        self._use.end_abandoned()
                        ended = unfinished.intersection(request for request in self.engine.step() if request.finished)
                        unfinished -= ended
                        bar.update(len(ended))
                        if any(request.failure is not None for request in ended):
                            break
            finally:
                for request in requests:
                    self._use.end(request)
        for number, request in enumerate(requests):
            if request.failure is not None:
                request.failure.add_note(f"of {len(requests)} prompts, prompts[{number}]")
                raise request.failure

    def _stream(self, request: Request, reader: AnswerReader | None = None) -> Iterator[RequestOutput]:
        try:
            with self._use.hold(), deferred_interrupt():
                self.engine.add(request)
            finished = False
            while not finished:
                with self._use.hold():
                    # Every step advances all requests: a step of another thread may have finished this one.
                    if not request.finished:
                        with deferred_interrupt():
                            self.engine.step()
                    if request.failure is not None:
                        raise request.failure
                    output = delta_output(request)
                finished = output.finished
                if output.has_news:
                    if reader is not None:
                        reader.read(output)
                    yield output
        finally:
            self._use.abandon(request)
