"""`LLM`: offline generation, with vLLM's names and shapes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from radixkv.cache import Pin
from radixkv.engine.engine import Engine
from radixkv.engine.interrupts import deferred_interrupt
from radixkv.engine.request_output import beam_output, delta_output, request_output
from radixkv.model.loader import load_model
from radixkv.observe.explain import PromptExplanation, decode_explanation
from radixkv.observe.inspect.snapshot import CacheSnapshot, take_snapshot
from radixkv.outputs import BeamSearchOutput, RequestOutput
from radixkv.prompts import (
    Message,
    Prompt,
    PromptInput,
    as_chat_prompts,
    as_prompts,
)
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.scheduling.request import Request


class LLM:
    """A language model whose prompts share the keys and values of their common prefixes.

    Several threads may use one: a `generate` of one waits for that of another, and streams take turns step by step. (For many
    users at once, see `AsyncLLM`.)

    Args:
        model: hub id, local folder, GGUF file or a loaded transformers model; None: the default model, SmolLM2-135M-Instruct.
        tokenizer: only for a loaded model: its tokenizer.
        dtype: "auto" (bfloat16 on a GPU, float32 on a CPU), or a name or torch dtype.
        device: "auto" (a GPU if there is one), or where to run. A loaded model stays where it is.
        max_model_len: prompt and generated tokens together at most; None: what the model was made for.
        block_size: tokens a block.
        kv_cache_memory_bytes: bytes for keys and values (by default 1 GiB on a CPU).
        gpu_memory_utilization: without a number of blocks or bytes, the share of a GPU's memory to be used in all.
        kv_cache_dtype: "auto" stores keys and values in the model's type; "fp8" in a byte each (float8_e4m3fn, with a scale
            a layer and head), so that twice as many tokens fit as in bfloat16, for slightly different answers.
        num_blocks: the same as a number of blocks.
        max_num_batched_tokens: tokens a step at most; longer prompts are computed in chunks (8,192 on a GPU, 512 on a CPU).
        max_num_seqs: sequences that run side by side at most (256 on a GPU, 64 on a CPU).
        enable_prefix_caching: False: no prompt reuses another's computation.
        attention_backend: "torch", "triton", or "auto": Triton on a GPU, torch on a CPU.
        enforce_eager: on a GPU, decode without CUDA graphs.
        enable_torch_compile: compile the model's decoder layers with `torch.compile`, which takes its time at the start.
        async_scheduling: launch a step before the tokens of the one before are fetched. None: on a GPU.
        seed: where the random numbers begin of requests that bring no seed.
        eviction_policy: what goes first when blocks run out: lru, lfu, segmented-lru, priority, cost-aware or adaptive.
        kv_events_endpoint: publish KV events over ZeroMQ there, such as ``tcp://*:5557``, as vLLM does.
        kv_events_replay_endpoint: where subscribers ask for events that they missed.
        record_trace: write a line a finished request to this file, without any text, for `radixkv simulate`.

    Raises:
        ModelLoadError: the model is not there or cannot be read; the message says what to do.
        UnsupportedModelError: the model cannot run over blocks; the message says why.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        model: Any | str | Path | None = None,
        *,
        tokenizer: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_memory_bytes: int | None = None,
        num_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_dtype: str = "auto",
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool = True,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        enable_torch_compile: bool = False,
        async_scheduling: bool | None = None,
        seed: int = 0,
        eviction_policy: str = "lru",
        kv_events_endpoint: str | None = None,
        kv_events_replay_endpoint: str | None = None,
        record_trace: str | Path | None = None,
    ) -> None:
        loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device=device, max_model_len=max_model_len)
        self.engine = Engine(
            loaded,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            attention_backend=attention_backend,
            enforce_eager=enforce_eager,
            enable_torch_compile=enable_torch_compile,
            async_scheduling=async_scheduling,
            seed=seed,
            eviction_policy=eviction_policy,
            kv_events_endpoint=kv_events_endpoint,
            kv_events_replay_endpoint=kv_events_replay_endpoint,
            record_trace=None if record_trace is None else Path(record_trace),
        )
        self._ids = itertools.count()
        # Whose turn it is with the engine, which is single-threaded. A stream's finalizer may run within another call.
        self._turn = threading.RLock()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete prompts: strings, or dictionaries with ``prompt`` or ``prompt_token_ids`` (see `radixkv.prompts`).

        Args:
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar.
            priority: for all prompts, or one for each; lower values are handled earlier.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            TypeError, ValueError: a prompt or parameter is not possible; nothing has run then.
        """
        return self._generate(as_prompts(prompts, self.engine.loaded), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        cache_salt: str | None = None,
        cache: Mapping[str, bool] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of ``{"role": ..., "content": ...}``; otherwise like `generate`.

        Args:
            add_generation_prompt: False: do not begin the assistant's message; what the model writes may begin any.
            continue_final_message: go on within the last message, the assistant's; needs ``add_generation_prompt=False``.
        """
        prompts = as_chat_prompts(
            messages,
            self.engine.loaded,
            cache_salt,
            cache,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._generate(prompts, sampling_params, use_tqdm, priority)

    def stream(
        self,
        prompt: PromptInput | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, or answer one conversation, piece by piece.

        Yields:
            The request with what is new in each of its outputs: ``text`` and ``token_ids`` hold only that. The last one
            has ``finished`` set. Leaving the iteration early aborts the request.
        """
        single = self._single("stream", prompt, None, None)
        return self._stream(self._make(single, SamplingParams() if sampling_params is None else sampling_params))

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` best continuations of each prompt, best first; equal to transformers' beam search."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params: expected BeamSearchParams, got {type(params).__name__}")
        requests = [self._make(prompt, params) for prompt in as_prompts(prompts, self.engine.loaded)]
        self._run(requests, use_tqdm)
        return [beam_output(request, self.engine.loaded) for request in requests]

    def explain(
        self,
        prompt: PromptInput | Sequence[Message],
        *,
        cache_salt: str | None = None,
        cache: Mapping[str, bool] | None = None,
    ) -> PromptExplanation:
        """What of a prompt or a conversation would be reused now, and why not more. Runs and changes nothing.

        Args:
            cache_salt, cache: as for `chat`; a prompt may also bring its own.
        """
        single = self._single("explain", prompt, cache_salt, cache)
        read = single.read_cache and self.engine.enable_prefix_caching
        with self._turn:
            explanation = self.engine.cache.explain(single.token_ids, single.namespace, read)
        return decode_explanation(explanation, single.token_ids, self.get_tokenizer().decode)

    def pin(
        self,
        prompt: PromptInput | Sequence[Message],
        ttl: float | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Pin:
        """Keep a prompt from eviction, for ``ttl`` seconds or until `unpin`. What is not cached of it is computed now.

        Raises:
            PinQuotaExceeded: half of all blocks would be pinned.
        """
        single = self._single("pin", prompt, cache_salt, None)
        cache = self.engine.cache
        whole = len(single.token_ids) // cache.block_size * cache.block_size
        with self._turn:
            if cache.match(single.token_ids, single.namespace) < whole:
                self._run([self._make(single, SamplingParams(max_tokens=1, temperature=0.0))], use_tqdm=False)
            return cache.pin(single.token_ids, single.namespace, ttl)

    def pins(self) -> list[Pin]:
        """The pins that are in force."""
        with self._turn:
            return self.engine.cache.pins()

    def unpin(self, pin: Pin) -> None:
        """Let a pinned prompt be evicted again."""
        with self._turn:
            self.engine.cache.release(pin)

    def inspect(self) -> CacheSnapshot:
        """What is cached now, with texts: as a tree, figures, JSON or a picture (see `radixkv.observe.inspect`)."""
        pool = self.engine.pool
        with self._turn:
            return take_snapshot(self.engine.cache, self.get_tokenizer().decode, pool.block_nbytes)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.loaded.require_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, pinned ones too; True when nothing is cached any more (no request was running)."""
        with self._turn:
            self.engine.reset_prefix_cache()
            return self.engine.cache.num_held_blocks == 0

    def _single(
        self,
        caller: str,
        prompt: PromptInput | Sequence[Message],
        cache_salt: str | None,
        cache: Mapping[str, bool] | None,
    ) -> Prompt:
        """One prompt, or one conversation."""
        if isinstance(prompt, str | Mapping):
            given = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
            options = {"cache_salt": cache_salt, "cache": cache}
            given |= {name: value for name, value in options.items() if value is not None}
            (single,) = as_prompts(given, self.engine.loaded)
            return single
        prompts = as_chat_prompts(prompt, self.engine.loaded, cache_salt, cache)
        if len(prompts) != 1:
            raise ValueError(f"{caller} takes one conversation, got {len(prompts)}")
        return prompts[0]

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Sequence[int],
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not isinstance(sampling_params, Sequence):
            raise TypeError(f"sampling_params: expected SamplingParams, got {type(sampling_params).__name__}")
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params: expected one for each of {len(prompts)} prompts, got {len(sampling_params)}"
            )
        priorities = priority if isinstance(priority, Sequence) else [priority] * len(prompts)
        if len(priorities) != len(prompts):
            raise ValueError(f"priority: expected one for each of {len(prompts)} prompts, got {len(priorities)}")
        requests = [self._make(*each) for each in zip(prompts, sampling_params, priorities, strict=True)]
        self._run(requests, use_tqdm)
        return [request_output(request) for request in requests]

    def _make(self, prompt: Prompt, params: SamplingParams | BeamSearchParams, priority: int = 0) -> Request:
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise TypeError(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
        return self.engine.make_request(
            f"{next(self._ids)}",
            prompt.token_ids,
            params,
            prompt=prompt.text,
            namespace=prompt.namespace,
            read_cache=prompt.read_cache,
            write_cache=prompt.write_cache,
            priority=priority,
        )

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Run requests to their end. However this is left, none of them stays in the engine."""
        with self._turn:
            try:
                for request in requests:
                    self.engine.add(request)
                with (
                    deferred_interrupt() as interrupt,
                    tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as bar,
                ):
                    while not all(request.finished for request in requests):
                        interrupt.raise_if_requested()
                        bar.update(sum(request.finished for request in self.engine.step()))
            finally:
                self._abort_unfinished(requests)
        for request in requests:
            if request.failure is not None:
                raise request.failure

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        try:
            with self._turn:
                self.engine.add(request)
            finished = False
            while not finished:
                with self._turn:
                    # Whoever steps the engine advances all requests: this one may have ended since the last piece.
                    if not request.finished:
                        with deferred_interrupt() as interrupt:
                            self.engine.step()
                            interrupt.raise_if_requested()
                    if request.failure is not None:
                        raise request.failure
                    output = delta_output(request)
                finished = output.finished
                if finished or any(part.token_ids for part in output.outputs):
                    yield output
        finally:
            with self._turn:
                self._abort_unfinished([request])

    def _abort_unfinished(self, requests: list[Request]) -> None:
        for request in requests:
            if not request.finished:
                self.engine.abort(request.request_id)
