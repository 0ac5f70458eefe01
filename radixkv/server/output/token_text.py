"""Texts of single tokens, as shown with their log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from radixkv.sampling.detokenizer import IncrementalDetokenizer, decode_token, decode_tokens, is_byte_level

# Texts of single tokens to keep.
_MAX_TEXTS = 1 << 16


class TokenTexts:
    """Texts and bytes of single tokens.

    A token may be part of a character: it then has bytes, but no text of its own.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_level_alphabet() if is_byte_level(tokenizer) else {}
        self.bytes_of = lru_cache(maxsize=_MAX_TEXTS)(self._bytes_of)
        self.text = lru_cache(maxsize=_MAX_TEXTS)(self._text)
        self.quoted = lru_cache(maxsize=_MAX_TEXTS)(self._quoted)
        self.is_left_out = lru_cache(maxsize=_MAX_TEXTS)(self._is_left_out)
        self.chat_parts = lru_cache(maxsize=_MAX_TEXTS)(self._chat_parts)

    def begins_with_space(
        self,
        token_id: int,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown_special_tokens: Sequence[int],
    ) -> bool:
        """Whether the text of an answer that begins with this token begins with a space.

        Args:
            prompt_token_ids: what the answer follows: the space may be dropped where it has no text.
            skip_special_tokens: whether special tokens are left out of the text.
            shown_special_tokens: those that stay in it nevertheless.
        """
        answer = IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            shown_special_tokens=shown_special_tokens,
        )
        answer.append([token_id])
        return answer.text.startswith(" ")

    def _bytes_of(self, token_id: int) -> list[int]:
        """The token's bytes in UTF-8 text."""
        text = decode_token(self._tokenizer, token_id)
        if not text:
            return []
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if self._byte_of and name and all(character in self._byte_of for character in name):
            return [self._byte_of[character] for character in name]
        if name and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return [int(name[3:5], 16)]
        return list(text.encode())

    def _text(self, token_id: int) -> str:
        """The token's text, or its bytes as OpenAI writes them, "bytes:\\xe2\\x80", where it is part of a character."""
        text = decode_token(self._tokenizer, token_id)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token_id))

    def _quoted(self, token_id: int) -> str:
        """The token's text as JSON."""
        return json.dumps(self.text(token_id), ensure_ascii=False)

    def _chat_parts(self, token_id: int) -> tuple[str, str]:
        """What precedes and what follows a token's log-probability in the JSON of chat completions."""
        encoded_bytes = json.dumps(self.bytes_of(token_id), separators=(",", ":"))
        return f'{{"token":{self.quoted(token_id)},"logprob":', f',"bytes":{encoded_bytes}}}'

    def _is_left_out(self, token_id: int) -> bool:
        """Whether this token is missing from a text without special tokens."""
        # Decoded twice in a row, because a space's token may have no text by itself.
        return not decode_tokens(self._tokenizer, [token_id, token_id], skip_special_tokens=True)


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers (GPT-2's and derivatives) write bytes: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
