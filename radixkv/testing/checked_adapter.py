"""An adapter whose results are checked: an impossible one is a mistake of the adapter, an exception one of its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from radixkv.cache.arguments import check_count, is_whole
from radixkv.testing.adapter import BlockCopy, CacheAdapter

Result = TypeVar("Result")


class CheckedAdapter:
    """Calls one adapter, and checks what it returns; numpy's numbers are accepted too.

    Tokens are copied: an adapter that alters its arguments does not alter what it is checked against.

    Args:
        raised: what to do with an exception that a method of the adapter raises.

    Raises:
        TypeError: it is not a `CacheAdapter`, or a result has a wrong type; the message names the method and the right type.
        ValueError: likewise, where a result is out of range; or the adapter lacks its sizes.
    """

    def __init__(self, adapter: CacheAdapter, raised: Callable[[Exception], NoReturn]) -> None:
        if not isinstance(adapter, CacheAdapter):
            raise TypeError(f"adapter: expected a CacheAdapter, got {adapter!r:.80}")
        for name in ("num_blocks", "block_size"):
            given: Any = getattr(adapter, name, None)
            check_count(f"adapter.{name}", given, 1)
        self._adapter = adapter
        self._raised = raised

    def match(self, prompt: Sequence[int], namespace: str) -> int:
        return self._whole("match", self._call(self._adapter.match, list(prompt), namespace))

    def open(self, prompt: Sequence[int], namespace: str) -> Any | None:
        return self._call(self._adapter.open, list(prompt), namespace)

    def reserve(self, handle: Any, num_tokens: int) -> bool:
        answer = self._call(self._adapter.reserve, handle, num_tokens)
        if not isinstance(answer, bool | np.bool_):
            self._refuse("reserve", "True or False", answer)
        return bool(answer)

    def take_copies(self) -> list[BlockCopy]:
        method = "take_copies"
        copies = self._listed(method, self._call(self._adapter.take_copies), "BlockCopy objects")
        for copy in copies:
            if not isinstance(copy, BlockCopy):
                self._refuse(method, "BlockCopy objects", copy)
            self._block_ids(method, (copy.source, copy.target))
            if not 0 <= self._whole(method, copy.num_tokens) <= self._adapter.block_size:
                self._refuse(method, f"copies of at most {self._adapter.block_size} tokens", copy, ValueError)
        return copies

    def commit(self, handle: Any, tokens: Sequence[int]) -> None:
        self._call(self._adapter.commit, handle, list(tokens))

    def fork(self, handle: Any) -> Any | None:
        return self._call(self._adapter.fork, handle)

    def close(self, handle: Any) -> None:
        self._call(self._adapter.close, handle)

    def abort(self, handle: Any) -> None:
        self._call(self._adapter.abort, handle)

    def clear(self, namespace: str) -> None:
        self._call(self._adapter.clear, namespace)

    def length(self, handle: Any) -> int:
        return self._whole("length", self._call(self._adapter.length, handle))

    def blocks(self, handle: Any) -> list[int]:
        return self._block_ids("blocks", self._call(self._adapter.blocks, handle))

    def free_blocks(self) -> list[int]:
        return self._block_ids("free_blocks", self._call(self._adapter.free_blocks))

    def cached_blocks(self) -> list[int]:
        return self._block_ids("cached_blocks", self._call(self._adapter.cached_blocks))

    def ref_counts(self) -> list[int] | None:
        answer = self._call(self._adapter.ref_counts)
        if answer is None:
            return None
        counts = [self._whole("ref_counts", count) for count in self._listed("ref_counts", answer, "numbers or None")]
        if len(counts) != self._adapter.num_blocks:
            self._refuse("ref_counts", f"{self._adapter.num_blocks} numbers, one per block", counts, ValueError)
        return counts

    def known_sequences(self, namespace: str) -> list[Sequence[int]] | None:
        answer, of = self._call(self._adapter.known_sequences, namespace), "sequences of tokens or None"
        if answer is None:
            return None
        sequences = self._listed("known_sequences", answer, of)
        for sequence in sequences:
            if not isinstance(sequence, Sequence | np.ndarray):
                self._refuse("known_sequences", of, sequence)
        return sequences

    def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return function(*arguments)
        except Exception as error:
            self._raised(error)

    def _whole(self, method: str, answer: Any) -> int:
        if not is_whole(answer):
            self._refuse(method, "a whole number", answer)
        return int(answer)

    def _block_ids(self, method: str, answer: Any) -> list[int]:
        blocks = self._listed(method, answer, "block ids")
        for block in blocks:
            if not is_whole(block):
                self._refuse(method, "block ids", block)
            if not 0 <= block < self._adapter.num_blocks:
                self._refuse(method, f"block ids from 0 to {self._adapter.num_blocks - 1}", block, ValueError)
        return blocks

    def _listed(self, method: str, answer: Any, of: str) -> list[Any]:
        if not isinstance(answer, Iterable):
            self._refuse(method, of, answer)
        return self._call(list, answer)  # a method may be a generator, which only runs now

    def _refuse(self, method: str, expected: str, answer: Any, error: type[Exception] = TypeError) -> NoReturn:
        raise error(f"{type(self._adapter).__name__}.{method}: expected {expected}, got {answer!r:.80}")
