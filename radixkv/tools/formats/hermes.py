"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Nous Research's Hermes 2 Pro, Qwen 2.5 and Qwen 3: https://github.com/NousResearch/Hermes-Function-Calling and the chat
template of https://huggingface.co/Qwen/Qwen3-8B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixkv.tools.definitions import Tool
from radixkv.tools.formats.base import CallFormat, json_body, marked_calls, write_json_call
from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.json_calls import json_call
from radixkv.tools.source import AnswerSource, Parsing, expect, skip_whitespace

_END = "</tool_call>"


class HermesFormat(CallFormat):
    """A JSON object between tags for each call."""

    call_begin = "<tool_call>"

    def parse(self, source: AnswerSource) -> Parsing[None]:
        return marked_calls(source, self.call_begin, _call)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.call_begin}\n{write_json_call(name, arguments, 'arguments')}\n{_END}"

    def call_body(self, writer: GrammarWriter, tool: Tool, rule: str) -> str:
        newline = writer.literal("\n")
        return f"{newline} {json_body(writer, tool, rule, 'arguments')} {newline} {writer.literal(_END)}"


def _call(source: AnswerSource) -> Parsing[None]:
    yield from skip_whitespace(source)
    yield from json_call(source)
    yield from skip_whitespace(source)
    yield from expect(source, _END)
