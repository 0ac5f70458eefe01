"""Frames of whole answers, with the schemas of the tools that these may call, in llguidance's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from radixkv.errors import one_line
from radixkv.sampling.json_schema.prepare import (
    locate_refusal,
    prepare_schema,
    with_json_options,
    without_patterns,
)
from radixkv.sampling.json_schema.unsatisfiable import leave_out_unsatisfiable
from radixkv.tools.grammar import MAX_GRAMMAR_CHARACTERS, AnswerFrame

_log = logging.getLogger(__name__)


def frame_text(frame: AnswerFrame) -> str:
    """A frame as llguidance's list of grammars without ``@content``.

    Raises:
        ValueError: a schema cannot be read, or all are too large; the message names the tool.
    """
    schemas = [{"name": name, "json_schema": _prepared(schema)} for name, schema in frame.schemas.items()]
    text = json.dumps([{"name": "answer", "lark_grammar": frame.lark}, *schemas])
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(
            f"tools: they have {len(text)} characters as a grammar, expected at most {MAX_GRAMMAR_CHARACTERS}"
        )
    return text


def checked_frame(frame: str, refusal: Callable[[str], str | None]) -> str:
    """A frame whose schemas the compiler takes.

    Of a schema that the compiler refuses, patterns are left to the model, or all if that does not help: the arguments of its
    tool may be any. Each is checked alone, because within the frame its cost shows only when a call has begun.

    Args:
        frame: from `frame_text`.
        refusal: why a schema, as JSON, is refused; None: it is not.

    Raises:
        ValueError: the schema of a strict tool is refused; the message names the tool.
    """
    answer, *parts = json.loads(frame)
    for part in parts:
        schema = part["json_schema"]
        reason = leave_out_unsatisfiable(schema, refusal)
        if reason is None:
            continue
        problem = f"the parameters of {schema['title']!r:.200} cannot be enforced: {locate_refusal([schema], reason)}"
        if not schema["x-guidance"]["lenient"]:
            raise ValueError(f"tools: {problem}")
        part["json_schema"], what = without_patterns(schema), "its patterns, and lengths beside them,"
        if refusal(json.dumps(part["json_schema"])) is not None:
            anything = {"type": "object"} if schema.get("type") == "object" else {}
            part["json_schema"] = {**anything, "title": schema["title"], "x-guidance": schema["x-guidance"]}
            what = "they"
        _log.warning("%s; %s are left to the model", problem, what)
    return json.dumps([answer, *parts])


def framed(frame: str, content: str) -> str:
    """A frame with the grammar of its content, in llguidance's format.

    Args:
        frame: from `checked_frame`.
        content: a grammar in llguidance's format; "": there is none.
    """
    grammars = json.loads(frame)
    if content.startswith("{"):
        inner = json.loads(content)["grammars"]
        grammars += [{**inner[0], "name": "content"}, *inner[1:]]
    elif content:
        grammars.append({"name": "content", "lark_grammar": content})
    return json.dumps({"grammars": grammars})


def _prepared(schema: Any) -> Any:
    try:
        # A copy, because it is rewritten.
        return with_json_options(prepare_schema(json.loads(json.dumps(schema))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"tools: the parameters of {schema['title']!r:.200} cannot be read: {one_line(str(error))}"
        ) from error
