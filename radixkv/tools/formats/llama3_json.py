"""``{"name": ..., "parameters": {...}}``, with ``<|python_tag|>`` before it or not; semicolons between several calls.

Meta's Llama 3.1 to 3.3: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/ (JSON-based tool calling).
"""

from __future__ import annotations

from radixkv.tools.formats.json_object import JsonObjectFormat
from radixkv.tools.source import AnswerSource, Parsing, accept, skip_whitespace


class Llama3JsonFormat(JsonObjectFormat):
    """Bare JSON objects with semicolons between them."""

    lead = "<|python_tag|>"
    arguments_key = "parameters"
    before_name = '"type": "function", '
    separator = "; "

    def parse(self, source: AnswerSource) -> Parsing[None]:
        yield from accept(source, self.lead)
        yield from super().parse(source)

    def _skip_separator(self, source: AnswerSource) -> Parsing[None]:
        yield from skip_whitespace(source)
        yield from accept(source, ";")
        yield from skip_whitespace(source)
