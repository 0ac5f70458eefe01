"""Token ids as bytes: the form in which the cache keeps and compares them.

Four bytes per token, as the machine stores an int32, so that encoding an array is one copy, and equality and common
prefixes are memory comparisons. In an index sorted by these bytes, the keys with the longest common prefix are
neighbours; which order of tokens that is does not matter.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.errors import InvalidArgumentError

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1
# Of so few bytes, such as a block's, integers of Python are compared in a fifth to a half of numpy's time.
_FEW_BYTES = 1024

TokenIds = Sequence[int] | NDArray[np.integer]


def encode(tokens: TokenIds, start: int = 0) -> bytes:
    """The bytes of ``tokens``, a list of ints or a one-dimensional integer array, from the ``start``-th on.

    Raises:
        InvalidArgumentError: they are neither, or an id is below 0 or above 2**31 - 1.
    """
    if isinstance(tokens, np.ndarray):
        return _encode_array(tokens[start:] if start and tokens.ndim else tokens)
    if not isinstance(tokens, list | Sequence) or isinstance(tokens, bytes | bytearray | str | memoryview):
        raise InvalidArgumentError(f"tokens: expected a list of ids or an integer array, got {type(tokens).__name__}")
    try:
        # Three times as fast as numpy's own conversion of a list, and it refuses floats.
        ids = array("i", tokens[start:] if start else tokens)
    except (TypeError, OverflowError) as error:
        wrong = next((token for token in tokens if not _is_id(token)), tokens)
        raise InvalidArgumentError(f"tokens: expected ids from 0 to {MAX_TOKEN_ID}, got {wrong!r:.80}") from error
    # For the token or two of a decoding step, calls of numpy would cost more than everything else.
    lowest = min(ids, default=0) if len(ids) < 64 else int(np.frombuffer(ids, dtype=np.int32).min())
    if lowest < 0:
        raise InvalidArgumentError(f"tokens: expected ids from 0 to {MAX_TOKEN_ID}, got {lowest}")
    return ids.tobytes()


def _is_id(token: Any) -> bool:
    try:
        return 0 <= operator.index(token) <= MAX_TOKEN_ID
    except TypeError:
        return False


def encode_prompt(tokens: TokenIds) -> bytes:
    """`encode`, which refuses an empty list as well."""
    prompt = encode(tokens)
    if not prompt:
        raise InvalidArgumentError("tokens: expected at least one, got none")
    return prompt


def _encode_array(ids: NDArray[np.integer]) -> bytes:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"tokens: expected a one-dimensional integer array, got {ids.ndim} dimensions of {ids.dtype}"
        )
    if ids.size:
        lowest, highest = int(ids.min()), 0 if ids.dtype == np.int32 else int(ids.max())
        if lowest < 0 or highest > MAX_TOKEN_ID:
            raise InvalidArgumentError(
                f"tokens: expected ids from 0 to {MAX_TOKEN_ID}, got {lowest if lowest < 0 else highest}"
            )
    return ids.astype(np.int32, copy=False).tobytes()


def decode(data: bytes | bytearray) -> NDArray[np.int32]:
    """The token ids of `encode`'s bytes, as a new array."""
    return np.frombuffer(data, dtype=np.int32).copy()


def common_tokens(a: bytes | bytearray, a_start: int, b: bytes | bytearray) -> int:
    """How many tokens the beginnings of ``b`` and of ``a`` from byte ``a_start`` on have in common."""
    size = min(len(a) - a_start, len(b))
    if size <= _FEW_BYTES:
        differing = int.from_bytes(a[a_start : a_start + size], "little") ^ int.from_bytes(b[:size], "little")
        lowest_bit = (differing & -differing).bit_length() - 1
        return lowest_bit // (8 * TOKEN_BYTES) if differing else size // TOKEN_BYTES
    left = np.frombuffer(a, dtype=np.int32, count=size // TOKEN_BYTES, offset=a_start)
    right = np.frombuffer(b, dtype=np.int32, count=size // TOKEN_BYTES)
    differs = left != right
    return int(differs.argmax()) if differs.any() else size // TOKEN_BYTES
