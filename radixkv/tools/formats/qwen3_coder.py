"""``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.

Qwen3-Coder and Qwen 3.5: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

from collections.abc import Mapping

from radixkv.tools.formats.argument_values import ArgumentsAsJson
from radixkv.tools.formats.tagged_arguments import TaggedArgumentsFormat
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.source import AnswerSource, Parsing, accept, collect_until, expect, skip_whitespace

_FUNCTION, _FUNCTION_END, _PARAMETER = "<function=", "</function>", "<parameter="


class Qwen3CoderFormat(TaggedArgumentsFormat):
    """Names of the tool and of arguments stand in tags, and each value on lines of its own."""

    value_end = "\n</parameter>"

    def read_call(self, source: AnswerSource) -> Parsing[None]:
        yield from skip_whitespace(source)
        yield from expect(source, _FUNCTION)
        name, _ = yield from collect_until(source, [">"])
        begun = source.begin_call(name)
        yield begun
        arguments = ArgumentsAsJson(begun, source.tools[name])
        yield from skip_whitespace(source)
        while (yield from accept(source, _PARAMETER)):
            key, _ = yield from collect_until(source, [">"])
            # As in the grammar, the tag alone does not end a value that has lines of its own: it may be part of it.
            has_lines = yield from accept(source, "\n")
            ends = [self.value_end] if has_lines else [self.value_end, self.value_end.strip()]
            text, _ = yield from collect_until(source, ends)
            yield arguments.add(key, text)
            yield from skip_whitespace(source)
        yield from expect(source, _FUNCTION_END)  # before it, the arguments must not look complete
        yield arguments.end()
        yield from skip_whitespace(source)
        yield from expect(source, self.call_end)

    def write_body(self, name: str, values: Mapping[str, str]) -> str:
        parameters = "".join(f"{_PARAMETER}{key}>\n{text}{self.value_end}\n" for key, text in values.items())
        return f"\n{_FUNCTION}{name}>\n{parameters}{_FUNCTION_END}\n"

    def name_expression(self, writer: GrammarWriter, name: str) -> str:
        return writer.literal(f"\n{_FUNCTION}{name}>\n")

    def argument_expression(self, writer: GrammarWriter, key: str, value: str) -> str:
        begin, line_break = writer.literal(f"{_PARAMETER}{key}>\n"), writer.literal("\n")
        return f"{begin} {value} {line_break}"

    def end_expression(self, writer: GrammarWriter) -> str:
        return writer.literal(f"{_FUNCTION_END}\n{self.call_end}")
