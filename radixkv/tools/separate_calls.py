"""Puts calls into messages of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation for a template that writes the first call of a message only: each call is followed by its result.

    Args:
        messages: as chat templates expect them.
    """
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
