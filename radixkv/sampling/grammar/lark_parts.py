"""The parts of a grammar in Lark's syntax, tried where they begin: only there does it show how much work each is."""

from __future__ import annotations

import re

# Strings and comments come first, because they may look like the others.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//.*|\#.*'
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)"
    r"|^[ \t]*[?!]?(?P<name>[a-zA-Z_]\w*)(?=[ \t]*(?:\[.*\])?(?:\.\d+)?[ \t]*:(?!:))",
    re.MULTILINE,
)
_START = re.compile(r"^([ \t]*[?!]?)start\b", re.MULTILINE)
# Trying one takes up to 50 ms. Grammars of people have fewer.
_MAX_PARTS = 64


def numbered_parts(grammar: str) -> tuple[str, list[str]]:
    """A grammar whose answers begin with a number and go on with a rule or a regular expression of another grammar.

    Returns:
        The grammar, and the numbers as answers write them.
    """
    found = (match["regex"] or match["name"] for match in _PARTS.finditer(grammar))
    parts = [part for part in dict.fromkeys(found) if part not in (None, "start")][:_MAX_PARTS]
    numbers = [f"{number:02}" for number in range(len(parts))]
    start = " | ".join(f'"{number}" {part}' for number, part in zip(numbers, parts, strict=True))
    return f"start: {start}\n" + _START.sub(r"\1whole_answer", grammar), numbers
