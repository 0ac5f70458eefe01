"""Makes the engine's requests: validates what a caller asks for, and completes it from the model and the engine's options."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.arguments import is_whole
from radixkv.config import ResolvedEngineConfig
from radixkv.engine.resumption import resume_sequences
from radixkv.model.loader import LoadedModel
from radixkv.prompts import Prompt, tokenize_bad_words
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.request_validation import Capacity, validate_capacity, validate_logits, validate_prompt


class RequestFactory:
    """Makes requests for one engine without changing it: any thread may call this while another one steps."""

    def __init__(
        self, loaded: LoadedModel, config: ResolvedEngineConfig, capacity: Capacity, grammars: GrammarCompiler
    ) -> None:
        self.grammars = grammars
        self._loaded = loaded
        self._capacity = capacity
        self._enable_prefix_caching = config.enable_prefix_caching

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        tenant: str = "",
        bad_words: Sequence[Sequence[int]] | None = None,
    ) -> Request:
        """A request that `Engine.add` can queue.

        Args:
            request_id: unique among unfinished requests.
            prompt: its ``answer_form`` is part of ``params`` already (`with_answer_form`).
            params: how to sample, or search.
            priority: lower values are admitted earlier, preempted later and, with the policy "priority", evicted later.
            tenant: on whose behalf: tenants share fairly (see `radixkv.scheduling.fair_shares`), and a priority ranks
                requests only against others of the same tenant.
            bad_words: the token ids of the parameters' ``bad_words``, from `tokenize_bad_words`; None: tokenized here.

        Raises:
            ValueError, TypeError: the prompt is empty, an id is outside the vocabulary, ``priority`` is not a whole number,
                ``tenant`` is not a string, no answer can satisfy ``structured_outputs``, something needs logits that the
                model does not compute, or the prompt's ``resume`` does not belong to this request.
            PromptTooLongError: the prompt leaves no room for a token in the model's length.
            RequestTooLargeError: more sequences, or blocks for several of them, than there are.
        """
        if not is_whole(priority):
            raise TypeError(f"priority: expected a whole number, got {priority!r}")
        if not isinstance(tenant, str):
            raise TypeError(f"tenant: expected a string, got {tenant!r}")
        loaded = self._loaded
        params = params.for_vocabulary(loaded.vocab_size)
        if isinstance(params, SamplingParams) and bad_words is None:
            bad_words = tokenize_bad_words(params.bad_words or (), loaded)
        if params.stop_strings:
            loaded.require_tokenizer()
        tokens = self.validate_prompt(prompt.token_ids)
        # Nothing can follow the token that ends what a grammar asks for.
        ignore_eos = params.ignore_eos and params.structured_outputs is None
        request = Request(
            request_id,
            prompt.text,
            tokens,
            params,
            seed=params.seed if isinstance(params, SamplingParams) else None,
            max_new_tokens=self._max_new_tokens(len(tokens), params.max_tokens),
            end_token_ids=frozenset() if ignore_eos else loaded.eos_token_ids,
            namespace=prompt.namespace,
            read_cache=prompt.read_cache and self._enable_prefix_caching,
            write_cache=prompt.write_cache and self._enable_prefix_caching,
            priority=int(priority),
            bad_words=bad_words or (),
            prediction=prompt.prediction,
            tenant=tenant,
            grammar=None if params.structured_outputs is None else self.grammars.compile(params.structured_outputs),
        )
        validate_capacity(request, self._capacity)
        validate_logits(request, self._capacity.num_logits)
        if prompt.resume:
            resume_sequences(request, prompt.resume, loaded.tokenizer, loaded.vocab_size)
        return request

    def validate_prompt(self, token_ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """A prompt of the engine's model as int32.

        Raises:
            TypeError, ValueError, PromptTooLongError: what `radixkv.scheduling.request_validation.validate_prompt` raises.
        """
        loaded = self._loaded
        return validate_prompt(token_ids, loaded.vocab_size, loaded.max_model_len, loaded.original_max_model_len)

    def _max_new_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        left = self._loaded.max_model_len - num_prompt_tokens
        return left if max_tokens is None else min(left, max_tokens)
