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

# What may follow a prefix that ends in no message of its own: many templates write nothing without a message of the user.
_NEXT_MESSAGE: Mapping[str, Any] = MappingProxyType({"role": "user", "content": ""})


def marked_prefixes(
    chat: ChatCompletionRequest, breakpoints: Sequence[Breakpoint], prompt: Sequence[int], loaded: TextInterface
) -> dict[float, Sequence[int]]:
    """The part of a prompt before the last breakpoint of each time to live; empty where the chat template cannot tell.

    The conversation up to the breakpoint is written by itself; what the whole one has in common with it is the prefix. So
    whatever the template does, it is a prefix of the prompt.

    Args:
        chat: the request.
        breakpoints: in the order of the prompt.
        prompt: the tokens of all of it.
    """
    last = {mark.ttl: mark.messages for mark in breakpoints}
    prefixes: dict[float, Sequence[int]] = {}
    for ttl, messages in last.items():
        needs_next = not messages or messages[-1]["role"] in ("system", "developer")
        written = [*messages, _NEXT_MESSAGE] if needs_next else messages
        body = chat.model_copy(
            update={
                "messages": [ChatMessage.model_validate(dict(message)) for message in written],
                "add_generation_prompt": False,
                "continue_final_message": False,
            }
        )
        try:
            alone = body.as_prompt(as_messages(body.messages), body.tool_options, loaded).token_ids
        except ValueError:  # some templates refuse conversations that end there
            alone = []
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, prompt, strict=False)))
        prefixes[ttl] = prompt[:length]
    return prefixes
