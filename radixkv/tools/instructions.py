"""Describes tools in words, in the system message, for models whose chat template does not support them."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.tools.formats.base import CallFormat, as_object

# Without it, small models repeat the call.
_AFTER_RESULTS = "Now answer my question in one sentence, or call the next function."


def with_tools_in_words(
    messages: Sequence[Mapping[str, Any]], definitions: Sequence[Mapping[str, Any]], form: CallFormat
) -> list[Mapping[str, Any]]:
    """The conversation with the tools in its system message, and with calls and results as plain messages.

    Args:
        definitions: the tools in OpenAI's form; may be empty.
        form: how calls are written.
    """
    plain: list[Mapping[str, Any]] = []
    for role, group in itertools.groupby(messages, key=operator.itemgetter("role")):
        if role == "tool":
            # One message for all results of an answer: many templates take only one user message at a time.
            results = [f"The function returned: {message['content']}" for message in group]
            plain.append({"role": "user", "content": "\n".join([*results, _AFTER_RESULTS])})
        else:
            plain.extend(_as_plain(message, form) for message in group)
    if not definitions:
        return plain
    described = "\n".join(json.dumps(definition["function"], ensure_ascii=False) for definition in definitions)
    example = form.write_calls([("NAME", {"ARGUMENT": "VALUE"})])
    text = (
        f"You can call these functions:\n{described}\n\n"
        f"To call one, answer with nothing but its name and its arguments in this form:\n{example}\n"
        "The result follows in the next message. If no function helps, answer in plain words."
    )
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _as_plain(message: Mapping[str, Any], form: CallFormat) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    written = form.write_calls([(function["name"], as_object(function["arguments"])) for function in functions])
    text = message["content"]
    return {"role": "assistant", "content": f"{text}\n{written}" if text else written}
