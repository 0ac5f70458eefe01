"""Token ids as bytes."""

from __future__ import annotations

import random

import pytest

from radixkv.cache.tokens import TOKEN_BYTES, common_tokens, encode


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 256, 257, 5000])
def test_common_tokens_are_counted_to_the_first_that_differs(num_tokens: int) -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(2**31) for _ in range(num_tokens)]
    before = [1, 2, 3]
    stored = encode(before + tokens)
    assert common_tokens(stored, len(before) * TOKEN_BYTES, encode(tokens)) == num_tokens
    assert common_tokens(stored, len(before) * TOKEN_BYTES, encode([*tokens, 7])) == num_tokens
    for place in {0, num_tokens // 2, num_tokens - 1} if num_tokens else ():
        for bit in (0, 30):
            other = [*tokens]
            other[place] ^= 1 << bit
            assert common_tokens(stored, len(before) * TOKEN_BYTES, encode(other)) == place
