"""A model's tokenizer as llguidance takes it."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import llguidance


def grammar_tokenizer(tokenizer: Any, num_tokens: int, eos_token_ids: Collection[int]) -> llguidance.LLTokenizer:
    """The tokenizer by which grammars are followed.

    Args:
        tokenizer: of transformers, with a fast backend.
        num_tokens: that grammars may allow: the model's, and those that only the tokenizer has.
        eos_token_ids: any of them ends an answer.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: there is no fast backend.
    """
    import llguidance
    import llguidance.hf

    options: dict[str, Any] = {"n_vocab": num_tokens, "eos_token": sorted(eos_token_ids) or None}
    as_published = llguidance.hf.from_tokenizer(tokenizer, **options)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_SpelledTokens(tokenizer, as_published)), **options)


class _SpelledTokens:
    """What llguidance's wrapper asks of a tokenizer in Python; text is never tokenized to a special token, but spelled.

    Where a grammar leaves only one text, llguidance allows the tokens that the tokenizer makes of it. Of the name of a
    special token that would be the token itself, which no grammar means by its name, and every answer would fail there.

    Attributes:
        eos_token_id: the tokenizer's.
        bos_token_id: likewise.
        tokens: the bytes of each.
        special_token_ids: of those that are no text.
    """

    def __init__(self, tokenizer: Any, as_published: llguidance.LLTokenizer) -> None:
        token_ids = range(as_published.vocab_size)
        self.eos_token_id = as_published.eos_token
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.tokens = [as_published.decode_bytes([token_id]) for token_id in token_ids]
        self.special_token_ids = [token_id for token_id in token_ids if as_published.is_special_token(token_id)]
        self._backend = copy.copy(tokenizer.backend_tokenizer)  # the caller's stays as it is
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True

    def __call__(self, text: str) -> list[int]:
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return token_ids
