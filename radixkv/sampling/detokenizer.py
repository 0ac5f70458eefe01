"""Incremental detokenization, and the search for stop strings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What decoding yields for bytes that do not, or do not yet, form a complete character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# How many of a prompt's last tokens the text of the first new token may depend on.
_CONTEXT_TOKENS = 5
# An incomplete character has at most this many bytes, and so at most this many tokens.
_MAX_INCOMPLETE = 3
# A window of more than `_MAX_WINDOW_TOKENS` is cut to its last few. Those must be more than an incomplete character takes at
# either end: the first bytes may belong to a character that the cut splits, the last ones to an unfinished one.
_MAX_WINDOW_TOKENS = 24
_MIN_WINDOW_TOKENS = 8
# Texts of single tokens to keep: about as many as a large vocabulary has.
_MAX_TOKEN_TEXTS = 1 << 18

# For what is derived from a tokenizer, which does not change; few are in use at a time.
_once_per_tokenizer = lru_cache(maxsize=8)


def token_decoder(tokenizer: Any) -> Callable[[int], str | None]:
    """`decode_token` with a cache; the text is None if there is no tokenizer."""

    @lru_cache(maxsize=_MAX_TOKEN_TEXTS)
    def decode(token_id: int) -> str | None:
        return None if tokenizer is None else decode_token(tokenizer, token_id)

    return decode


def decode_tokens(tokenizer: Any, token_ids: Sequence[int], **options: bool) -> str:
    """Their text, where a token that a tokenizer lacks has none: a model's vocabulary may be larger than its tokenizer's.

    Tokenizers that are written in Python would raise, or make a text of it.
    """
    known = _tokens_in_python(tokenizer)
    if known is not None:
        token_ids = [token_id for token_id in token_ids if token_id in known]
    text: str = tokenizer.decode(token_ids, **options)
    return text


@_once_per_tokenizer
def _tokens_in_python(tokenizer: Any) -> frozenset[int] | None:
    """The tokens of a tokenizer that is written in Python; None: it is not, and gives those that it lacks no text."""
    fast = getattr(tokenizer, "backend_tokenizer", None) is not None
    return None if fast else frozenset(tokenizer.get_vocab().values())


def decode_token(tokenizer: Any, token_id: int) -> str:
    """The text of a single token, special ones included, as it appears within a text.

    SentencePiece-style tokenizers drop the leading space of a text, and so that of a token which is decoded alone.
    """
    alone = decode_tokens(tokenizer, [token_id])
    if is_byte_level(tokenizer):
        return alone
    # The second time, it does not begin the text.
    once, twice = (
        decode_tokens(tokenizer, [token_id] * count, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for count in (1, 2)
    )
    return twice[len(once) :] if twice.startswith(once) else alone


@_once_per_tokenizer
def is_byte_level(tokenizer: Any) -> bool:
    """Whether the characters of its tokens' names stand for bytes, as those of GPT-2 and its derivatives do."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel(" in repr(getattr(backend, "decoder", None))


@_once_per_tokenizer
def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """Those that a tokenizer leaves out of text by default."""
    return frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)


@_once_per_tokenizer
def _byte_tokens(tokenizer: Any) -> Mapping[int, int]:
    """The byte of each token of SentencePiece's byte fallback (Llama 2, Mistral, Gemma); empty for other tokenizers."""
    found: list[int | None] = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    bytes_by_token = {
        token_id: byte for byte, token_id in enumerate(found) if token_id not in (None, tokenizer.unk_token_id)
    }
    letter = found[ord("A")]
    return bytes_by_token if letter in bytes_by_token and tokenizer.decode([letter]) == "A" else {}


def _plain_backend(tokenizer: Any) -> Any:
    """What decodes for a tokenizer that adds nothing to that, in less than half the time; None: this one may."""
    from transformers import PreTrainedTokenizerFast  # only here: it has been imported if there is such a tokenizer

    for name in ("decode", "_decode"):
        own = getattr(getattr(tokenizer, name, None), "__func__", None)
        if own is None or own is not getattr(PreTrainedTokenizerFast, name, None):
            return None
    return tokenizer.backend_tokenizer


