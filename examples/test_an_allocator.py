"""Property tests for an allocator of your own, with `radixkv.testing`.

Here is a deliberately simple block cache, its adapter, and three bugs that such code tends to have. Run it, and the kit
finds each bug and prints the shortest run that shows it:

    python examples/test_an_allocator.py

In a test suite of your own the adapter and one line are enough:

    TestMyCache = cache_machine(SimpleAdapter).TestCase
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from radixkv.testing import BlockCopy, CacheAdapter, cache_machine, find_violation

Prefix = tuple[str, tuple[int, ...]]


@dataclass
class SimpleSequence:
    namespace: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


class SimpleCache:
    """Whole blocks in one dictionary, keyed by all tokens up to their end; the longest unused prefix is evicted first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.owners = [0] * num_blocks
        self.cached: dict[Prefix, int] = {}
        self.copies: list[BlockCopy] = []

    def key(self, prefix: Sequence[int], namespace: str) -> Prefix:
        return namespace, tuple(prefix)

    def lookup(self, prompt: Sequence[int], namespace: str) -> list[int]:
        blocks: list[int] = []
        for stop in range(self.block_size, len(prompt) + 1, self.block_size):
            block = self.cached.get(self.key(prompt[:stop], namespace))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def open(self, prompt: Sequence[int], namespace: str) -> SimpleSequence:
        blocks = self.lookup(prompt[:-1], namespace)
        for block in blocks:
            self.owners[block] += 1
        return SimpleSequence(namespace, list(prompt[: len(blocks) * self.block_size]), blocks)

    def reserve(self, sequence: SimpleSequence, num_tokens: int) -> bool:
        tail = len(sequence.tokens) // self.block_size
        copies_tail = tail < len(sequence.blocks) and self.is_shared(sequence.blocks[tail])
        num_new = max(0, -(-num_tokens // self.block_size) - len(sequence.blocks))
        if num_new + copies_tail > len(self.free) + sum(map(self.is_evictable, self.cached.values())):
            return False
        if copies_tail:
            own = self.allocate()
            self.copies.append(BlockCopy(sequence.blocks[tail], own, len(sequence.tokens) % self.block_size))
            self.release(sequence.blocks[tail])
            sequence.blocks[tail] = own
        sequence.blocks += [self.allocate() for _ in range(num_new)]
        return True

    def commit(self, sequence: SimpleSequence, tokens: Sequence[int]) -> None:
        sequence.tokens += tokens
        for index in range(len(sequence.tokens) // self.block_size):
            key = self.key(sequence.tokens[: (index + 1) * self.block_size], sequence.namespace)
            own, cached = sequence.blocks[index], self.cached.get(key)
            if cached is None:
                self.cached[key] = own
                self.owners[own] += 1
            elif cached != own:
                # Computed twice: all use the cached one, or the cache could lose a block and keep those that follow it.
                sequence.blocks[index] = cached
                self.owners[cached] += 1
                self.release(own)

    def fork(self, sequence: SimpleSequence) -> SimpleSequence:
        blocks = sequence.blocks[: -(-len(sequence.tokens) // self.block_size)]
        for block in blocks:
            self.owners[block] += 1
        return SimpleSequence(sequence.namespace, list(sequence.tokens), blocks)

    def close(self, sequence: SimpleSequence) -> None:
        for block in sequence.blocks:
            self.release(block)

    def abort(self, sequence: SimpleSequence) -> None:
        self.close(sequence)

    def clear(self, namespace: str) -> None:
        for key in [key for key in self.cached if key[0] == namespace]:
            self.release(self.cached.pop(key))

    def is_shared(self, block: int) -> bool:
        return self.owners[block] > 1

    def is_evictable(self, block: int) -> bool:
        return self.owners[block] == 1

    def allocate(self) -> int:
        if not self.free:
            # The longest prefix first, so that no cached prefix loses its beginning.
            victim = max(
                (key for key, block in self.cached.items() if self.is_evictable(block)), key=lambda k: len(k[1])
            )
            block = self.cached.pop(victim)
        else:
            block = self.free.pop()
        self.owners[block] = 1
        return block

    def release(self, block: int) -> None:
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.free.append(block)


class LeaksOnAbort(SimpleCache):
    """Does not release blocks that were reserved for tokens that were never computed."""

    def abort(self, sequence: SimpleSequence) -> None:
        for block in sequence.blocks[: -(-len(sequence.tokens) // self.block_size)]:
            self.release(block)


class WritesSharedBlock(SimpleCache):
    """Never copies a shared block before writing to it."""

    def is_shared(self, block: int) -> bool:
        return False


class EvictsBlockInUse(SimpleCache):
    """Evicts blocks that one sequence still uses."""

    def is_evictable(self, block: int) -> bool:
        return self.owners[block] <= 2


class SimpleAdapter(CacheAdapter):
    """The interface between the kit and `SimpleCache`: one line per method."""

    matches_tokens = False  # it finds whole blocks only

    def __init__(self, num_blocks: int, block_size: int, kind: type[SimpleCache] = SimpleCache) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache = kind(num_blocks, block_size)

    def match(self, prompt: Sequence[int], namespace: str) -> int:
        return len(self.cache.lookup(prompt, namespace)) * self.block_size

    def open(self, prompt: Sequence[int], namespace: str) -> SimpleSequence:
        return self.cache.open(prompt, namespace)

    def reserve(self, handle: SimpleSequence, num_tokens: int) -> bool:
        return self.cache.reserve(handle, num_tokens)

    def take_copies(self) -> list[BlockCopy]:
        copies, self.cache.copies = self.cache.copies, []
        return copies

    def commit(self, handle: SimpleSequence, tokens: Sequence[int]) -> None:
        self.cache.commit(handle, tokens)

    def fork(self, handle: SimpleSequence) -> SimpleSequence:
        return self.cache.fork(handle)

    def close(self, handle: SimpleSequence) -> None:
        self.cache.close(handle)

    def abort(self, handle: SimpleSequence) -> None:
        self.cache.abort(handle)

    def clear(self, namespace: str) -> None:
        self.cache.clear(namespace)

    def length(self, handle: SimpleSequence) -> int:
        return len(handle.tokens)

    def blocks(self, handle: SimpleSequence) -> list[int]:
        return handle.blocks

    def free_blocks(self) -> list[int]:
        return self.cache.free

    def cached_blocks(self) -> list[int]:
        return list(self.cache.cached.values())

    def ref_counts(self) -> list[int]:
        return self.cache.owners


TestSimpleCache = cache_machine(SimpleAdapter).TestCase


def main() -> None:
    for kind in (SimpleCache, LeaksOnAbort, WritesSharedBlock, EvictsBlockInUse):
        violation = find_violation(
            lambda num_blocks, block_size, kind=kind: SimpleAdapter(num_blocks, block_size, kind)
        )
        print(f"{kind.__name__}: {violation or 'no rule is broken'}\n")


if __name__ == "__main__":
    main()
