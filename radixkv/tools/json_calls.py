"""Reads calls that are written as JSON objects, while they are being generated."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

from radixkv.tools.pieces import ToolCallArguments, ToolCallBegin
from radixkv.tools.source import (
    WHITESPACE,
    AnswerSource,
    MalformedCallError,
    Parsing,
    collect_until,
    expect,
    skip_whitespace,
)

_ARGUMENTS = ("arguments", "parameters")
# Keys that some models write beside the name and the arguments.
_OTHER_KEYS = ("id", "type")
# First characters of objects, lists and strings, which may contain what ends a number or a word.
_OPENING = '{["'


def json_call(source: AnswerSource, beginning: re.Pattern[str] | None = None) -> Parsing[None]:
    """A call ``{"name": ..., "arguments": {...}}``; "parameters" is read as "arguments".

    Args:
        beginning: what the text must be from the source's mark to the end of the name; None: anything.

    Raises:
        MalformedCallError: it is not a call, and nothing was yielded.
    """
    begun: ToolCallBegin | None = None
    arguments: str | None = None
    yield from expect(source, "{")
    while True:
        yield from skip_whitespace(source)
        key = _loads((yield from json_value_text(source)))
        yield from skip_whitespace(source)
        yield from expect(source, ":")
        yield from skip_whitespace(source)
        if key == "name" and begun is None:
            name = _loads((yield from json_value_text(source)))
            if beginning is not None and not beginning.fullmatch(source.since_mark()):
                raise MalformedCallError
            begun = source.begin_call(name)
            yield begun
            if arguments is not None:
                yield ToolCallArguments(begun.index, arguments)
        elif key in _ARGUMENTS and arguments is None:
            if begun is not None and source.peek(1) == "{":
                yield from json_arguments(source, begun)
                arguments = ""
            else:
                arguments = _as_object_text((yield from json_value_text(source)))
                if begun is not None:
                    yield ToolCallArguments(begun.index, arguments)
        elif key in _OTHER_KEYS:
            yield from json_value_text(source)
        else:
            raise MalformedCallError
        yield from skip_whitespace(source)
        if source.peek(1) != ",":
            break
        source.take(1)
    yield from expect(source, "}")
    if begun is None:
        raise MalformedCallError
    if arguments is None:
        yield ToolCallArguments(begun.index, "{}")


def json_arguments(source: AnswerSource, begun: ToolCallBegin) -> Parsing[None]:
    """The arguments of a call, a JSON object, piece by piece as they are generated.

    Raises:
        MalformedCallError: they are incomplete.
    """
    for text in _value(source):
        yield None if text is None else ToolCallArguments(begun.index, text)


def json_value_text(source: AnswerSource) -> Parsing[str]:
    """The text of a JSON value.

    Raises:
        MalformedCallError: it is incomplete.
    """
    texts: list[str] = []
    for text in _value(source):
        if text is None:
            yield None
        else:
            texts.append(text)
    return "".join(texts)


def json_text_before(source: AnswerSource, end: str) -> Parsing[str]:
    """The text of a JSON value up to ``end``, which is taken as well. What begins no object, list or string may be any text.

    Raises:
        MalformedCallError: the value is incomplete, or something else follows.
    """
    yield from skip_whitespace(source)  # which grammars allow there
    if source.peek(1) not in _OPENING:
        text, _ = yield from collect_until(source, [end])
        return text
    text = yield from json_value_text(source)
    yield from expect(source, end)
    return text


def _as_object_text(text: str) -> str:
    """The JSON text of arguments, also where it was written within a JSON string."""
    value = _loads(text)
    return value if isinstance(value, str) else text


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError from error


def _value(source: AnswerSource) -> Generator[str | None, None, None]:
    """The text of the JSON value that begins here, piece by piece; None where more is needed."""
    depth, in_string, escaped = 0, False, False
    is_scalar = source.peek(1) not in _OPENING
    while True:
        for position, character in enumerate(source):
            if is_scalar:
                if character in ",}]" + WHITESPACE:
                    yield source.take(position)
                    return
                continue
            if escaped:
                escaped = False
                continue
            if in_string:
                escaped = character == "\\"
                in_string = character != '"'
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            if depth == 0 and not in_string:
                yield source.take(position + 1)
                return
        if source:
            yield source.take(len(source))
        if source.ended:
            raise MalformedCallError
        yield None
