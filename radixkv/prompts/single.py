"""One prompt or one conversation, for calls that accept either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from radixkv.model.text_interface import TextInterface
from radixkv.prompts.chat_options import DEFAULT_CHAT_OPTIONS, ChatOptions
from radixkv.prompts.conversation import Message, as_chat_prompts
from radixkv.prompts.prompt import Prompt, PromptInput, as_mapping, as_prompts, is_token_ids


def is_prompt(prompt: Any) -> bool:
    """Whether this is a prompt: text, token ids or a dictionary. If not, it has to be a conversation."""
    return isinstance(prompt, str | Mapping) or is_token_ids(prompt)


def as_single_prompt(
    prompt: PromptInput | Sequence[Message],
    loaded: TextInterface,
    cache_salt: str | None = None,
    cache: Mapping[str, bool] | None = None,
    options: ChatOptions = DEFAULT_CHAT_OPTIONS,
) -> Prompt:
    """One prompt, or one conversation, tokenized.

    Args:
        prompt: as for `LLM.generate`, or as for `LLM.chat`.
        cache_salt: only prompts with the same one share blocks; it replaces a prompt's own.
        cache: whether to read the cache, and whether to write into it; likewise.
        options: for a conversation.

    Raises:
        TypeError, ValueError: it is neither, or several of them, or a prompt with options for a conversation.
    """
    if is_prompt(prompt):
        names = [option.name for option in fields(options) if getattr(options, option.name) is not option.default]
        if names:
            raise ValueError(f"{', '.join(names)}: expected a conversation, got a prompt")
        given = {name: value for name, value in (("cache_salt", cache_salt), ("cache", cache)) if value is not None}
        (single,) = as_prompts({**as_mapping(prompt), **given}, loaded)
        return single
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise TypeError(
            f"prompt: expected a string, token ids, a dictionary or a list of messages, got {type(prompt).__name__}"
        )
    if _is_several(prompt):
        raise TypeError(f"prompt: expected one prompt or conversation, got a list of prompts, {prompt!r:.80}")
    conversation: Any = prompt
    prompts = as_chat_prompts(conversation, loaded, cache_salt, cache, options)
    if len(prompts) != 1:
        raise ValueError(f"prompt: expected one conversation, got {len(prompts)}")
    return prompts[0]


def _is_several(prompts: Sequence[Any]) -> bool:
    """Whether this is a list of prompts, as `LLM.generate` takes it."""
    first = prompts[0] if len(prompts) else None
    if isinstance(first, Mapping):
        return "role" not in first and not first.keys().isdisjoint(("prompt", "prompt_token_ids"))
    return is_prompt(first)