def answer_text(
    tokenizer: Any, prompt_token_ids: Sequence[int], token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of a whole answer to a prompt, of which only the last few tokens are decoded."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    detokenizer.append(token_ids)
    detokenizer.finish()
    return detokenizer.text


class IncrementalDetokenizer:
    """The text of one answer.

    Only the last few tokens are decoded each time, however long the answer is. The text of a token can depend on those before
    it (a leading space, the bytes of one character), so a window is decoded, whose first ``num_read`` characters are text
    already::

        window      a b c d e f          the tokens that are decoded; it begins with the end of the prompt
        decoded     "...some text"       new text = what follows, except bytes at the end that may become a character
        num_read    ────────┘

    The first window is the end of the prompt: SentencePiece-style tokenizers drop the leading space of a text, and an answer
    starts in the middle of one. (vLLM and text-generation-inference compare the decoded text of two windows; theirs grow for
    as long as the text ends inside a character.)

    Without stop strings, tokens are decoded when the text is read, all at once.

    Byte fallback decodes a whole run of bytes to replacement characters if its last character is incomplete. So bytes join
    the window as whole characters; until then they are kept apart, and each byte that never becomes part of one becomes a
    replacement character.

    Args:
        prompt_token_ids: the tokens before the answer; only the last few are used.
        skip_special_tokens: leave special tokens out.
        shown_special_tokens: those that stay nevertheless.
        stop: strings that end the text.
        include_stop_str_in_output: whether the text then ends with the string, or before it.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int] | NDArray[np.int32] = (),
        *,
        skip_special_tokens: bool = True,
        shown_special_tokens: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        self._skip_special_tokens = skip_special_tokens and not shown_special_tokens
        self._left_out: frozenset[int] = frozenset()
        if skip_special_tokens and shown_special_tokens:
            self._left_out = _special_tokens(tokenizer).difference(shown_special_tokens)
        self._stop = list(stop)
        self._include_stop_str = include_stop_str_in_output
        self._stop_buffer_length = max((len(string) for string in self._stop), default=1) - 1
        self._byte_tokens = _byte_tokens(tokenizer)
        start = self._character_start(prompt_token_ids, max(0, len(prompt_token_ids) - _CONTEXT_TOKENS))
        self._window = [int(token_id) for token_id in prompt_token_ids[start:]]
        context = self._decode(self._window)
        if context.endswith(_INCOMPLETE):
            # The first new bytes may complete a character of the prompt: they must not be decoded together with it.
            self._window, context = [], ""
        self._num_read = len(context)
        self._unread: list[int] = []
        self._partial: list[int] = []  # byte tokens that may become a character
        self._text = ""
        self._num_streamed = 0
        self._complete = False

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        self._read_tokens()
        return self._text

    def fork(self) -> IncrementalDetokenizer:
        """An independent copy of this state."""
        other = copy(self)
        other._window, other._unread, other._partial = list(self._window), list(self._unread), list(self._partial)
        return other

    def append(self, token_ids: Sequence[int], may_stop: bool = True) -> str | None:
        """Add tokens; returns the stop string that the new text completes, the one that ends first, or None.

        Args:
            may_stop: False: stop strings are treated as plain text (before ``min_tokens``).
        """
        if not self._stop:
            self._unread += token_ids
            return None
        for token_id in token_ids:
            text = self._read([token_id])
            stop = self._append_text(text, may_stop) if text else None
            if stop is not None:
                return stop
        return None

    def finish(self) -> None:
        """End the text: incomplete characters become text, and `delta` withholds nothing any more."""
        self._read_tokens()
        if not self._complete:
            self._append_text(self._end_partial() + self._decode(self._window)[self._num_read :], may_stop=False)
        self._complete = True

    def delta(self) -> str:
        """Text that is new since the last call and final: it cannot become part of a stop string."""
        self._read_tokens()
        end = len(self._text) if self._complete else max(self._num_streamed, len(self._text) - self._stop_buffer_length)
        piece = self._text[self._num_streamed : end]
        self._num_streamed = end
        return piece

    def _read_tokens(self) -> None:
        """Decode all tokens that are not yet text; with stop strings, `append` has done so already."""
        if self._unread and not self._complete:
            self._append_text(self._read(self._unread), may_stop=False)
            self._unread = []

    def _read(self, token_ids: Sequence[int]) -> str:
        """The text that more tokens add, without bytes at its end that may become a character."""
        if not self._byte_tokens:
            return self._read_into_window(token_ids)
        text = ""
        for are_bytes, run in itertools.groupby(token_ids, self._byte_tokens.__contains__):
            if are_bytes:
                text += "".join(map(self._read_byte, run))
            else:
                text += self._end_partial() + self._read_into_window(list(run))
        return text

    def _read_byte(self, token_id: int) -> str:
        """The text that a byte token adds, see the class."""
        self._partial.append(token_id)
        lost = ""
        while self._partial:
            try:
                bytes(map(self._byte_tokens.__getitem__, self._partial)).decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                del self._partial[0]
                lost += _INCOMPLETE
            else:
                character, self._partial = self._partial, []
                return lost + self._read_into_window(character)
        return lost

    def _end_partial(self) -> str:
        """The text of an incomplete character's bytes, which no further byte follows."""
        lost, self._partial = len(self._partial), []
        return lost * _INCOMPLETE

    def _read_into_window(self, token_ids: Sequence[int]) -> str:
        self._window += token_ids
        decoded = self._decode(self._window)
        num_incomplete = len(decoded) - len(decoded.rstrip(_INCOMPLETE))
        stop = len(decoded) - min(num_incomplete, _MAX_INCOMPLETE)
        text = decoded[self._num_read : stop]
        self._num_read = min(max(self._num_read, stop), len(decoded))
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._shrink_window(decoded[self._num_read :])
        return text

    def _shrink_window(self, rest: str) -> None:
        """Keep only the last tokens of the window, whose decoded text ends with ``rest``, which is not text yet."""
        tail = self._window[self._character_start(self._window, len(self._window) - _MIN_WINDOW_TOKENS) :]
        if rest or not self._decode(tail):
            # Tokens without text could take the place of those that later text depends on.
            tail = [token_id for token_id in self._window if self._has_text(token_id)][-_MIN_WINDOW_TOKENS:]
        self._window = tail
        self._num_read = max(0, len(self._decode(tail)) - len(rest))

    def _character_start(self, token_ids: Sequence[int] | NDArray[np.int32], position: int) -> int:
        """Where the character at a position begins; the position itself, unless its byte token continues a character."""
        first = max(0, position - _MAX_INCOMPLETE)
        while position > first and self._byte_tokens.get(int(token_ids[position]), 0) & 0xC0 == 0x80:
            position -= 1
        return position

    def _has_text(self, token_id: int) -> bool:
        # Twice: alone, a space has no text where a text's leading space is dropped.
        return bool(self._decode([token_id, token_id]))

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._left_out:
            token_ids = [token_id for token_id in token_ids if token_id not in self._left_out]
        skip = self._skip_special_tokens
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip)
            return text
        return decode_tokens(self._tokenizer, token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    def _append_text(self, piece: str, may_stop: bool) -> str | None:
        before = len(self._text)
        self._text += piece
        if not may_stop:
            return None
        # A match must end in the new text: one that ended before it was within ``min_tokens``, and does not count.
        positions = [(self._text.find(stop, max(0, before + 1 - len(stop))), stop) for stop in self._stop]
        found = [(position + len(stop), stop) for position, stop in positions if position >= 0]
        if not found:
            return None
        end, stop = min(found)
        self._text = self._text[: end if self._include_stop_str else end - len(stop)]
        self._complete = True
        return stop
