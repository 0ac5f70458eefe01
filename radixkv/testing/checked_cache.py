"""A cache whose every step is checked against the eleven rules.

It plays the engine for a `CacheAdapter`: it keeps every sequence's tokens, writes tags into a shadow memory where the cache
places keys and values, and checks that every sequence still reads its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from radixkv.cache.counted import counted
from radixkv.testing.adapter import CacheAdapter
from radixkv.testing.checked_adapter import CheckedAdapter
from radixkv.testing.live_sequence import LiveSequence, growth_in_words, names_of
from radixkv.testing.rules import RuleViolation
from radixkv.testing.shadow_memory import ShadowMemory, namespace_tag, next_tags
from radixkv.testing.story import (
    Story,
    changes_in_words,
    error_in_words,
    ids_in_words,
    sequence_names,
    tokens_in_words,
    under,
)


class CheckedCache:
    """Carries out steps on a cache and raises `RuleViolation` at the first rule that one of them breaks.

    An adapter's method that returns a wrong type raises a TypeError that names it; a value out of range, such as the id of a
    block that does not exist, a ValueError.

    Args:
        adapter: the cache, empty.
        always: verify all rules after every step. False: only what a step itself can break; call `verify` for the rest.
        keep_story: keep a description of every step; False for runs of millions.
    """

    def __init__(self, adapter: CacheAdapter, *, always: bool = True, keep_story: bool = True) -> None:
        self.adapter = adapter
        self._cache = CheckedAdapter(adapter, self._raised)
        self.live: dict[str, LiveSequence] = {}
        self._memory = ShadowMemory(adapter.num_blocks, adapter.block_size)
        self._root_tags: dict[str, int] = {}
        self._broken = False
        self._names = sequence_names()
        self._always = always
        self._story = Story(keep_story)

    # -- steps ---------------------------------------------------------------------------------------------------

    def open(self, prompt: Sequence[int], namespace: str = "") -> LiveSequence | None:
        """Begin a sequence; None where the cache has not enough blocks."""
        name = next(self._names)
        self._story.begin(f"{name} opens with {tokens_in_words(prompt)}{under(namespace)}")
        prompt = list(prompt)
        expected = self._look_up(prompt[:-1], namespace)
        before = self._state()
        handle = self._cache.open(prompt, namespace)
        if handle is None:
            self._refused(before, len(prompt), others=list(self.live.values()))
            return None
        sequence = LiveSequence(name, namespace, prompt, handle)
        self.live[name] = sequence
        sequence.length = self._cache.length(handle)
        self._story.go_on(f"finds {sequence.length} cached, in blocks {self._blocks(sequence)}")
        if sequence.length >= len(prompt):
            self._fail(5, f"all {len(prompt)} tokens of {name}'s prompt are reused")
        if sequence.length != expected:
            self._fail(4, f"{expected} tokens of {name}'s prompt are cached, and it was given {sequence.length}")
        self._check_evicted(before)
        sequence.tags = next_tags(self._root_tag(namespace), prompt[: sequence.length])
        self._carry_out_copies()
        self._check_reads(sequence)
        self._done()
        return sequence

    def compute(self, sequence: LiveSequence, count: int, spare: int = 0) -> bool:
        """Compute up to ``count`` pending tokens, with room for ``spare`` more; False where the cache refuses."""
        tokens = sequence.tokens[sequence.length : sequence.length + count]
        total = sequence.length + len(tokens) + spare
        self._story.begin(growth_in_words(sequence, tokens, spare))
        before = self._state()
        if not self._cache.reserve(sequence.handle, total):
            self._refused(before, total, others=[other for other in self.live.values() if other is not sequence])
            return False
        self._carry_out_copies()
        blocks = self._cache.blocks(sequence.handle)
        self._story.go_on(f"in blocks {self._blocks(sequence)}")
        if len(blocks) * self.adapter.block_size < total:
            self._fail(7, f"{sequence.name} has {len(blocks)} blocks and was promised room for {total} tokens")
        self._check_evicted(before)
        if tokens:
            self._check_sole_owner(sequence, blocks, sequence.length, len(tokens))
            last_tag = sequence.tags[-1] if sequence.tags else self._root_tag(sequence.namespace)
            tags = next_tags(last_tag, tokens)
            self._memory.write(blocks, sequence.length, last_tag, tags)
            sequence.tags += tags
            sequence.length += len(tokens)
            self._cache.commit(sequence.handle, tokens)
        self._check_reads(sequence)
        self._done()
        return True

    def generate(self, sequence: LiveSequence, tokens: Sequence[int]) -> bool:
        """Let a sequence whose tokens are all computed go on with ``tokens``, and compute them."""
        sequence.tokens = sequence.tokens[: sequence.length] + list(tokens)
        return self.compute(sequence, len(tokens))

    def fork(self, sequence: LiveSequence) -> LiveSequence | None:
        """A second sequence that goes on from where this one is; None where the cache has not enough blocks."""
        name = next(self._names)
        self._story.begin(f"{name} forks from {sequence.name} at {counted(sequence.length, 'token')}")
        before = self._state()
        handle = self._cache.fork(sequence.handle)
        if handle is None:
            self._refused(before, sequence.length, others=list(self.live.values()))
            return None
        child = LiveSequence(name, sequence.namespace, sequence.tokens[: sequence.length], handle)
        child.length, child.tags = sequence.length, list(sequence.tags)
        child.outlived_clear = sequence.outlived_clear
        self.live[name] = child
        if self._cache.length(handle) != sequence.length:
            self._fail(3, f"{name} has {self._cache.length(handle)} tokens of {sequence.length}")
        self._check_evicted(before)
        self._carry_out_copies()
        self._check_reads(child)
        self._done()
        return child

    def close(self, sequence: LiveSequence) -> None:
        """End a sequence; its whole blocks must be cached then, unless the cache promises less."""
        self._story.begin(f"{sequence.name} closes")
        del self.live[sequence.name]
        self._cache.close(sequence.handle)
        whole = sequence.length // self.adapter.block_size * self.adapter.block_size
        if self.adapter.keeps_closed and not sequence.outlived_clear and whole:
            known = self._cache.match(sequence.tokens[:whole], sequence.namespace)
            if known < whole:
                self._fail(
                    4, f"{sequence.name} has just closed with {whole} tokens in whole blocks, and {known} are cached"
                )
        self._done()

    def abort(self, sequence: LiveSequence) -> None:
        """End a sequence; no more of it may be cached then than before."""
        self._story.begin(f"{sequence.name} is aborted")
        tokens, namespace = sequence.tokens[: sequence.length], sequence.namespace
        before = self._cache.match(tokens, namespace) if tokens else 0
        del self.live[sequence.name]
        self._cache.abort(sequence.handle)
        after = self._cache.match(tokens, namespace) if tokens else 0
        if after > before:
            self._fail(
                4, f"{sequence.name} was aborted, and {after} of its tokens are cached, where {before} were before"
            )
        self._done()

    def clear(self, namespace: str = "") -> None:
        """Drop what is cached under a namespace; nothing of it may be cached then."""
        self._story.begin(f"what is cached{under(namespace)} is cleared")
        self._cache.clear(namespace)
        befores, root = self._memory.tags_before(self._cache.cached_blocks()), self._root_tag(namespace)
        left = [block for block, before in befores.items() if before == root]
        if left:
            self._fail(4, f"blocks {ids_in_words(left)} are still cached{under(namespace)}")
        for sequence in self.live.values():
            sequence.outlived_clear |= sequence.namespace == namespace
        self._done()

    def match(self, prompt: Sequence[int], namespace: str = "") -> int:
        """Look a prompt up; every prefix of what is cached must be cached too."""
        self._story.begin(f"{tokens_in_words(prompt)} are looked up{under(namespace)}")
        known = self._look_up(list(prompt), namespace)
        for length in {known // 2, max(0, known - 1)} - {0}:
            part = self._cache.match(prompt[:length], namespace)
            if part != self._whole(length):
                self._fail(4, f"{known} tokens are cached, but of the first {length} only {part}")
        self._done()
        return known

    def finish(self) -> None:
        """Close and clear everything; all blocks must be free then. Does nothing once a rule is broken."""
        if self._broken:
            return
        for sequence in list(self.live.values()):
            self.close(sequence)
        for namespace in list(self._root_tags):
            self.clear(namespace)
        self.verify()
        free = set(self._cache.free_blocks())
        if len(free) != self.adapter.num_blocks:
            lost = sorted(set(range(self.adapter.num_blocks)) - free)
            self._fail(10, f"everything is closed and cleared, and blocks {ids_in_words(lost)} are not free")

    # -- rules ---------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Check every rule that the present state can break."""
        free, cached = self._cache.free_blocks(), self._cache.cached_blocks()
        holders = self._check_owners(free, cached)
        for sequence in self.live.values():
            self._check_reads(sequence)
        self._check_namespaces(holders)
        full = self._memory.full_block_tags(cached)
        self._check_prefixes_cached(cached, ends={*self._root_tags.values(), *full.values()})
        self._check_kept_once(full)
        try:
            self.adapter.check()
        except Exception as error:
            self._fail(1, f"the cache's own check raised {error_in_words(error)}")

    def _check_owners(self, free: list[int], cached: list[int]) -> dict[int, list[LiveSequence]]:
        holders: dict[int, list[LiveSequence]] = {}
        for sequence in self.live.values():
            for block in self._cache.blocks(sequence.handle):
                holders.setdefault(block, []).append(sequence)
        for block in sorted(set(free) & holders.keys()):
            self._fail(6, f"block {block} is free although {names_of(holders[block])} uses it")
        for block in sorted(set(free) & set(cached)):
            self._fail(1, f"block {block} is free although the cache holds it")
        if len(set(free)) < len(free):
            twice = sorted(block for block, count in Counter(free).items() if count > 1)
            self._fail(10, f"blocks {ids_in_words(twice)} are free more than once")
        everything = set(free) | set(cached) | holders.keys()
        if len(everything) != self.adapter.num_blocks:
            lost = sorted(set(range(self.adapter.num_blocks)) - everything)
            self._fail(10, f"blocks {ids_in_words(lost)} are neither free nor held")
        counts = self._cache.ref_counts()
        if counts is not None:
            in_cache = Counter(cached)
            for block, count in enumerate(counts):
                owners = len(holders.get(block, ())) + in_cache[block]
                if count != owners:
                    self._fail(1, f"block {block} counts {count} owners and has {owners}")
        return holders

    def _check_evicted(self, before: Any) -> None:
        """A call that evicts takes every free block, too; ``before`` is the `_state` before the call."""
        if before is None or not self.adapter.evicts_exactly:
            return
        evicted = sorted(set(before[1]) - set(self._cache.cached_blocks()))
        free = sorted(self._cache.free_blocks())
        if evicted and free:
            self._fail(6, f"blocks {ids_in_words(evicted)} were evicted, and blocks {ids_in_words(free)} are left free")

    def _check_reads(self, sequence: LiveSequence) -> None:
        if self._cache.length(sequence.handle) != sequence.length:
            claimed = self._cache.length(sequence.handle)
            self._fail(3, f"{sequence.name} has computed {sequence.length} tokens, and the cache says {claimed}")
        blocks, size = self._cache.blocks(sequence.handle), self.adapter.block_size
        if len(blocks) * size < sequence.length:
            self._fail(3, f"{sequence.name} has {len(blocks)} blocks for {sequence.length} tokens")
        wrong = self._memory.first_difference(blocks, np.array(sequence.tags, dtype=np.uint64))
        if wrong is not None:
            self._fail_read(sequence, wrong, blocks[wrong // size])

    def _fail_read(self, sequence: LiveSequence, position: int, block: int) -> NoReturn:
        place = f"{sequence.name} reads at position {position}, in block {block},"
        tag = self._memory.tag(block, position % self.adapter.block_size)
        if tag is None:
            self._fail(3, f"{place} a slot that was not written")
        for namespace, root_tag in self._root_tags.items():
            if tag == next_tags(root_tag, sequence.tokens[: position + 1])[-1]:
                self._fail(8, f"{place} what was written under {namespace!r}, not {sequence.namespace!r}")
        self._fail(3, f"{place} what was written for another prefix")

    def _check_sole_owner(self, sequence: LiveSequence, blocks: Sequence[int], start: int, count: int) -> None:
        size = self.adapter.block_size
        for block, times in Counter(blocks).items():
            if times > 1:
                self._fail(2, f"{sequence.name} has block {block} in {times} places: {ids_in_words(blocks)}")
        written = set(blocks[start // size : -(-(start + count) // size)])
        for other in self.live.values():
            if other is not sequence:
                for block in sorted(written & set(self._cache.blocks(other.handle))):
                    self._fail(2, f"{sequence.name} writes block {block}, which {other.name} uses too")
        for block in sorted(written & set(self._cache.cached_blocks())):
            self._fail(2, f"{sequence.name} writes block {block}, which the cache has published")

    def _check_namespaces(self, holders: dict[int, list[LiveSequence]]) -> None:
        for block, sequences in holders.items():
            if len({sequence.namespace for sequence in sequences}) > 1:
                self._fail(8, f"block {block} is used by {names_of(sequences)}, which have different namespaces")

    def _check_prefixes_cached(self, cached: list[int], ends: set[int]) -> None:
        for block, before in self._memory.tags_before(cached).items():
            if before not in ends:
                self._fail(4, f"block {block} is cached, and the block before it is not")

    def _check_kept_once(self, full: dict[int, int]) -> None:
        if not self.adapter.deduplicates:
            return
        block_of: dict[int, int] = {}
        for block, tag in full.items():
            if tag in block_of:
                self._fail(11, f"blocks {block_of[tag]} and {block} are both cached and hold the same tokens")
            block_of[tag] = block
        size = self.adapter.block_size
        holder_of: dict[int, tuple[int, str]] = {}
        for sequence in self.live.values():
            if sequence.outlived_clear:
                continue
            for index, block in enumerate(self._cache.blocks(sequence.handle)[: sequence.length // size]):
                tag = sequence.tags[(index + 1) * size - 1]
                known, holder = holder_of.setdefault(tag, (block, sequence.name))
                if known != block:
                    self._fail(11, f"{holder} and {sequence.name} use blocks {known} and {block} for the same tokens")

    def _refused(self, before: Any, num_tokens: int, others: Sequence[LiveSequence]) -> None:
        self._story.go_on("refused")
        self._check_unchanged(before, "the call was refused, and still changed something")
        if not others and -(-num_tokens // self.adapter.block_size) <= self.adapter.num_blocks:
            self._fail(
                7,
                f"{num_tokens} tokens fit into {self.adapter.num_blocks} blocks that no other uses, and were refused",
            )
        if self._always:
            self.verify()

    def _look_up(self, prompt: list[int], namespace: str) -> int:
        """How much of a prompt is cached; compared with all cached sequences, if the cache reports them."""
        if not prompt:
            return 0
        before = self._state()
        matched = self._cache.match(prompt, namespace)
        self._check_unchanged(before, "looking a prompt up changed the cache")
        sequences = self._cache.known_sequences(namespace)
        if sequences is not None:
            known = self._whole(max((_common(sequence, prompt) for sequence in sequences), default=0))
            if matched != known:
                self._fail(4, f"of {tokens_in_words(prompt)} {known} are cached, and match says {matched}")
        return matched

    def _whole(self, length: int) -> int:
        return length if self.adapter.matches_tokens else length - length % self.adapter.block_size

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _carry_out_copies(self) -> None:
        for copy in self._cache.take_copies():
            copied = counted(copy.num_tokens, "token")
            self._story.go_on(f"block {copy.source} is copied to {copy.target} ({copied})")
            self._memory.copy(copy.source, copy.target, copy.num_tokens)

    def _raised(self, error: Exception) -> NoReturn:
        self._fail(7, f"the cache raised {error_in_words(error)}", error)

    def _done(self) -> None:
        if self._always:
            self.verify()

    def _state(self) -> Any:
        """Everything that a refused call must leave as it was; None where not every step is verified."""
        if not self._always:
            return None
        cache = self._cache
        tables = [(s.name, cache.blocks(s.handle), cache.length(s.handle)) for s in self.live.values()]
        return sorted(cache.free_blocks()), sorted(cache.cached_blocks()), tables

    def _root_tag(self, namespace: str) -> int:
        return self._root_tags.setdefault(namespace, namespace_tag(namespace))

    def _check_unchanged(self, before: Any, problem: str) -> None:
        after = self._state()
        if after != before:
            self._fail(7, f"{problem}: {changes_in_words(before, after)}")

    def _blocks(self, sequence: LiveSequence) -> str:
        return ids_in_words(self._cache.blocks(sequence.handle)) if self._story.keep else ""

    def _fail(self, rule: int, problem: str, cause: Exception | None = None) -> NoReturn:
        self._broken = True
        num_blocks, block_size = self.adapter.num_blocks, self.adapter.block_size
        pool = f"{counted(num_blocks, 'block')} of {counted(block_size, 'token')}"
        raise RuleViolation(rule, problem, self._story.steps, pool) from cause


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
