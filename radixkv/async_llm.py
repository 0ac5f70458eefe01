"""`AsyncLLM`: many streams at once in an asyncio program, over one engine thread."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from radixkv.cache import Pin
from radixkv.cache.arguments import is_whole
from radixkv.engine.explain_prompts import add_tiers, decode_explanations, explain_cached
from radixkv.engine.request_output import with_texts
from radixkv.llm import LLM
from radixkv.llm_options import LLM_OPTIONS, LLMOptions
from radixkv.model.loader import LoadedModel
from radixkv.observe.prompt_explanation import PromptExplanation
from radixkv.option_words import refuse_unknown
from radixkv.outputs import BeamSearchOutput, RequestMetrics, RequestOutput
from radixkv.prompts import (
    ChatOptions,
    Message,
    Prompt,
    PromptInput,
    as_chat_prompts,
    as_prompts,
    as_single_prompt,
    is_token_ids,
)
from radixkv.sampling_defaults import check_beam_search_params, given_or_default
from radixkv.sampling_params import BeamSearchParams, SamplingParams, prompt_only_params
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.serving.answer_reader import AnswerReader
from radixkv.serving.async_engine import AsyncEngine
from radixkv.serving.request_stream import RequestStream
from radixkv.tools.definitions import as_tool_options
from radixkv.vllm_options import CALLS, takes_vllm_options, without_vllm_options


class AsyncLLM(AsyncEngine):
    """A language model for asyncio programs; its streams share the prefixes of their prompts.

    One thread runs the engine and another one tokenizes; neither blocks the event loop. The object belongs to the event loop
    that uses it first. Use it in ``async with``, or await its `shutdown`: one that is merely dropped is stopped when it is
    collected, with a ResourceWarning, and then writes nothing more of what is cached into its ``disk_cache``.

    Args:
        model: as for `LLM`, or an `LLM`, which may not be used elsewhere until `shutdown`. Loading a model takes seconds,
            during which the event loop is blocked: do it before serving starts.
        max_queue: most unfinished requests beyond the ``max_num_seqs`` sequences that run at the same time; None: any number.
            A stream counts until it has been read to its end, so that slow readers are bounded, too.
        max_seqs_per_request: largest ``n`` and beam width; None: ``max_num_seqs``.
        tenants: each tenant's share, by name; others have a weight of 1. Tenants share sequences, tokens, blocks and queue
            slots fairly; a tenant without competition gets everything.
        options: as for `LLM`.

    Raises:
        Exception: what `LLM` raises, unless ``model`` is an `LLM`.
        TypeError: ``tenants`` does not map names to shares.
        ValueError: ``max_queue`` or ``max_seqs_per_request`` is impossible, or options are given for a model that is already
            running.
        RuntimeError: the `LLM` has unfinished requests, another `AsyncLLM` runs it, or another process made it.
    """

    def __init__(
        self,
        model: Any | str | Path | LLM | None = None,
        *,
        max_queue: int | None = None,
        max_seqs_per_request: int | None = None,
        tenants: Mapping[str, TenantShare] | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        own = {"max_queue": (max_queue, 0), "max_seqs_per_request": (max_seqs_per_request, 1)}
        engine_options: Any = without_vllm_options(options)
        refuse_unknown("AsyncLLM.__init__", engine_options, {*own, "tenants", *LLM_OPTIONS})
        for name, (value, low) in own.items():
            if value is not None and (not is_whole(value) or value < low):
                raise ValueError(f"{name}: expected a whole number of at least {low} or None, got {value!r}")
        if not isinstance(tenants, Mapping | None) or not all(
            isinstance(name, str) and isinstance(share, TenantShare) for name, share in (tenants or {}).items()
        ):
            raise TypeError(f"tenants: expected a TenantShare for each name, got {tenants!r:.80}")
        if isinstance(model, LLM) and engine_options:
            raise ValueError(f"engine options belong to the LLM that was passed, got {sorted(engine_options)}")
        engine = model.engine if isinstance(model, LLM) else LLM(model, **engine_options).engine
        super().__init__(engine, max_queue=max_queue, max_seqs_per_request=max_seqs_per_request, tenants=tenants)

    @takes_vllm_options(CALLS)
    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = 0,
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, piece by piece; waiting requests with a lower ``priority`` are admitted earlier.

        All arguments are copied by this call: what a program changes in them later has no effect.

        Args:
            prompt: as text, token ids or a dictionary; see `LLM.generate`.
            sampling_params: how to choose tokens; by default `LLM.get_default_sampling_params`.
            request_id: by which `abort` finds it.
            priority: among the tenant's own requests. None: 0.
            tenant: on whose behalf. Tenants share the engine fairly; only ``cache_salt`` separates what they cache.

        Yields:
            The request with what is new in each of its outputs: ``text`` and ``token_ids`` hold only that. The last one
            has ``finished`` set. Leaving the iteration early, in whatever way, aborts the request.

        Raises:
            TypeError, ValueError: the prompt, a parameter or the request id is impossible.
            QueueFullError: too many requests are unfinished; it has a ``retry_after``.
            DrainingError: new requests are refused, after `start_draining` or `shutdown`.
            StepFailedError, NoBlocksLeftError, EngineDeadError: it could not be finished.
        """
        own_prompt, own_params = _copied(prompt), copy.deepcopy(sampling_params)
        return self._stream(lambda loaded: as_prompts(own_prompt, loaded), own_params, request_id, priority, tenant)

    @takes_vllm_options(CALLS)
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
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
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, or continue its last message, as `LLM.chat` does; otherwise like `generate`.

        ``text`` is what the model writes, markers of reasoning and calls included. ``pieces`` has what is new as text,
        reasoning and tool calls; when an answer has ended, its ``answer`` has the whole of it in these parts.
        """
        own_messages, own_params = copy.deepcopy((messages, sampling_params))
        own_tools, own_choice, own_kwargs, own_cache = copy.deepcopy((tools, tool_choice, chat_template_kwargs, cache))

        def make_prompts(loaded: LoadedModel) -> list[Prompt]:
            options = ChatOptions(
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=as_tool_options(own_tools, own_choice, parallel_tool_calls),
                chat_template_kwargs=own_kwargs,
            )
            return as_chat_prompts(own_messages, loaded, cache_salt, own_cache, options)

        return self._stream(make_prompts, own_params, request_id, priority, tenant, with_answers=True)

    def stream_prompt(
        self,
        make_prompt: Callable[[LoadedModel], Prompt],
        sampling_params: SamplingParams,
        *,
        priority: int | None = 0,
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation that a function writes and tokenizes in the tokenizer's thread; otherwise like `chat`.

        Args:
            make_prompt: given the model.
            sampling_params: must not be changed any more.
        """
        return self._stream(
            lambda loaded: [make_prompt(loaded)], sampling_params, None, priority, tenant, with_answers=True
        )

    @takes_vllm_options(CALLS)
    async def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int | None = 0,
        tenant: str = "",
    ) -> BeamSearchOutput:
        """The ``beam_width`` best continuations of a prompt, best first; after an abort, those that were complete.

        Raises:
            Exception: what `generate` raises.
        """
        check_beam_search_params(params)
        own_prompt, own_params = _copied(prompt), copy.deepcopy(params)
        _, stream = await self._submit_one(
            lambda loaded: as_prompts(own_prompt, loaded), own_params, request_id, priority, tenant
        )
        try:
            output = await anext(stream)
        finally:
            stream.close()
        assert isinstance(output, BeamSearchOutput)
        return await asyncio.to_thread(with_texts, output, self.loaded.tokenizer)

    async def explain(
        self,
        prompt: PromptInput | Sequence[Message],
        *,
        cache_salt: str | None = None,
        cache: Mapping[str, bool] | None = None,
        tenant: str = "",
    ) -> PromptExplanation:
        """Which tokens of a prompt would be reused now, and why not more, as `LLM.explain` says. Runs and changes nothing."""
        own_prompt, own_cache = _copied(prompt), copy.copy(cache)
        single = await self.run_tokenizer(
            lambda loaded: as_single_prompt(own_prompt, loaded, cache_salt, own_cache), tenant=tenant
        )
        (explanation,) = await self.explain_prompts([single], tenant=tenant, look_elsewhere=True)
        return explanation

    async def explain_prompts(
        self, prompts: Sequence[Prompt], *, tenant: str = "", look_elsewhere: bool = False
    ) -> list[PromptExplanation]:
        """Explain prompts that have been tokenized already; otherwise like `explain`.

        All streams wait while the tree is searched, so pass few prompts at once; all else happens in other threads.

        Args:
            look_elsewhere: also say where another namespace has the same tokens; not for callers who must not learn that.
        """
        explained, tiers = await self.call(
            lambda engine: (explain_cached(engine, prompts, look_elsewhere), engine.tiers)
        )
        decoded = await self.run_tokenizer(
            lambda loaded: decode_explanations(explained, prompts, loaded.tokenizer), tenant=tenant
        )
        # In a thread, because a shared store may be slow.
        return decoded if tiers is None else await asyncio.to_thread(add_tiers, decoded, prompts, tiers)

    async def pin(
        self,
        prompt: PromptInput | Sequence[Message],
        ttl: float | None = None,
        *,
        cache_salt: str | None = None,
        tenant: str = "",
    ) -> Pin:
        """Keep a prompt or a conversation from eviction, as `LLM.pin` does. Its uncached part is computed now.

        Raises:
            PinQuotaExceeded: half of all blocks would be pinned; nothing is computed then.
            Exception: what `generate` raises.
        """
        own_prompt = _copied(prompt)
        single = await self.run_tokenizer(
            lambda loaded: as_single_prompt(own_prompt, loaded, cache_salt), tenant=tenant
        )
        return await self.pin_prompt(single, ttl, tenant=tenant)

    async def pin_prompt(self, prompt: Prompt, ttl: float | None = None, *, tenant: str = "") -> Pin:
        """Keep an already tokenized prompt from eviction; otherwise like `pin`."""
        await self.call(lambda engine: engine.check_pin(prompt, ttl))
        (stream,) = await self.submit([prompt], prompt_only_params(), tenant=tenant)
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()
        return await self.call(lambda engine: engine.pins.pin(prompt.token_ids, prompt.namespace, ttl))

    async def pins(self) -> list[Pin]:
        """The active pins."""
        return await self.call(lambda engine: engine.cache.pins())

    async def unpin(self, pin: Pin) -> None:
        """Release a pin, so that its prompt can be evicted again."""
        await self.call(lambda engine: engine.pins.release(pin))

    async def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix: see `LLM.reset_prefix_cache`."""
        return await self.call(lambda engine: engine.reset_prefix_cache())

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use where none are given: see `LLM.get_default_sampling_params`."""
        return given_or_default(None, self.loaded.sampling_defaults)

    async def _stream(
        self,
        make_prompts: Callable[[LoadedModel], list[Prompt]],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int | None,
        tenant: str,
        *,
        with_answers: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        given = given_or_default(params, self.loaded.sampling_defaults)
        prompt, stream = await self._submit_one(make_prompts, given, request_id, priority, tenant)
        reader = AnswerReader(prompt, given) if with_answers else None
        try:
            async for piece in stream:
                assert isinstance(piece, RequestOutput)
                if reader is not None:
                    reader.read(piece)
                yield piece
        finally:
            stream.close()

    async def _submit_one(
        self,
        make_prompts: Callable[[LoadedModel], list[Prompt]],
        params: SamplingParams | BeamSearchParams,
        request_id: str | None,
        priority: int | None,
        tenant: str,
    ) -> tuple[Prompt, RequestStream]:
        if not isinstance(tenant, str):
            raise TypeError(f"tenant: expected a string, got {tenant!r:.80}")
        params = params.for_vocabulary(self.loaded.vocab_size)  # before anything is computed with an impossible value
        arrived = time.monotonic()
        with self._early_aborts.preparing(request_id):
            prompts = await self.run_tokenizer(make_prompts, tenant=tenant)
            if len(prompts) != 1:
                raise ValueError(f"prompt: expected one prompt or conversation, got {len(prompts)}")
            (stream,) = await self.submit(
                prompts,
                params,
                request_id,
                priority=0 if priority is None else priority,
                tenant=tenant,
                times=[RequestMetrics(arrived)],
            )
        return prompts[0], stream


def _copied(prompt: Any) -> Any:
    """A prompt, or a part of it, that shares nothing with this one; token ids, which may be many, are copied as a whole."""
    if isinstance(prompt, Mapping):
        return {key: _copied(value) for key, value in prompt.items()}
    return copy.copy(prompt) if is_token_ids(prompt) else copy.deepcopy(prompt)
