"""The constraint of a request's structured outputs on an answer, and its grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from radixkv.errors import one_line
from radixkv.sampling.grammar.structural_tag import structural_tag_grammar
from radixkv.sampling.json_schema.prepare import MAX_NAME_CHARACTERS, with_json_options
from radixkv.sampling_params import StructuredOutputsParams

_MAX_CHARACTERS = 131_072
_SCHEMA = re.compile(r"%json\s*(?=\{)")
# After what may look like one. What is not closed is read to its end, because it is refused in any case.
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"?|<[^<>\s]+>|/(?:\\.|[^/\\])+/?)|(?:\#|//)[^\n]*', re.DOTALL)
# In GBNF; a backslash that is escaped itself begins no number.
_NUMBERED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)


class Specification(NamedTuple):
    """What an answer's text must be, in a form that is equal for equal constraints."""

    kind: Literal["json", "choice", "regex", "grammar", "structural_tag"]
    text: str

    @classmethod
    def of(cls, params: StructuredOutputsParams) -> Specification | None:
        """The constraint of a request; None: only the frame constrains its answers.

        Raises:
            ValueError: it is too large, or is not JSON where it has to be.
        """
        if params.json is not None:
            spec = cls("json", _as_json("json", params.json))
        elif params.json_object:
            spec = cls("json", '{"type": "object"}')
        elif params.choice is not None:
            spec = cls("choice", "|".join(map(re.escape, params.choice)))
        elif params.regex is not None:
            spec = cls("regex", params.regex)
        elif params.grammar is not None:
            spec = cls("grammar", params.grammar)
        elif params.structural_tag is not None:
            spec = cls("structural_tag", _as_json("structural_tag", params.structural_tag))
        else:
            return None
        limit = _MAX_CHARACTERS if spec.kind in ("json", "structural_tag") else MAX_NAME_CHARACTERS
        if len(spec.text) > limit:
            raise ValueError(
                f"structured_outputs: {spec.kind} has {len(spec.text)} characters, expected at most {limit}"
            )
        return spec

    def grammar(self, prepare: Callable[[Any], Any]) -> tuple[str, list[Any]]:
        """It in llguidance's format, and the JSON schemas in that.

        Args:
            prepare: checks a schema and rewrites it, in place, for the compiler.

        Raises:
            ValueError: it is malformed.
        """
        from llguidance import LLMatcher

        try:
            match self.kind:
                case "json":
                    schema = prepare(json.loads(self.text))
                    return LLMatcher.grammar_from_json_schema(json.dumps(with_json_options(schema))), [schema]
                case "structural_tag":
                    tag = json.loads(self.text)
                    grammar = structural_tag_grammar(tag, prepare)
                    return grammar, [structure["schema"] for structure in tag["structures"]]
                case "grammar":
                    return _lark_grammar(self.text, prepare)
            return LLMatcher.grammar_from_regex(self.text), []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs: {self.kind} cannot be read: {one_line(str(error))}") from error


def _lark_grammar(text: str, prepare: Callable[[Any], Any]) -> tuple[str, list[Any]]:
    """Of a grammar in Lark's syntax, or in GBNF: it in llguidance's format, and the JSON schemas in it, prepared."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _GBNF_RULE.search(text):
        try:
            text = gbnf_to_lark(_NUMBERED.sub(_spelled_out, text))
        except Exception as error:  # the converter raises plain Exception
            raise ValueError(str(error)) from error
    text = _COMMENT.sub(r"\1", text)
    schemas: list[Any] = []
    written, done = "", 0
    # Wherever one stands, in strings, too: one that is missed could end the process. In a string, where quotes
    # are escaped, only an empty one would be read, which ends nothing: that stays as it is.
    while found := _SCHEMA.search(text, done):
        written += text[done : found.end()]
        done = found.end()
        try:
            schema, end = json.JSONDecoder().raw_decode(text, done)
        except json.JSONDecodeError:
            continue  # the compiler finds out whether it was meant as one
        if not schema and _ends_in_string(text[:done]):
            continue
        done = end
        schemas.append(prepare(schema))
        written += json.dumps(with_json_options(schema))
    return LLMatcher.grammar_from_lark(written + text[done:]), schemas


def _ends_in_string(text: str) -> bool:
    """Whether the last line of a grammar's beginning ends within a string."""
    line = text[text.rfind("\n") + 1 :]
    return line.replace(r"\\", "").replace(r"\"", "").count('"') % 2 > 0


def _spelled_out(numbered: re.Match[str]) -> str:
    """A character in the place of its number, whose zeros the converter would leave out; of ASCII, with two digits."""
    if not numbered[1] and not numbered[2]:
        return numbered[0]
    code = int(numbered[1] or numbered[2], 16)
    if code < 0x80:
        return rf"\x{code:02x}"
    return chr(code) if code < 0xD800 or 0xE000 <= code < 0x110000 else numbered[0]


def _as_json(kind: str, value: Any) -> str:
    def refuse(part: Any) -> Any:
        # A pydantic class, which other libraries accept as it is.
        is_model = isinstance(part, type) and hasattr(part, "model_json_schema")
        hint = f"; {part.__name__}.model_json_schema() is one" if is_model else ""
        raise TypeError(f"expected a JSON schema, as text or of dictionaries and lists, got {part!r:.80}{hint}")

    try:
        return value if isinstance(value, str) else json.dumps(value, default=refuse)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: {kind} cannot be read: {error}") from error
