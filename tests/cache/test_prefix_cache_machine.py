"""Random interleavings of all operations of a cache, against a shadow memory and a brute-force tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from support.shadow_memory import ShadowMemory, longest_known

from radixkv.cache import (
    LRU,
    Adaptive,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    BlockTable,
    EventLog,
    EvictionPolicy,
    NodeSnapshot,
    OutOfBlocks,
    Pin,
    PinQuotaExceeded,
    PrefixCache,
)
from radixkv.cache.block_hash import namespace_hash

NAMESPACES = ("", "tenant")
OWNERS = ("a", "b", "c")
# A tiny alphabet, so that prompts share prefixes that end anywhere, inside blocks too.
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class CacheMachine(RuleBasedStateMachine):
    live = Bundle("live")
    pins = Bundle("pins")

    @initialize(
        block_size=st.sampled_from([1, 2, 2, 3, 4, 5, 16]),
        num_blocks=st.integers(1, 40),
        policy=st.sampled_from([LRU, LRU, Adaptive]),
        remembered=st.sampled_from([None, 50, 3]),
    )
    def start(
        self, block_size: int, num_blocks: int, policy: Callable[[], EvictionPolicy], remembered: int | None
    ) -> None:
        self.time = 0.0
        self.log = EventLog(medium="here")
        # By a block's name: the one before it, its tokens, and its namespace.
        self.stored: dict[int, tuple[int | None, tuple[int, ...], int]] = {}
        self.cache = PrefixCache(
            num_blocks,
            block_size,
            policy(),
            remembered_blocks=remembered,
            events=self.log,
            clock=lambda: self.time,
        )
        self.memory = ShadowMemory(num_blocks, block_size)
        self.tokens: dict[BlockTable, list[int]] = {}
        self.writes: dict[BlockTable, bool] = {}
        self.open_pins: dict[Pin, list[int]] = {}
        self.seen_prompts: list[list[int]] = [[0]]
        self.num_opened = 0  # since the cache was cleared
        self.limits: dict[str, int] = {}
        self.held_at: tuple[int, Any] = self.cache.version, []

    def state(self) -> Any:
        """Everything that a failed call must leave as it was."""
        self.cache.pins()  # releases what has expired by now
        trees = repr(self.cache.tree_snapshot())
        tables = [(t.block_ids.tolist(), t.num_tokens, t.version) for t in self.tokens]
        return trees, tables, self.cache.stats, self.cache.num_free_blocks, self.cache.num_evictable_blocks

    def assert_honest(self, error: OutOfBlocks, before: Any) -> None:
        assert error.needed > error.free + error.evictable
        assert error.free == self.cache.num_free_blocks
        assert self.state() == before

    def assert_over_quota(self, error: PinQuotaExceeded, before: Any) -> None:
        assert error.needed > error.quota == self.cache.max_pinned_blocks
        assert self.state() == before

    def carry_out_copies(self) -> None:
        for copy in self.cache.drain_copies():
            self.memory.copy(copy.source, copy.target, copy.num_tokens)

    @rule(
        target=live,
        data=st.data(),
        tail=TOKENS,
        namespace=st.sampled_from(NAMESPACES),
        read=st.sampled_from([True, True, True, False]),
        write=st.sampled_from([True, True, True, False]),
        priority=st.sampled_from([0, 0, 1]),
        owner=st.sampled_from(OWNERS),
    )
    def open(
        self,
        data: st.DataObject,
        tail: list[int],
        namespace: str,
        read: bool,
        write: bool,
        priority: int,
        owner: str,
    ) -> Any:
        stem = data.draw(st.sampled_from(self.seen_prompts))
        prompt = stem[: data.draw(st.integers(0, len(stem)))] + tail
        self.seen_prompts.append(prompt)
        self.num_opened += 1
        before = self.state()
        known = self.cache.match(prompt[:-1], namespace) if len(prompt) > 1 else 0
        demand, available = self.cache.demand(prompt, namespace, read), self.cache.num_available_blocks
        assert self.state() == before
        try:
            table = self.cache.open(np.array(prompt, dtype=np.int32), namespace, read, write, priority, owner)
        except OutOfBlocks as error:
            self.assert_honest(error, before)
            return multiple()
        assert table.num_tokens == table.num_cached_tokens == (known if read else 0)
        assert table.tokens.tolist() == prompt[: table.num_tokens]
        assert demand.num_cached_tokens == table.num_tokens
        num_missing = -(-len(prompt) // self.cache.block_size) - table.num_blocks
        assert demand.num_blocks == available - self.cache.num_available_blocks + num_missing
        self.tokens[table] = prompt
        self.writes[table] = write
        return table

    @rule(table=live, chunk=st.integers(1, 40), more=TOKENS, spare=st.integers(0, 9))
    def grow(self, table: BlockTable, chunk: int, more: list[int], spare: int) -> None:
        """Compute the next tokens of the prompt, or generate some when it is done."""
        known = self.tokens[table]
        if table.num_tokens == len(known):
            known = self.tokens[table] = known + more
        stop = min(table.num_tokens + chunk, len(known))
        before = self.state()
        try:
            self.cache.reserve(table, stop + spare)
        except OutOfBlocks as error:
            self.assert_honest(error, before)
            return
        self.carry_out_copies()
        start = table.num_tokens
        self.memory.write(table, known[:stop], start)
        self.cache.append(table, known[start:stop])

    @rule(
        data=st.data(),
        tail=TOKENS,
        namespace=st.sampled_from(NAMESPACES),
        priority=st.sampled_from([0, 0, 1]),
        owner=st.sampled_from(OWNERS),
    )
    def serve(self, data: st.DataObject, tail: list[int], namespace: str, priority: int, owner: str) -> None:
        """Serve a whole request in one step: this fills the cache until something must be evicted."""
        table = self.open(data, tail, namespace, True, True, priority, owner)
        if isinstance(table, BlockTable):
            self.grow(table, 100, [0], 0)
            self.close(table)

    @rule(data=st.data(), spare=st.integers(1, 9))
    def reserve_together(self, data: st.DataObject, spare: int) -> None:
        """Reserve room for several sequences, some of them forks of one another: for all or for none."""
        chosen = [table for table in self.tokens if data.draw(st.booleans())]
        before = self.state()
        try:
            self.cache.reserve_many(chosen, [table.num_tokens + spare for table in chosen])
        except OutOfBlocks as error:
            self.assert_honest(error, before)
            return
        self.carry_out_copies()
        owners = self.cache.ref_counts()
        for table in chosen:
            first, last = table.num_tokens, table.num_tokens + spare - 1
            writable = table.block_ids[first // self.cache.block_size : last // self.cache.block_size + 1]
            assert (owners[writable] == 1).all()

    @rule(target=live, table=live, count=st.integers(1, 3))
    def fork(self, table: BlockTable, count: int) -> Any:
        free = self.cache.num_free_blocks
        children = self.cache.fork(table, count)
        assert self.cache.num_free_blocks == free
        for child in children:
            self.tokens[child] = list(self.tokens[table][: table.num_tokens])
            self.writes[child] = self.writes[table]
        return multiple(*children)

    @rule(table=consumes(live))
    def close(self, table: BlockTable) -> None:
        size, known = self.cache.block_size, self.tokens.pop(table)[: table.num_tokens]
        tail_is_shared = any(
            len(known) % size
            and len(known) // size < other.num_blocks
            and other.block_ids[len(known) // size] == table.block_ids[len(known) // size]
            for other in self.tokens
        )
        self.cache.close(table)
        if self.writes[table] and known and not tail_is_shared:
            assert self.cache.match(known, table.namespace) == len(known)

    @rule(table=consumes(live))
    def abort(self, table: BlockTable) -> None:
        del self.tokens[table]
        self.cache.abort(table)

    @precondition(lambda self: self.cache.num_held_blocks)
    @rule(
        target=pins,
        data=st.data(),
        namespace=st.sampled_from(NAMESPACES),
        ttl=st.sampled_from([None, None, 1.0, 5.0]),
    )
    def pin(self, data: st.DataObject, namespace: str, ttl: float | None) -> Any:
        cached = [each for each in self.seen_prompts if self.cache.match(each, namespace) >= self.cache.block_size]
        prompt = data.draw(st.sampled_from(cached or self.seen_prompts))
        before = self.state()
        try:
            pin = self.cache.pin(prompt, namespace, ttl)
        except PinQuotaExceeded as error:
            self.assert_over_quota(error, before)
            return multiple()
        known = self.cache.match(prompt, namespace)
        assert pin.num_tokens == known // self.cache.block_size * self.cache.block_size
        self.open_pins[pin] = prompt[: pin.num_tokens]
        return pin

    @rule(pin=consumes(pins))
    def release(self, pin: Pin) -> None:
        self.cache.release(pin)
        del self.open_pins[pin]

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.time += seconds

    @precondition(lambda self: self.num_opened >= 8)  # or it would mostly be empty
    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def clear(self, namespace: str | None) -> None:
        self.num_opened = 0
        free = self.cache.num_free_blocks
        freed = self.cache.clear(namespace)
        assert self.cache.num_free_blocks == free + freed
        for name in NAMESPACES if namespace is None else [namespace]:
            assert all(self.cache.match(prompt, name) == 0 for prompt in self.seen_prompts)
        for table in self.tokens:
            if namespace in (None, table.namespace):
                self.writes[table] = False

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def match(self, data: st.DataObject, namespace: str) -> None:
        prompt = data.draw(st.sampled_from(self.seen_prompts))
        root = self.cache.tree_snapshot().get(namespace)
        assert self.cache.match(prompt, namespace) == longest_known(root, prompt)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), read=st.booleans())
    def explain(self, data: st.DataObject, namespace: str, read: bool) -> None:
        prompt = data.draw(st.sampled_from(self.seen_prompts))
        before = self.state()
        explanation = self.cache.explain(prompt, namespace, read)
        assert self.state() == before
        assert explanation.num_reused_tokens == (
            min(self.cache.match(prompt, namespace), len(prompt) - 1) if read else 0
        )
        position = explanation.num_reused_tokens
        for part in explanation.computed:
            assert part.start == position
            assert part.num_tokens > 0
            position += part.num_tokens
        assert position == explanation.num_prompt_tokens == len(prompt)
        if explanation.divergence is not None:
            leaves_at = explanation.divergence.position
            assert leaves_at == self.cache.match(prompt, namespace)
            shown = prompt[:leaves_at] + explanation.divergence.cached_tokens.tolist()
            # Only this namespace is shown.
            assert self.cache.match(shown, namespace) == len(shown)

    @rule(spare=st.integers(1, 24))
    def squeeze(self, spare: int) -> None:
        """Another sequence that needs many blocks comes and goes, and leaves nothing behind."""
        table = self.cache.open([9], "", read=False, write=False)
        self.tokens[table] = [9]
        before = self.state()
        had = self.blocks_by_owner()
        try:
            self.cache.reserve(table, spare * self.cache.block_size)
        except OutOfBlocks as error:
            self.assert_honest(error, before)
        self.assert_taken_from_who_is_beyond_its_limit(had)
        del self.tokens[table]
        self.cache.abort(table)

    @rule(limits=st.dictionaries(st.sampled_from(OWNERS), st.integers(0, 8)))
    def limit_owners(self, limits: dict[str, int]) -> None:
        before = self.state()
        self.cache.limit_owners(limits)
        assert self.state() == before
        self.limits = limits

    def blocks_by_owner(self) -> Counter[str]:
        """The tree's blocks."""
        return sum((Counter({node.owner: node.num_blocks}) for node in self.cache._tree.nodes()), Counter())

    def assert_taken_from_who_is_beyond_its_limit(self, had: Counter[str]) -> None:
        has = self.blocks_by_owner()
        idle = {node.owner for node in self.cache._tree.nodes() if node.num_blocks and not node.lock_count}
        leaves = {leaf.owner for leaf in self.cache._tree.policy.leaves()}
        assert idle >= leaves
        if any(has[owner] > self.limits.get(owner, has[owner]) for owner in leaves):
            for owner in had:
                assert has[owner] == had[owner] or has[owner] >= self.limits[owner]

    @invariant()
    def rules_hold(self) -> None:
        self.cache.check()
        assert self.cache.num_free_blocks + self.cache.num_held_blocks == self.cache.num_blocks
        self.carry_out_copies()
        for table, tokens in self.tokens.items():
            self.memory.assert_reads_its_own(table, tokens)
        in_force = self.cache.pins()
        for pin, tokens in self.open_pins.items():
            assert pin.released == (pin not in in_force)
            if not pin.released:
                assert pin.expires_at is None or pin.expires_at > self.time
                assert self.cache.match(tokens, pin.namespace) == len(tokens)

    @invariant()
    def the_events_add_up_to_what_the_tree_holds(self) -> None:
        for event in self.log:
            if isinstance(event, BlocksStored):
                before = event.parent_hash
                assert before is None or len(self.stored[before][1]) == event.block_size
                for index, name in enumerate(event.block_hashes):
                    assert name not in self.stored
                    size = event.block_size
                    tokens = event.token_ids[index * size : index * size + size]
                    self.stored[name] = before, tokens, event.namespace_hash
                    before = name
            elif isinstance(event, BlocksRemoved):
                for name in event.block_hashes:
                    assert self.stored.pop(name)[2] == event.namespace_hash
            else:
                self.stored.clear()
            assert isinstance(event, AllCleared) or event.medium == "here"
        stored = sorted((namespace, self.path_of(name)) for name, (_, _, namespace) in self.stored.items())
        held = sorted(
            (namespace_hash(namespace), path)
            for namespace, root in self.cache.tree_snapshot().items()
            for path in self.paths(root, [])
        )
        assert stored == held
        version = self.cache.version
        assert version != self.held_at[0] or held == self.held_at[1], "`match` may answer otherwise"
        self.held_at = version, held

    def path_of(self, name: int | None) -> list[int]:
        path: list[int] = []
        while name is not None:
            name, tokens, _ = self.stored[name]
            path = [*tokens, *path]
        return path

    def paths(self, node: NodeSnapshot, before: list[int]) -> list[list[int]]:
        """All tokens up to the end of every block."""
        path, size = before + node.tokens.tolist(), self.cache.block_size
        ends = range(len(before) + size, len(path) + size, size) if len(node.tokens) else ()
        below = [deeper for child in node.children for deeper in self.paths(child, path)]
        return [path[:end] for end in ends] + below

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for table in list(self.tokens):
            self.cache.close(table)
        for pin in self.open_pins:
            self.cache.release(pin)
        self.cache.check()
        self.cache.clear()
        self.cache.check()
        assert self.cache.num_free_blocks == self.cache.num_blocks


CacheMachine.TestCase.settings = settings(
    max_examples=2 * settings().max_examples,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_the_cache_keeps_its_rules = CacheMachine.TestCase
