"""Changes conversations where a chat template does not take them as they are, so that it writes all of their content.

Each function takes messages as chat templates expect them, and returns others; it changes none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.tools.formats.base import CallFormat, as_object


def system_messages_in_user_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For a template that takes system messages at the beginning only: later ones become part of user messages."""
    joined = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    later = messages[len(joined) :]
    for _, group in itertools.groupby(later, key=lambda message: message["role"] in ("system", "user")):
        turn = list(group)
        if any(message["role"] == "system" for message in turn):
            turn = [{"role": "user", "content": "\n\n".join(message["content"] for message in turn)}]
        joined.extend(turn)
    return joined


def one_call_per_message(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For a template that writes only the first call of a message: each call gets a message, which its result follows."""
    separate: list[Mapping[str, Any]] = []
    begin = 0
    while begin < len(messages):
        message = messages[begin]
        end = begin + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = list(messages[begin + 1 : end])
        begin = end
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            separate += [message, *results]
            continue
        for index, call in enumerate(calls):
            said = message if index == 0 else {"role": message["role"], "content": ""}
            of_call = [result for result in results if result.get("tool_call_id") == call.get("id")]
            separate += [{**said, "tool_calls": [call]}, *of_call]
            results = [result for result in results if result not in of_call]
        separate += results
    return separate


def calls_as_text(messages: Sequence[Mapping[str, Any]], form: CallFormat) -> list[Mapping[str, Any]]:
    """For a template that describes tools and leaves out earlier calls: these become part of the text, in this form."""
    return [
        {**_without_calls(message), "content": "\n".join(texts_of(message, form))}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def texts_of(message: Mapping[str, Any], form: CallFormat) -> list[str]:
    """The text of an assistant's message, and its calls as text in this form; nothing for what it does not have."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    texts = [message["content"]] if message["content"] else []
    if functions:
        texts.append(form.write_calls([(function["name"], as_object(function["arguments"])) for function in functions]))
    return texts


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}
