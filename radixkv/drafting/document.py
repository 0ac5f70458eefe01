"""A list of tokens in which the last tokens of a sequence are looked up: its own prompt and answer, or a prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.drafting.drafter import NO_DRAFT, Draft
from radixkv.drafting.kgrams import RUN_LENGTHS, KGramTable, kgram_hash, kgram_hashes

# The strength of a draft from near the position where a token differed: assuming that tokens were replaced by as many others;
# or, as others may have been inserted or left out, from where the last token occurs, or the last two.
REALIGNED, NEAR_TOKEN, NEAR_PAIR = 0, 1, 3
# How far beyond the position that replaced tokens imply the last ones are looked for.
_NEAR = 16
# So many tokens may differ before a position in the text is given up.
_MAX_DIFFERING = 8
# Least number of a table's entries per token. With so many, seven of eight older runs are still there.
_ENTRIES_PER_TOKEN = 8
# Fewer tokens are indexed one by one.
_FEW_TOKENS = 16
_MIN_ENTRIES, _MAX_ENTRIES = 1 << 10, 1 << 17


class Document:
    """The tokens and an index of their runs.

    Args:
        tokens: the text; may grow in place.
        begins: whether an answer is expected to begin with it.
    """

    def __init__(self, tokens: Sequence[int], begins: bool = False) -> None:
        self._tokens = tokens
        self._num_entries = 0  # of each table
        self._tables: dict[int, KGramTable] = {}
        self._num_indexed = 0
        # Where in the text the sequence is thought to be; None: nowhere.
        self._position: int | None = 0 if begins else None
        self._num_seen: int | None = None
        self._num_differing = 0

    @property
    def nbytes(self) -> int:
        """Size of the index."""
        return sum(table.nbytes for table in self._tables.values())

    def draft(self, sequence: Sequence[int], max_tokens: int) -> Draft:
        """How the text goes on where the last tokens of a sequence, which may be the text itself, occurred in it."""
        num_new = 0 if self._num_seen is None else len(sequence) - self._num_seen
        began = self._num_seen is None and self._position is not None
        self._num_seen = len(sequence)
        self._index(len(self._tokens) - (sequence is self._tokens))
        if began:
            return self._from(0, max_tokens, RUN_LENGTHS[0])
        draft = NO_DRAFT
        for k in RUN_LENGTHS:
            # Two tokens often occur elsewhere too: a place near the position is preferred to that.
            if k == RUN_LENGTHS[-1] and (draft := self._realigned(sequence, num_new, max_tokens)).token_ids:
                break
            position = self._find(sequence, k)
            if position is not None:
                self._position, self._num_differing = position, 0
                draft = self._from(position, max_tokens, k)
                break
        return draft

    def _realigned(self, sequence: Sequence[int], num_new: int, max_tokens: int) -> Draft:
        """From near the position where a few tokens were replaced, inserted or left out."""
        if self._position is None:
            return NO_DRAFT
        self._num_differing += num_new
        if self._num_differing > _MAX_DIFFERING:
            return NO_DRAFT
        tokens, last = self._tokens, sequence[-2:]
        replaced, strength = self._position + num_new, REALIGNED
        stop = min(replaced + _NEAR, len(tokens) - (sequence is tokens))
        near = [at for at in range(max(self._position - 2, 2), stop) if tokens[at - 1] == last[-1]]
        self._position = replaced
        if near:
            self._position = min(near, key=lambda at: (tokens[at - 2 : at] != last, abs(at - replaced)))
            strength = NEAR_PAIR if tokens[self._position - 2 : self._position] == last else NEAR_TOKEN
        return self._from(self._position, max_tokens, strength)

    def _from(self, position: int, max_tokens: int, strength: int) -> Draft:
        return Draft(self._tokens[position : position + max_tokens], strength)

    def _find(self, sequence: Sequence[int], k: int) -> int | None:
        """The position behind the last occurrence of the sequence's last ``k`` tokens, if the text goes on there."""
        last = sequence[-k:]
        position = self._tables[k].get(kgram_hash(last))
        if position < k or position >= len(self._tokens) or self._tokens[position - k : position] != last:
            return None
        return position

    def _index(self, stop: int) -> None:
        """Note the runs that end before ``stop``."""
        self._make_room(stop)
        start, self._num_indexed = self._num_indexed, stop
        tokens = self._tokens
        if stop - start < _FEW_TOKENS:
            for k, table in self._tables.items():
                for end in range(max(start + 1, k), stop + 1):
                    table.put(kgram_hash(tokens[end - k : end]), end)
            return
        for k, table in self._tables.items():
            first = max(start - k + 1, 0)
            hashes = kgram_hashes(np.array(tokens[first:stop], dtype=np.int32), k)
            table.put_all(hashes, np.arange(first + k, stop + 1, dtype=np.int32))

    def _make_room(self, num_tokens: int) -> None:
        """Make tables for so many tokens. They double as the text grows, and the text is then indexed anew."""
        num_entries = min(max(_ENTRIES_PER_TOKEN * num_tokens, _MIN_ENTRIES), _MAX_ENTRIES)
        if num_entries > self._num_entries:
            self._num_entries = 1 << (num_entries - 1).bit_length()
            self._tables = {k: KGramTable(self._num_entries) for k in RUN_LENGTHS}
            self._num_indexed = 0
