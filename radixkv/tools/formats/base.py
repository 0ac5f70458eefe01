"""What all forms of calls have in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from radixkv.tools.definitions import Tool, ToolOptions
from radixkv.tools.grammar import GrammarWriter, escaped
from radixkv.tools.pieces import TextPiece
from radixkv.tools.source import AnswerSource, MalformedCallError, Parsing, new_call_id, skip_whitespace, text_until


class CallFormat(ABC):
    """How a family of models writes calls of tools.

    An answer is text, then calls: ``begin``, the calls with ``separator`` between them, ``end``.

    Attributes:
        begin: begins the calls of an answer; it may be empty.
        lead: optional text before calls, in forms where these can only stand at the start of the answer.
        call_begin: begins each call.
        separator: between two calls.
        end: after the last call.
        parallel: whether an answer can hold several calls.
        frames_every_answer: whether text and reasoning are marked as well, so that every answer has to be parsed.
    """

    begin = ""
    lead = ""
    call_begin = ""
    separator = "\n"
    end = ""
    parallel = True
    frames_every_answer = False

    @property
    def trigger(self) -> str:
        """The text that begins an answer's calls; empty: they can only stand at its start."""
        return self.begin or self.call_begin

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must not be left out of the answer's text."""
        return tuple(filter(None, (self.begin, self.lead, self.call_begin)))

    def new_id(self) -> str:
        """An id for a call, as the family's templates accept it."""
        return new_call_id()

    def as_template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message as the family's templates take it."""
        return message

    @abstractmethod
    def parse(self, source: AnswerSource) -> Parsing[None]:
        """Read text and calls, up to the end of the answer."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model writes it, from ``call_begin`` on."""

    @abstractmethod
    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        """A grammar expression for a call of a tool, after ``call_begin``.

        Args:
            rule: begins the names of its rules and schemas.

        Raises:
            ValueError: the tool is strict and its schema cannot be enforced in this form.
        """

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Several calls as the model writes them."""
        return self.begin + self.separator.join(self.write_call(*call) for call in calls) + self.end

    def grammar(
        self, writer: GrammarWriter, options: ToolOptions | None, content: str | None, *, continues: bool = False
    ) -> str:
        """A grammar expression for the answer without its reasoning.

        Args:
            options: which calls it may hold; None: none, and there is ``content``, unless the format frames every answer.
            content: an expression for the text of an answer without calls; None: any text.
            continues: whether the answer goes on with a message that has begun.
        """
        if content is not None and (options is None or options.mode == "none"):
            return content
        assert options is not None
        if options.mode == "none":
            return self._text_without_calls(writer, options)
        first, following = self._calls(writer, options)
        lead = f"({writer.literal(self.lead)})?" if self.lead else ""
        begin = writer.literal(self.trigger) if self.trigger else lead
        calls = writer.rule("calls", f"{begin} {first} {following}")
        if options.mode == "required":
            return calls
        if content is not None:
            return f"{content} | {calls}"
        if not self.trigger:
            return f"{self._text_without_calls(writer, options)} | {calls}"
        return f"{writer.text()} | {writer.text_before(self.trigger)} {first} {following}"

    def _text_without_calls(self, writer: GrammarWriter, options: ToolOptions) -> str:
        """An expression for any text without a call."""
        up_to_call = rf"(.|\n)*{escaped(self.trigger)}" if self.trigger else self.beginning_of_call(options.tools)
        plain = writer.rule("PLAIN", rf"/(.|\n)*/ & ~/{up_to_call}(.|\n)*/")
        # Without a marker, calls can only stand at the start.
        return writer.text(plain, plain if self.trigger else "TEXT")

    def _calls(self, writer: GrammarWriter, options: ToolOptions) -> tuple[str, str]:
        """Expressions for the first call, after the trigger, and for what follows it."""
        bodies = [self.call_body(writer, tool, f"tool_{i}") for i, tool in enumerate(options.tools.values())]
        body = writer.rule("body", " | ".join(f"({each})" for each in bodies))
        one = f"{writer.literal(self.call_begin)} {body}" if self.call_begin else body
        more = f"({writer.literal(self.separator)} {one})*" if options.parallel and self.parallel else ""
        end = writer.literal(self.end) if self.end else ""
        return (one if self.begin else body), f"{more} {end}"

    def beginning_of_call(self, tools: Mapping[str, Tool]) -> str:
        """For a form without a marker: a regular expression for how a call begins, up to the end of its name."""
        raise NotImplementedError


def guarded_call(source: AnswerSource, call: Parsing[None]) -> Parsing[bool]:
    """Read a call. If it is not one after all, what was taken for its syntax is text, unless the answer was cut off in it.

    Returns:
        Whether it was a call, or at least the beginning of one.
    """
    before = source.num_calls
    try:
        for piece in call:
            yield piece
            if piece is not None:
                source.mark()
    except MalformedCallError:
        text = source.since_mark()
        if text and not source.cut_in_calls:
            yield TextPiece(text)
        return source.num_calls > before
    return True


def marked_calls(
    source: AnswerSource, call_begin: str, read_call: Callable[[AnswerSource], Parsing[None]]
) -> Parsing[None]:
    """Read text, and calls that each follow a marker."""
    while (yield from text_until(source, [call_begin])):
        if (yield from guarded_call(source, read_call(source))):
            yield from skip_whitespace(source)


def json_body(writer: GrammarWriter, tool: Tool, rule: str, arguments_key: str, before_name: str = "") -> str:
    """A grammar expression for ``{"name": NAME, KEY: ARGUMENTS}``.

    Args:
        before_name: members that may stand before the name, as JSON.
    """
    # Each whole in one literal: up to the end of the name, any text could follow, and a shorter literal would not end there.
    name = f'"name": {json_text(tool.name)}, "{arguments_key}": '
    head = " | ".join(writer.literal(f"{{{before}{name}") for before in dict.fromkeys(["", before_name]))
    arguments = writer.schema(tool, f"{rule}_arguments", tool.parameters)
    return f"({head}) {arguments} {writer.literal('}')}"


def as_object(arguments: Any) -> Mapping[str, Any]:
    """The arguments of an earlier call. What the model wrote instead of an object becomes one argument, ``arguments``."""
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def with_arguments_as_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message for a template that writes each argument of a call, so that it needs an object of them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [{**call["function"], "arguments": as_object(call["function"]["arguments"])} for call in calls]
    written = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return {**message, "tool_calls": written}


def json_text(value: Any) -> str:
    """A value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


def write_json_call(name: str, arguments: Mapping[str, Any], arguments_key: str) -> str:
    """The call as JSON text."""
    return json_text({"name": name, arguments_key: arguments})
