"""How far tiers have a prefix, and which of them are queried for its partly filled block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.dict_tier import PartlyFilledDictTier

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.prefix_search import find_prefix
from radixkv.tiers.stack import Span, TierStack

# Three whole blocks of four tokens, and three tokens more.
TOKENS = np.arange(15, dtype="<i4").tobytes()
KEYS = PrefixKeys(b"model", b"", 16)


class QueriedTier(PartlyFilledDictTier):
    """Has some whole blocks, and some tokens of the block behind the first ones; counts queries for the latter."""

    def __init__(self, whole: Sequence[int], num_before: int = 0, num_tokens: int = 0) -> None:
        super().__init__()
        self.num_queries = 0
        keys = [KEYS.of("", TOKENS)[index] for index in whole]
        if num_tokens:
            stop = 16 * num_before + 4 * num_tokens
            keys.append(KEYS.partly_filled("", TOKENS[:stop], num_before)[0])
        self.put_many(keys, np.zeros((len(keys), 8), np.uint8))

    def first_present(self, keys: Sequence[BlockKey]) -> int | None:
        self.num_queries += 1
        return super().first_present(keys)


@pytest.mark.parametrize(
    ("near", "far", "start", "spans", "num_tokens", "is_far_queried"),
    [
        (QueriedTier([0, 1, 2], 3, 3), QueriedTier([]), 0, [Span(0, 0, 4)], 15, False),
        (QueriedTier([0, 1, 2]), QueriedTier([], 3, 3), 0, [Span(0, 0, 3)], 12, False),
        (QueriedTier([0, 1]), QueriedTier([2], 3, 2), 0, [Span(0, 0, 2), Span(1, 2, 4)], 14, True),
        (QueriedTier([0, 1], 3, 1), QueriedTier([2]), 0, [Span(0, 0, 2), Span(1, 2, 3), Span(0, 3, 4)], 13, True),
        (QueriedTier([0, 1]), QueriedTier([], 2, 3), 0, [Span(0, 0, 2), Span(1, 2, 3)], 11, True),
        (QueriedTier([1, 2]), QueriedTier([0]), 1, [Span(0, 1, 3)], 12, False),
        (QueriedTier([1, 2], 3, 3), QueriedTier([]), 0, [], 12, False),
    ],
    ids=["near", "far alone", "far", "both", "behind a gap", "from the second on", "nothing at the beginning"],
)
def test_a_prefix_is_found_to_the_token_without_queries_in_vain(
    near: QueriedTier, far: QueriedTier, start: int, spans: list[Span], num_tokens: int, is_far_queried: bool
) -> None:
    keys, found = find_prefix(TierStack([near, far]), KEYS, "", TOKENS, start)
    assert found == spans
    assert b"".join(key.tokens for key in keys) == TOKENS[: 4 * num_tokens]
    assert (far.num_queries > 0) == is_far_queried
