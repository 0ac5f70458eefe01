"""Token ids as big-endian bytes: the form in which the cache keeps and compares them.

Four bytes a token, the highest first, so that the order of bytes is the order of tokens: equality and common prefixes
are memory comparisons, and a sorted index of such keys has the longest common prefix at a neighbour.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.errors import InvalidArgumentError

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1

TokenIds = Sequence[int] | NDArray[np.integer]


def encode(tokens: TokenIds) -> bytes:
    """The bytes of ``tokens``, a list of ints or a one-dimensional integer array.

    Raises:
        InvalidArgumentError: not that, or an id below 0 or above 2**31 - 1.
    """
    if isinstance(tokens, np.ndarray):
        ids = tokens
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidArgumentError(
                f"tokens: expected a one-dimensional integer array, got {ids.ndim} dimensions of {ids.dtype}"
            )
    else:
        try:
            # Three times as fast as numpy's own conversion of a list, and it refuses floats.
            ids = np.frombuffer(array("i", tokens), dtype=np.int32)
        except (TypeError, OverflowError) as error:
            raise InvalidArgumentError(f"tokens: expected ids from 0 to {MAX_TOKEN_ID}: {error}") from error
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        raise InvalidArgumentError(
            f"tokens: expected ids from 0 to {MAX_TOKEN_ID}, got {int(ids.min())} to {int(ids.max())}"
        )
    return ids.astype(">i4").tobytes()


def decode(data: bytes | bytearray) -> NDArray[np.int32]:
    """The token ids of `encode`'s bytes, as a new int32 array."""
    return np.frombuffer(data, dtype=">i4").astype(np.int32)


def common_tokens(a: bytes | bytearray, a_start: int, b: bytes | bytearray) -> int:
    """How many tokens ``a`` from byte ``a_start`` on and ``b`` have in common at their beginning."""
    size = min(len(a) - a_start, len(b))
    left = np.frombuffer(a, dtype=np.uint32, count=size // TOKEN_BYTES, offset=a_start)
    right = np.frombuffer(b, dtype=np.uint32, count=size // TOKEN_BYTES)
    differs = left != right
    return int(differs.argmax()) if differs.any() else size // TOKEN_BYTES
