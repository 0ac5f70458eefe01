"""``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``, in GLM 4.5 and 4.6 with line breaks.

The chat templates of https://huggingface.co/zai-org/GLM-4.6 and https://huggingface.co/zai-org/GLM-4.7.
"""

from __future__ import annotations

from collections.abc import Mapping

from radixkv.tools.formats.argument_values import ArgumentsAsJson
from radixkv.tools.formats.tagged_arguments import TaggedArgumentsFormat
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.source import AnswerSource, Parsing, accept, collect_until, expect, skip_whitespace

_KEY, _KEY_END, _VALUE = "<arg_key>", "</arg_key>", "<arg_value>"


class GlmFormat(TaggedArgumentsFormat):
    """The name of the tool, then two elements for each argument: its name and its value."""

    value_end = "</arg_value>"

    @property
    def markers(self) -> tuple[str, ...]:
        # All tags: where they are tokens of their own, the text of a value may not hold one.
        return (self.call_begin, self.call_end, _KEY, _KEY_END, _VALUE, self.value_end)

    def read_call(self, source: AnswerSource) -> Parsing[None]:
        yield from skip_whitespace(source)
        name, tag = yield from collect_until(source, ["\n", _KEY, self.call_end])
        name = name.rstrip()
        begun = source.begin_call(name)
        yield begun
        arguments = ArgumentsAsJson(begun, source.tools[name])
        if tag == "\n":
            tag = yield from self._tag(source)
        while tag == _KEY:
            key, _ = yield from collect_until(source, [_KEY_END])
            yield from skip_whitespace(source)
            yield from expect(source, _VALUE)
            text, _ = yield from collect_until(source, [self.value_end])
            yield arguments.add(key, text)
            tag = yield from self._tag(source)
        yield arguments.end()

    def _tag(self, source: AnswerSource) -> Parsing[str]:
        """Take what begins an argument or ends the call, and return it."""
        yield from skip_whitespace(source)
        if (yield from accept(source, _KEY)):
            return _KEY
        yield from expect(source, self.call_end)
        return self.call_end

    def write_body(self, name: str, values: Mapping[str, str]) -> str:
        pairs = (f"{_KEY}{key}{_KEY_END}\n{_VALUE}{text}{self.value_end}\n" for key, text in values.items())
        return f"{name}\n{''.join(pairs)}"

    def name_expression(self, writer: GrammarWriter, name: str) -> str:
        return f"{writer.literal(name)} {_line_break(writer)}"

    def argument_expression(self, writer: GrammarWriter, key: str, value: str) -> str:
        element, begin = writer.literal(f"{_KEY}{key}{_KEY_END}"), writer.literal(_VALUE)
        return f"{element} {_line_break(writer)} {begin} {value} {_line_break(writer)}"

    def end_expression(self, writer: GrammarWriter) -> str:
        return writer.literal(self.call_end)


def _line_break(writer: GrammarWriter) -> str:
    """A model writes those of its own form, or none."""
    line_break = writer.literal("\n")
    return f"({line_break})?"
