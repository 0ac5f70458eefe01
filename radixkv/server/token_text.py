"""Texts of single tokens, as shown with their log-probabilities."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


class TokenTexts:
    """Texts and bytes of single tokens.

    A token may be part of a character: it then has bytes, but no text of its own.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_of = _byte_level_alphabet() if "ByteLevel(" in repr(getattr(backend, "decoder", None)) else {}
        self.text = lru_cache(maxsize=1 << 16)(self._text)

    def bytes_of(self, token_id: int) -> list[int]:
        """The token's bytes in UTF-8 text."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if self._byte_of and name and all(character in self._byte_of for character in name):
            return [self._byte_of[character] for character in name]
        if name and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return [int(name[3:5], 16)]
        return list(self._decode(token_id).encode())

    def _text(self, token_id: int) -> str:
        """The token's text, or its bytes as OpenAI writes them, "bytes:\\xe2\\x80", where it is part of a character."""
        text = self._decode(token_id)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token_id))

    def _decode(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers (GPT-2's and derivatives) write bytes: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
