"""Grammars that let an answer hold only valid calls, in llguidance's dialect of Lark.

An answer is free text until a call begins: a lazy lexeme ends with the marker of a call, after which only a call may follow.
(The scheme of llguidance's and XGrammar's structural tags.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from radixkv.tools.closed_schema import closed_schema
from radixkv.tools.definitions import Tool

# Between the elements of JSON, in all grammars. Where unlimited whitespace is allowed, small models generate nothing else.
JSON_WHITESPACE = " ?"
# 256 tools of a coding agent have 290,000. Compiling the worst that is allowed takes 3 s, in which others run.
MAX_GRAMMAR_CHARACTERS = 327_680


@dataclass(frozen=True)
class AnswerFrame:
    """What a whole answer must look like.

    Attributes:
        lark: a grammar in Lark's syntax, in which ``@name`` stands for JSON of the schema of that name, and ``@content`` for
            what the other structured outputs of the request describe.
        schemas: JSON schemas by name; the title of each is the tool whose arguments it describes.
    """

    lark: str
    schemas: Mapping[str, Any]


class GrammarWriter:
    """Collects the rules of one answer.

    Args:
        added_tokens: id of each text that is a token of its own; in free text, llguidance forbids those that look like
            markers.
        shown_tokens: those of them that may appear in free text.
    """

    def __init__(self, added_tokens: Mapping[str, int], shown_tokens: Iterable[str] = ()) -> None:
        self._added_tokens = added_tokens
        self._added = _separating(tuple(added_tokens))
        ids = sorted(added_tokens[token] for token in shown_tokens)
        self._shown = f"<[{','.join(map(str, ids))}]>" if ids else ""
        self._rules: dict[str, str] = {"TEXT": r"/(.|\n)*/"}
        self._before: dict[str, str] = {}  # rules of `text_before`, by their markers
        self._schemas: dict[str, Any] = {}
        self._num_characters = 0  # of literals

    def frame(self, start: str) -> AnswerFrame:
        """The grammar of all rules, with this body for its start rule."""
        rules = {"start": start, **self._rules}
        return AnswerFrame("".join(f"{name}: {body}\n" for name, body in rules.items()), self._schemas)

    def rule(self, name: str, body: str) -> str:
        """Add a rule or replace it; returns its name."""
        self._rules[name] = body
        return name

    def has_rule(self, name: str) -> bool:
        """Whether a rule was added."""
        return name in self._rules

    def literal(self, text: str) -> str:
        """An expression for this text, with added tokens for those parts of it that have one.

        Raises:
            ValueError: the grammar becomes too long, as it may where each of two references leads to two, and so on.
        """
        expression = " ".join(map(self._part, filter(None, self._added.split(text)))) or '""'
        self._num_characters += len(expression)
        if self._num_characters > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(
                f"tools: as a grammar, they have more characters than {MAX_GRAMMAR_CHARACTERS}, the maximum"
            )
        return expression

    def schema(self, tool: Tool, name: str, schema: Mapping[str, Any]) -> str:
        """An expression for the JSON that a tool's schema allows.

        Args:
            name: of the schema, unique in this grammar.
        """
        closed = closed_schema(schema)
        closed["title"] = tool.name  # for errors
        closed["x-guidance"] = {"whitespace_pattern": JSON_WHITESPACE, "lenient": not tool.strict}
        self._schemas[name] = closed
        return f"@{name}"

    def text_before(self, marker: str) -> str:
        """An expression for free text and the marker that ends it."""
        if marker not in self._before:
            name = f"before_{len(self._rules)}"
            self._rules[f"{name}[lazy]"] = f"TEXT {json.dumps(marker)}"
            free = f"(TEXT {self._shown})* " if self._shown else ""
            as_tokens = self.literal(marker)
            if free or "<[" in as_tokens:
                spelled, name = f"{free}{name}", f"up_to_{len(self._rules)}"
                self._rules[name] = f"{spelled} | {free}TEXT {as_tokens}" if "<[" in as_tokens else spelled
            self._before[marker] = name
        return self._before[marker]

    def text(self, first: str = "TEXT", following: str = "TEXT") -> str:
        """An expression for free text.

        Args:
            first: a terminal for what comes before any shown token.
            following: one for what comes after each.
        """
        return f"{first} ({self._shown} {following})*" if self._shown else first

    def repeated(self, opening: str, item: str, separator: str, close: str) -> str:
        """An expression for any number of items.

        Args:
            opening: the text before the first.
            item: an expression for one.
            separator: the text between two.
            close: the text after the last.
        """
        items = f"({item} ({self.literal(separator)} {item})*)?"
        return f"{self.literal(opening)} {items} {self.literal(close)}"

    def _part(self, text: str) -> str:
        token_id = self._added_tokens.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def escaped(text: str) -> str:
    """A text as part of a regular expression in Lark."""
    return "".join(character if character.isalnum() else f"\\u{{{ord(character):x}}}" for character in text)


@lru_cache(maxsize=8)  # of tokenizers, some of which have a thousand
def _separating(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Splits a text into these tokens, of two that begin alike the longer one, and what is between them."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
