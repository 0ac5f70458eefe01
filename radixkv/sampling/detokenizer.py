"""Incremental detokenization, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What decoding yields for bytes that do not, or do not yet, form a complete character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# The number of a prompt's last tokens that the text of the first new token may depend on.
_CONTEXT_TOKENS = 5


class IncrementalDetokenizer:
    """The text of one answer.

    Only the last few tokens are decoded each time. The text of a token can depend on the one before (a leading space, the
    bytes of one character), so a window is decoded with and without its newest tokens, and the difference is the new text::

        token ids      ...  a b c d e f       new text = decode(a..f) minus decode(a..d)
        prefix_offset ──────┘       │
        read_offset   ──────────────┘         all before it is already text

    The first window is the end of the prompt: SentencePiece-style tokenizers drop the leading space of a text, and an answer
    starts in the middle of one. Text is final once it does not end inside a character. (The scheme of vLLM and
    text-generation-inference.)

    Without stop strings, tokens are decoded when somebody reads the text, all at once.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the tokens before the answer; only the last few are used.
        skip_special_tokens: leave special tokens out.
        stop: strings that end the text.
        include_stop_str_in_output: whether the text then ends with the string, or before it.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int] | NDArray[np.int32] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = list(stop)
        self._include_stop_str = include_stop_str_in_output
        self._stop_buffer_length = max((len(string) for string in self._stop), default=1) - 1
        self._token_ids = [int(token_id) for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]]
        self._prefix_offset = 0
        self._read_offset = self._tried_offset = len(self._token_ids)
        if self._decode(0, self._read_offset).endswith(_INCOMPLETE):
            # The first new bytes may complete a character of the prompt: they must not be decoded together with it.
            self._token_ids, self._read_offset, self._tried_offset = [], 0, 0
        self._text = ""
        self._num_streamed = 0
        self._complete = False

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        self._read_tokens()
        return self._text

    def append(self, token_ids: Sequence[int], may_stop: bool = True) -> str | None:
        """Add tokens; returns the stop string that the new text completes, the one that ends first, or None.

        Args:
            may_stop: False: stop strings are treated as plain text (before ``min_tokens``).
        """
        if not self._stop:
            self._token_ids += token_ids
            return None
        for token_id in token_ids:
            self._token_ids.append(token_id)
            text = self._read(len(self._token_ids))
            stop = self._append_text(text, may_stop) if text else None
            if stop is not None:
                return stop
        return None

    def finish(self) -> None:
        """End the text: incomplete characters become text, and `delta` withholds nothing any more."""
        self._read_tokens()
        if not self._complete and self._read_offset < len(self._token_ids):
            before = self._decode(self._prefix_offset, self._read_offset)
            self._append_text(self._decode(self._prefix_offset, len(self._token_ids))[len(before) :], may_stop=False)
        self._complete = True

    def delta(self) -> str:
        """Text that is new since the last call and final: it cannot become part of a stop string."""
        self._read_tokens()
        end = len(self._text) if self._complete else max(self._num_streamed, len(self._text) - self._stop_buffer_length)
        piece = self._text[self._num_streamed : end]
        self._num_streamed = end
        return piece

    def _read_tokens(self) -> None:
        """Make text of all tokens that are not yet; `append` does so if there are stop strings."""
        stop = len(self._token_ids)
        if self._complete or self._stop or self._tried_offset == stop:
            return
        text = self._read(stop)
        if not text:
            # The last tokens end inside a character: those before them may not.
            for end in range(self._tried_offset + 1, stop):
                text += self._read(end)
        self._tried_offset = stop
        self._append_text(text, may_stop=False)

    def _read(self, end: int) -> str:
        """The text of the tokens up to ``end`` that are not text yet; empty while they end inside a character."""
        before = self._decode(self._prefix_offset, self._read_offset)
        after = self._decode(self._prefix_offset, end)
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, end
        return after[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(
            self._token_ids[start:stop],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def _append_text(self, piece: str, may_stop: bool) -> str | None:
        search_from = max(0, len(self._text) - self._stop_buffer_length)
        self._text += piece
        positions = [(self._text.find(stop, search_from), stop) for stop in self._stop] if may_stop else []
        found = [(position + len(stop), stop) for position, stop in positions if position >= 0]
        if not found:
            return None
        end, stop = min(found)
        self._text = self._text[: end if self._include_stop_str else end - len(stop)]
        self._complete = True
        return stop
