"""A list of tokens in which the last tokens of a sequence are looked up: its own prompt and answer, or a prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.drafting.drafter import NO_DRAFT, Draft
from radixkv.drafting.kgrams import KGramTable, kgram_hash, kgram_hashes

# Lengths of runs that are looked for, the longest first: where a long one is found, the text mostly goes on likewise.
RUNS = (8, 4, 2)
# The strength of a draft that goes on where the last one was in the text, although a token has differed since.
REALIGNED = 1
# So many tokens may differ before a position in the text is given up.
_MAX_DIFFERING = 4
# Of each table. With so many a token, seven of eight older runs are still there when the text is full.
_ENTRIES_PER_TOKEN = 8
# Fewer tokens are indexed one by one.
_FEW_TOKENS = 16
_MIN_ENTRIES, _MAX_ENTRIES = 1 << 10, 1 << 17


class Document:
    """The tokens and an index of their runs.

    Args:
        tokens: the text; may grow in place.
        capacity: tokens that it may grow to.
        begins: whether a sequence that has generated nothing is expected to begin with it.
    """

    def __init__(self, tokens: Sequence[int], capacity: int, begins: bool = False) -> None:
        self._tokens = tokens
        num_entries = min(max(_ENTRIES_PER_TOKEN * max(capacity, len(tokens)), _MIN_ENTRIES), _MAX_ENTRIES)
        self._tables = {k: KGramTable(num_entries) for k in RUNS}
        self._num_indexed = 0
        # Where in the text the sequence is thought to be; None: nowhere.
        self._position: int | None = 0 if begins else None
        self._num_seen: int | None = None
        self._num_differing = 0

    @property
    def nbytes(self) -> int:
        """Of the index."""
        return sum(table.nbytes for table in self._tables.values())

    def draft(self, sequence: Sequence[int], max_tokens: int) -> Draft:
        """How the text goes on where the sequence's last tokens occurred in it.

        Args:
            sequence: all of its tokens; may be the text itself.
            max_tokens: expected at most.
        """
        num_new = 0 if self._num_seen is None else len(sequence) - self._num_seen
        began = self._num_seen is None and self._position is not None
        self._num_seen = len(sequence)
        self._index(len(self._tokens) - (sequence is self._tokens))
        if began:
            return self._from(0, max_tokens, RUNS[0])
        draft = NO_DRAFT
        for k in RUNS:
            position = self._find(sequence, k)
            if position is not None:
                if k == RUNS[-1] and (realigned := self._realigned(num_new, max_tokens)) is not None:
                    draft = realigned
                    break
                self._position, self._num_differing = position, 0
                draft = self._from(position, max_tokens, k)
                break
        else:
            draft = self._realigned(num_new, max_tokens) or NO_DRAFT
        self._index(len(self._tokens))
        return draft

    def _realigned(self, num_new: int, max_tokens: int) -> Draft | None:
        """From the position where a few tokens were replaced by as many others."""
        if self._position is None:
            return None
        self._num_differing += num_new
        if self._num_differing > _MAX_DIFFERING:
            self._position = None
            return None
        self._position += num_new
        draft = self._from(self._position, max_tokens, REALIGNED)
        return draft if draft.token_ids else None

    def _from(self, position: int, max_tokens: int, strength: int) -> Draft:
        return Draft(self._tokens[position : position + max_tokens], strength)

    def _find(self, sequence: Sequence[int], k: int) -> int | None:
        """What follows the last position at which the sequence's last ``k`` tokens occur, if the text goes on there."""
        if len(sequence) < k:
            return None
        last = sequence[-k:]
        position = self._tables[k].get(kgram_hash(last))
        if position < k or position >= len(self._tokens) or self._tokens[position - k : position] != last:
            return None
        return position

    def _index(self, stop: int) -> None:
        """Note the runs that end before ``stop``."""
        start = self._num_indexed
        if stop <= start:
            return
        self._num_indexed = stop
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
