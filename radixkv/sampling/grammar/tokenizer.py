"""Converts a model's tokenizer to the form that llguidance takes."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from radixkv.extras import needing_extra

if TYPE_CHECKING:
    import llguidance


def grammar_tokenizer(tokenizer: Any, num_logits: int, eos_token_ids: Collection[int]) -> llguidance.LLTokenizer:
    """The tokenizer by which grammars are followed.

    Args:
        tokenizer: of transformers, with a fast backend.
        num_logits: how many tokens the model has logits for.
        eos_token_ids: any of them ends an answer.

    Raises:
        MissingPackageError: llguidance is not installed.
        ValueError: there is no fast backend, or none of ``eos_token_ids`` has logits.
    """
    import transformers

    with needing_extra("server", "structured_outputs"):
        import llguidance
        import llguidance.hf

    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise ValueError(
            "structured_outputs, or tools that must be called: expected a tokenizer with a fast backend (as of a "
            f"tokenizer.json), got {type(tokenizer).__name__}, which has none and can follow no grammar"
        )
    if eos_token_ids and min(eos_token_ids) >= num_logits:  # where only one of them is allowed, none could be sampled
        raise ValueError(
            f"structured_outputs, or tools that must be called: expected one of the {num_logits} tokens that the model "
            f"can generate to end an answer, got end-of-sequence tokens {sorted(eos_token_ids)}"
        )
    # Either may have more: models pad their logits, and tokenizers have special tokens that a smaller model lacks.
    num_tokens = max(num_logits, 1 + max(tokenizer.get_vocab().values()))
    options: dict[str, Any] = {"n_vocab": num_tokens, "eos_token": sorted(eos_token_ids) or None}
    as_published = llguidance.hf.from_tokenizer(tokenizer, **options)
    spelled = _SpelledTokens(tokenizer, as_published, num_logits)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(spelled), **options)


class _SpelledTokens:
    """What llguidance's wrapper needs of a tokenizer in Python: it makes tokens of a text that spell it, byte by byte.

    Where a grammar leaves only one text, llguidance allows the tokens that the tokenizer makes of it. If they do not spell
    that text, every answer fails there. So no text becomes a special token, since no grammar means one by its name. And where
    the tokenizer's tokens spell another text, because it normalizes or strips, or include one that the model lacks, the
    longest tokens that fit are taken.

    Attributes:
        eos_token_id: the tokenizer's.
        bos_token_id: likewise.
        tokens: the bytes of each; empty for those not used in grammars: the model lacks them or writes them differently.
        special_token_ids: ids of the tokens that are not text.
    """

    def __init__(self, tokenizer: Any, as_published: llguidance.LLTokenizer, num_logits: int) -> None:
        self.eos_token_id = as_published.eos_token
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.tokens = [as_published.decode_bytes([token_id]) for token_id in range(num_logits)]
        self.tokens += [b""] * (as_published.vocab_size - num_logits)
        self.special_token_ids = [token_id for token_id in range(num_logits) if as_published.is_special_token(token_id)]
        # The text of an added token may differ from its name: some normalizers put a space before it in every answer.
        for token_id, token in tokenizer.added_tokens_decoder.items():
            renamed = tokenizer.convert_ids_to_tokens(token_id) != token.content
            if renamed and token_id not in self.special_token_ids:
                self.tokens[token_id] = b""
        self._spellings = list(self.tokens)
        for token_id in self.special_token_ids:
            self._spellings[token_id] = b""
        self._token_ids = {spelling: token_id for token_id, spelling in enumerate(self._spellings)}
        self._max_length = max(map(len, self._spellings))
        self._backend = _without_added_spaces(tokenizer.backend_tokenizer)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True

    def __call__(self, text: str) -> list[int]:
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        spelling = text.encode()
        if b"".join(self._spellings[token_id] for token_id in token_ids) == spelling:
            return token_ids
        return self._longest_tokens(spelling)

    def _longest_tokens(self, spelling: bytes) -> list[int]:
        """The longest token that fits, repeatedly, up to the first byte that no token begins with."""
        token_ids: list[int] = []
        start = 0
        while start < len(spelling):
            ends = range(min(start + self._max_length, len(spelling)), start, -1)
            end = next((end for end in ends if spelling[start:end] in self._token_ids), None)
            if end is None:
                break
            token_ids.append(self._token_ids[spelling[start:end]])
            start = end
        return token_ids


def _without_added_spaces(backend: Any) -> Any:
    """A copy that puts no space before a text, unlike SentencePiece's: what a grammar leaves may be within a word."""
    import tokenizers

    state = json.loads(backend.to_str())
    if state["normalizer"]:
        parts = state["normalizer"].get("normalizers", [state["normalizer"]])
        kept = [part for part in parts if part["type"] != "Prepend"]
        state["normalizer"] = {"type": "Sequence", "normalizers": kept}
    if state["pre_tokenizer"]:
        for part in state["pre_tokenizer"].get("pretokenizers", [state["pre_tokenizer"]]):
            if part["type"] == "Metaspace":
                part["prepend_scheme"] = "never"
            elif part["type"] == "ByteLevel":
                part["add_prefix_space"] = False
    return tokenizers.Tokenizer.from_str(json.dumps(state))
