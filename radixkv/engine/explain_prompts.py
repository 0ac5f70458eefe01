"""Explains prompts in three parts: only the first needs the engine's thread, and the last may wait for a store elsewhere.

::

    explain_cached           decode_explanations           add_tiers
    what the tree has        token ids to texts            what tiers below have of the rest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from radixkv.cache import Explanation
from radixkv.cache.tokens import encode
from radixkv.engine.engine import Engine
from radixkv.engine.kv_tiers import KVTiers
from radixkv.observe.prompt_explanation import Decode, DecodeToken, PromptExplanation, decode_explanation
from radixkv.prompts import Prompt
from radixkv.sampling.detokenizer import decode_token, decode_tokens
from radixkv.scheduling.request_validation import validate_token_ids


def explain_cached(engine: Engine, prompts: Sequence[Prompt], look_elsewhere: bool) -> list[Explanation]:
    """What of each prompt would be reused now, and why not more.

    Args:
        look_elsewhere: also say where another namespace has the same tokens; not for callers who must not know that.

    Raises:
        TypeError, ValueError: what `validate_token_ids` raises.
    """
    return [
        engine.cache.explain(
            validate_token_ids(prompt.token_ids, engine.loaded.vocab_size),
            prompt.namespace,
            prompt.read_cache and engine.enable_prefix_caching,
            look_elsewhere=look_elsewhere,
        )
        for prompt in prompts
    ]


def decode_explanations(
    explanations: Sequence[Explanation], prompts: Sequence[Prompt], tokenizer: Any
) -> list[PromptExplanation]:
    """The same with texts; where there is no tokenizer, these are token ids."""
    decode: Decode = _written if tokenizer is None else partial(decode_tokens, tokenizer)
    decode_one: DecodeToken = str if tokenizer is None else partial(decode_token, tokenizer)
    return [
        decode_explanation(each, list(prompt.token_ids), decode, decode_one)
        for each, prompt in zip(explanations, prompts, strict=True)
    ]


def add_tiers(
    explanations: Sequence[PromptExplanation], prompts: Sequence[Prompt], tiers: KVTiers | None
) -> list[PromptExplanation]:
    """The same with what tiers, if there are any, have of prompts that may read the cache."""
    return [
        replace(each, below=tiers.find(encode(prompt.token_ids), prompt.namespace, each.num_reused_tokens))
        if tiers is not None and prompt.read_cache
        else each
        for each, prompt in zip(explanations, prompts, strict=True)
    ]


def _written(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))
