"""Text from tokens as they come, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What decoding gives for bytes that are not yet, or never, a whole character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# So many of a prompt's last tokens decide how the first new one reads.
_CONTEXT_TOKENS = 5


class IncrementalDetokenizer:
    """The text of one answer.

    Only the last few tokens are decoded each time. How a token reads can depend on the one before (a leading space, the
    bytes of one character), so a window is decoded with and without its newest tokens, and the difference is the new text::

        token ids   ... a b c d | e f        prefix = a b c d, already text
                        └─ window ─┘         new text = decode(a..f) minus decode(a..d)

    The first window is the end of the prompt: tokenizers in the style of SentencePiece leave out the space that a text begins
    with, and an answer begins in the middle of one. Text is final once it does not end inside a character. (The scheme of
    vLLM and text-generation-inference.)

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: what comes before the answer; the last few are looked at.
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
        self._include_stop = include_stop_str_in_output
        self._held_back = max((len(string) for string in self._stop), default=1) - 1
        self._token_ids = [int(token_id) for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]]
        self._window_start = 0
        self._num_read = len(self._token_ids)
        if self._decode(0, self._num_read).endswith(_INCOMPLETE):
            # The first new bytes may complete a character of the prompt's: they must not be taken for its own.
            self._token_ids, self._num_read = [], 0
        self._text = ""
        self._num_given = 0
        self._complete = False

    @property
    def text(self) -> str:
        """All text so far, a stop string cut off."""
        return self._text

    def append(self, token_ids: Sequence[int], may_stop: bool = True) -> str | None:
        """Add tokens; returns the stop string that the new text completes, the one that ends first, or None.

        Args:
            may_stop: False: stop strings are text like any other still.
        """
        for token_id in token_ids:
            self._token_ids.append(token_id)
            before = self._decode(self._window_start, self._num_read)
            after = self._decode(self._window_start, len(self._token_ids))
            if len(after) <= len(before) or after.endswith(_INCOMPLETE):
                continue
            stop = self._add(after[len(before) :], may_stop)
            self._window_start, self._num_read = self._num_read, len(self._token_ids)
            if stop is not None:
                return stop
        return None

    def finish(self) -> None:
        """No more tokens will come: bytes that are no whole character are text now, and nothing is held back."""
        if not self._complete and self._num_read < len(self._token_ids):
            before = self._decode(self._window_start, self._num_read)
            self._add(self._decode(self._window_start, len(self._token_ids))[len(before) :], may_stop=False)
        self._complete = True

    def delta(self) -> str:
        """Text that is new since the last call and final: no stop string can still begin in it."""
        end = len(self._text) if self._complete else max(self._num_given, len(self._text) - self._held_back)
        piece = self._text[self._num_given : end]
        self._num_given = end
        return piece

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(
            self._token_ids[start:stop],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def _add(self, piece: str, may_stop: bool) -> str | None:
        search_from = max(0, len(self._text) - self._held_back)
        self._text += piece
        places = [(self._text.find(stop, search_from), stop) for stop in self._stop] if may_stop else []
        found = [(place + len(stop), stop) for place, stop in places if place >= 0]
        if not found:
            return None
        end, stop = min(found)
        self._text = self._text[: end if self._include_stop else end - len(stop)]
        self._complete = True
        return stop
