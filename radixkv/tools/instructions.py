"""Describes tools in words for models whose chat template does not support them.

Many of these templates insist on alternating turns, so each turn is one message.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.tools.formats.base import CallFormat
from radixkv.tools.template_messages import texts_of

# Without it, small models repeat the call.
_AFTER_RESULTS = "Now answer my question in one sentence, or call the next function."


def with_tools_in_words(
    messages: Sequence[Mapping[str, Any]],
    definitions: Sequence[Mapping[str, Any]],
    form: CallFormat,
    *,
    takes_system: bool,
) -> list[Mapping[str, Any]]:
    """The conversation with the tools described at its beginning, and with calls and results as plain messages.

    Args:
        messages: as chat templates expect them.
        definitions: the tools in OpenAI's form; may be empty.
        form: how calls are written.
        takes_system: whether the template takes a system message; otherwise the first user message describes the tools.
    """
    plain: list[Mapping[str, Any]] = []
    turns = [(role, list(turn)) for role, turn in itertools.groupby(messages, key=operator.itemgetter("role"))]
    for (role, turn), (next_role, next_turn) in itertools.pairwise([*turns, ("", [])]):
        if role == "tool":
            results = [f"The function returned: {message['content']}" for message in turn]
            request = next_turn.pop(0) if next_role == "user" else {"role": "user", "content": _AFTER_RESULTS}
            plain.append(_preceded(request, "\n".join(results), "\n"))
        elif any(message.get("tool_calls") for message in turn):
            texts = itertools.chain.from_iterable(texts_of(message, form) for message in turn)
            plain.append({"role": role, "content": "\n".join(texts)})
        else:
            plain.extend(turn)
    if not definitions:
        return plain
    described = "\n".join(json.dumps(definition["function"], ensure_ascii=False) for definition in definitions)
    example = form.write_calls([("NAME", {"ARGUMENT": "VALUE"})])
    text = (
        f"You can call these functions:\n{described}\n\n"
        f"To call one, answer with nothing but its name and its arguments in this form:\n{example}\n"
        "The result follows in the next message. If no function helps, answer in plain words."
    )
    first_role = plain[0]["role"] if plain else ""
    if first_role == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    if first_role == "user" and not takes_system:
        return [_preceded(plain[0], text, "\n\n"), *plain[1:]]
    return [{"role": "system" if takes_system else "user", "content": text}, *plain]


def _preceded(message: Mapping[str, Any], text: str, separator: str) -> Mapping[str, Any]:
    return {**message, "content": f"{text}{separator}{message['content']}"}
