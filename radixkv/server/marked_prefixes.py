"""The prefixes that a request asks to keep cached, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from radixkv.model.text_interface import TextInterface
from radixkv.server.chat_messages import ChatMessage, as_messages
from radixkv.server.chat_request import ChatCompletionRequest
from radixkv.server.prompt_caching import Breakpoint

# What may follow a prefix: many templates write nothing without a user's message, or write the last message differently.
_NEXT_MESSAGE: Mapping[str, Any] = MappingProxyType({"role": "user", "content": ""})


def marked_prefixes(
    chat: ChatCompletionRequest, breakpoints: Sequence[Breakpoint], prompt: Sequence[int], loaded: TextInterface
) -> dict[float, Sequence[int]]:
    """The part of a prompt before the last breakpoint of each time to live; empty where the chat template cannot tell.

    The template writes the conversation up to the breakpoint by itself and, unless that is already a prefix of the prompt,
    with an empty message after it. The result is the longest prefix that either shares with the prompt.

    Args:
        breakpoints: in the order of the prompt.
        prompt: the tokens of all of it.
    """
    last = {mark.ttl: mark.messages for mark in breakpoints}
    prefixes: dict[float, Sequence[int]] = {}
    for ttl, messages in last.items():
        alone = _written(chat, messages, loaded)
        length = _common_length(alone, prompt)
        if length < len(alone) or not alone:
            length = max(length, _common_length(_written(chat, [*messages, _NEXT_MESSAGE], loaded), prompt))
        prefixes[ttl] = prompt[:length]
    return prefixes


def _written(
    chat: ChatCompletionRequest, messages: Sequence[Mapping[str, Any]], loaded: TextInterface
) -> Sequence[int]:
    """Tokens of other messages in place of the request's; none where the template refuses conversations that end there."""
    body = chat.model_copy(
        update={
            "messages": [ChatMessage.model_validate(dict(message)) for message in messages],
            "add_generation_prompt": False,
            "continue_final_message": False,
        }
    )
    try:
        return body.as_prompt(as_messages(body.messages), body.chat_options, loaded).token_ids
    except (TypeError, ValueError):
        return []


def _common_length(some: Sequence[int], others: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))
