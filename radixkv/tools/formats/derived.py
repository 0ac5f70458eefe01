"""A form of calls that is not one of the known families', as it was derived from a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from radixkv.tools.definitions import Tool, ToolOptions
from radixkv.tools.formats.base import CallFormat, guarded_call, with_arguments_as_objects
from radixkv.tools.formats.heads import CallHead
from radixkv.tools.formats.notation import ArgumentNotation
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.source import (
    AnswerSource,
    Parsing,
    accept,
    follows,
    new_call_id,
    skip_whitespace,
    text_until,
)


class DerivedFormat(CallFormat):
    """``begin``, a head, arguments, for each further call another head and arguments, ``end``.

    Args:
        begin: begins the calls of an answer.
        first: stands between ``begin`` and the arguments of the first call.
        following: stands between the arguments of two calls, and is the same as ``first`` from the first place on; None: an
            answer has one call at most.
        end: after the arguments of the last call; it may be empty.
        notation: how arguments are written.
        added_tokens: texts that are tokens of their own.
    """

    def __init__(
        self,
        begin: str,
        first: CallHead,
        following: CallHead | None,
        end: str,
        notation: ArgumentNotation,
        added_tokens: Iterable[str],
    ) -> None:
        self.begin = begin
        self.first = first
        self.following = following
        self.end = end
        self.notation = notation
        self.parallel = following is not None
        literals = (begin, first.text, "" if following is None else following.text, end, *notation.literals)
        all_of_them = "\0".join(literals)
        self._markers = tuple(token for token in added_tokens if token in all_of_them)

    @property
    def markers(self) -> tuple[str, ...]:
        return self._markers

    def as_template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The form was derived from how the template writes objects."""
        return with_arguments_as_objects(message)

    def parse(self, source: AnswerSource) -> Parsing[None]:
        ids: set[str] = set()
        while (yield from text_until(source, [self.begin])):
            head: CallHead | None = self.first
            while head is not None and (yield from guarded_call(source, self._call(source, head, ids))):
                source.mark()
                head = None
                if self.following is not None and (yield from follows(source, self.following.before)):
                    head = self.following
            yield from accept(source, self.end)
            yield from skip_whitespace(source)

    def _call(self, source: AnswerSource, head: CallHead, ids: set[str]) -> Parsing[None]:
        name, call_id = yield from head.read(source)
        begun = source.begin_call(name, None if call_id in ids else call_id)
        ids.add(begun.id)
        yield begun
        yield from self.notation.read(source, begun)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.write_calls([(name, arguments)])

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        texts = [self.begin]
        head = self.first
        for index, (name, arguments) in enumerate(calls):
            texts += [head.write(name, index, new_call_id()), self.notation.write(arguments)]
            head = self.following or head
        return "".join([*texts, self.end])

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        return f"({self.notation.expression(writer, tool, rule)})"

    def _calls(self, writer: GrammarWriter, options: ToolOptions) -> tuple[str, str]:
        bodies = (
            f"{self.first.expression(writer, name)} {self.call_body(writer, tool, f'tool_{i}')}"
            for i, (name, tool) in enumerate(options.tools.items())
        )
        body = writer.rule("body", " | ".join(bodies))
        more = ""
        if self.following is not None and options.parallel:
            more = f"({writer.literal(self.following.before)} {body})*"
        end = writer.literal(self.end) if self.end else ""
        return f"{writer.literal(self.first.before)} {body}", f"{more} {end}"
