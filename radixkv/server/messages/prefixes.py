"""The prefixes that a request asks to keep cached, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from radixkv.model.text_interface import TextInterface
from radixkv.server.chat_messages import as_messages
from radixkv.server.messages.translation import FIELD_NAMES, Breakpoint
from radixkv.server.translated_chat import translate

# What may follow a prefix that ends in no message of its own: many templates write nothing without a message of the user.
_NEXT_MESSAGE = {"role": "user", "content": ""}


def marked_prefixes(
    chat: Mapping[str, Any], breakpoints: Sequence[Breakpoint], prompt: Sequence[int], loaded: TextInterface
) -> dict[float, Sequence[int]]:
    """The part of a prompt before the last breakpoint of each time to live; empty where the chat template cannot tell.

    The conversation up to the breakpoint is written by itself; what the whole one has in common with it is the prefix. So
    whatever the template does, it is a prefix of the prompt.

    Args:
        chat: the body of the chat completion.
        prompt: the tokens of all of it.
    """
    last = {mark.ttl: mark.messages for mark in breakpoints}
    prefixes: dict[float, Sequence[int]] = {}
    for ttl, messages in last.items():
        needs_next = not messages or messages[-1]["role"] == "system"
        body = translate(
            {
                **chat,
                "messages": [*messages, _NEXT_MESSAGE] if needs_next else messages,
                "add_generation_prompt": False,
                "continue_final_message": False,
            },
            FIELD_NAMES,
        )
        try:
            alone = body.as_prompt(as_messages(body.messages), body.tool_options, loaded).token_ids
        except ValueError:  # some templates refuse conversations that end there
            alone = []
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, prompt, strict=False)))
        prefixes[ttl] = prompt[:length]
    return prefixes
