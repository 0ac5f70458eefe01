"""`LLM`: offline generation, with vLLM's names and shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from radixkv.engine.engine import Engine
from radixkv.engine.interrupts import deferred_interrupt
from radixkv.engine.model_loader import load_model
from radixkv.engine.output import beam_output, delta_output, request_output
from radixkv.engine.request import Request
from radixkv.outputs import BeamSearchOutput, RequestOutput
from radixkv.prompts import (
    Message,
    Prompt,
    PromptInput,
    as_chat_prompts,
    as_prompts,
)
from radixkv.sampling_params import BeamSearchParams, SamplingParams


class LLM:
    """A language model whose prompts share the keys and values of their common prefixes.

    Args:
        model: hub id, local folder, GGUF file or a loaded transformers model; None: the default model, SmolLM2-135M-Instruct.
        tokenizer: only for a loaded model: its tokenizer.
        dtype: "auto" (bfloat16 on a GPU, float32 on a CPU), or a name or torch dtype.
        device: "auto" (a GPU if there is one), or where to run. A loaded model stays where it is.
        max_model_len: prompt and generated tokens together at most; None: what the model was made for.
        block_size: tokens a block.
        kv_cache_memory_bytes: bytes for keys and values (by default 1 GiB on a CPU).
        gpu_memory_utilization: without a number of blocks or bytes, the share of a GPU's memory to be used in all.
        num_blocks: the same as a number of blocks.
        max_num_batched_tokens: tokens a step at most; longer prompts are computed in chunks (8,192 on a GPU, 512 on a CPU).
        max_num_seqs: sequences that run side by side at most (256 on a GPU, 64 on a CPU).
        enable_prefix_caching: False: no prompt reuses another's computation.
        attention_backend: "torch", "triton", or "auto": Triton on a GPU, torch on a CPU.
        enforce_eager: on a GPU, decode without CUDA graphs.
        async_scheduling: launch a step before the tokens of the one before are fetched. None: on a GPU.
        seed: where the random numbers begin of requests that bring no seed.

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
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool = True,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        seed: int = 0,
    ) -> None:
        loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device=device, max_model_len=max_model_len)
        self.engine = Engine(
            loaded,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            attention_backend=attention_backend,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            seed=seed,
        )
        self._ids = itertools.count()

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
        cache_salt: str | None = None,
        cache: Mapping[str, bool] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of ``{"role": ..., "content": ...}``; otherwise like `generate`."""
        return self._generate(
            as_chat_prompts(messages, self.engine.loaded, cache_salt, cache), sampling_params, use_tqdm, priority
        )

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
        if isinstance(prompt, str | Mapping):
            (single,) = as_prompts(prompt, self.engine.loaded)
        else:
            prompts = as_chat_prompts(prompt, self.engine.loaded)
            if len(prompts) != 1:
                raise ValueError(f"stream takes one conversation, got {len(prompts)}")
            single = prompts[0]
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

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.loaded.require_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; True when nothing at all is cached any more (no request was running)."""
        self.engine.reset_prefix_cache()
        return self.engine.cache.num_held_blocks == 0

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Sequence[int],
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
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
            self.engine.add(request)
            while not request.finished:
                with deferred_interrupt() as interrupt:
                    self.engine.step()
                    interrupt.raise_if_requested()
                if request.failure is not None:
                    raise request.failure
                output = delta_output(request)
                if output.finished or any(part.token_ids for part in output.outputs):
                    yield output
        finally:
            self._abort_unfinished([request])

    def _abort_unfinished(self, requests: list[Request]) -> None:
        for request in requests:
            if not request.finished:
                self.engine.abort(request.request_id)
