"""Prompts' texts as an operator may see them."""

from __future__ import annotations


def visible(text: str) -> str:
    """A text in one line, with escapes such as ``\\n`` in place of all that cannot be printed.

    A prompt may hold control characters, which a terminal would obey, and of which most may not be in XML at all.
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
