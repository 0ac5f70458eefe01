"""Blocks that also hold a state: nobody goes on from one that other tokens have changed since."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.cache_driver import leave

from radixkv.cache import BlockTable, OutOfBlocks, PrefixCache, Reason

BLOCK_SIZE = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


class StatesInBlocks(RuleBasedStateMachine):
    """A shadow memory: the state in a block is all the tokens that led to it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(12, BLOCK_SIZE, splits_blocks=False)
        self.states: dict[int, tuple[int, ...]] = {}
        self.live: dict[BlockTable, list[int]] = {}

    def copy(self) -> None:
        for copy in self.cache.drain_copies():
            self.states[copy.target] = self.states[copy.source]

    def compute(self, table: BlockTable, tokens: list[int]) -> None:
        """Go on from the state in the last block, and leave one in each block that is written."""
        before = self.live[table]
        try:
            self.cache.reserve(table, len(before) + len(tokens))
        except OutOfBlocks:
            self.copy()
            return
        self.copy()
        ids = table.block_ids.tolist()
        if before:
            assert self.states[ids[(len(before) - 1) // BLOCK_SIZE]] == tuple(before)
        for token in tokens:
            self.states[ids[len(before) // BLOCK_SIZE]] = (*before, token)
            before.append(token)
        self.cache.append(table, tokens)

    @rule(prompt=TOKENS)
    def open(self, prompt: list[int]) -> None:
        try:
            table = self.cache.open(prompt)
        except OutOfBlocks:
            return
        self.copy()
        assert table.num_tokens < len(prompt)
        self.live[table] = prompt[: table.num_tokens]
        self.compute(table, prompt[table.num_tokens :])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=TOKENS)
    def go_on(self, data: st.DataObject, tokens: list[int]) -> None:
        self.compute(data.draw(st.sampled_from([*self.live])), tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([*self.live]))
        (fork,) = self.cache.fork(table)
        self.live[fork] = [*self.live[table]]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([*self.live]))
        prefix, last = self.live[table], table.own_block_ids[: len(self.live[table]) % BLOCK_SIZE > 0]
        is_shared = (self.cache.ref_counts()[last] > 1).any()
        try:
            self.cache.branch(table)
        except OutOfBlocks:
            assert not self.cache.num_available_blocks
            return
        self.copy()
        assert is_shared or self.cache.match([*prefix, 2]) == len(prefix)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), publish=st.booleans())
    def end(self, data: st.DataObject, publish: bool) -> None:
        table = data.draw(st.sampled_from([*self.live]))
        del self.live[table]
        (self.cache.close if publish else self.cache.abort)(table)

    @invariant()
    def is_consistent(self) -> None:
        self.cache.check()


TestStatesInBlocks = StatesInBlocks.TestCase
TestStatesInBlocks.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_prompts_that_part_inside_a_block_begin_with_what_was_kept_there() -> None:
    cache = PrefixCache(12, BLOCK_SIZE, splits_blocks=False)
    leave(cache, [1, 2, 3, 4, 5, 6, 7])
    table = cache.open([1, 2, 3, 4, 5, 8, 8])
    assert (table.num_cached_tokens, table.num_known_tokens) == (3, 5)
    cache.reserve(table, 7)
    cache.append(table, [4, 5])
    cache.branch(table)
    (copied,) = cache.drain_copies()
    assert copied.target == table.block_ids[1]
    cache.append(table, [8, 8])
    cache.close(table)
    assert [cache.match([1, 2, 3, 4, *rest]) for rest in ([5, 9], [5, 6, 7], [5, 8, 8], [9])] == [5, 7, 7, 3]
    again = cache.open([1, 2, 3, 4, 5, 9])
    assert (again.num_cached_tokens, again.num_known_tokens) == (5, 5)
    assert [(copy.source, copy.num_tokens) for copy in cache.drain_copies()] == [(copied.source, 2)]
    cache.close(again)
    cache.check()


def test_a_block_kept_where_prompts_part_is_evicted_once_it_is_used_least() -> None:
    cache = PrefixCache(4, BLOCK_SIZE, splits_blocks=False)
    table = cache.open([1, 2, 3, 4])
    cache.reserve(table, 4)
    cache.append(table, [1, 2])
    cache.branch(table)
    cache.append(table, [3, 4])
    cache.close(table)  # all blocks but one are cached
    leave(cache, [1, 2, 5])  # begins with what was kept
    leave(cache, [6, 7, 8])
    assert [cache.match(prefix) for prefix in ([1, 2, 9], [1, 2, 3, 4])] == [2, 3]
    leave(cache, [*range(10, 19)])
    assert cache.match([1, 2, 9]) == 0


def test_nothing_is_kept_where_blocks_can_be_split_or_are_whole_or_a_block_is_missing() -> None:
    split = PrefixCache(4, BLOCK_SIZE)
    leave(split, [1, 2])
    table = split.open([1, 2, 3])
    split.branch(table)
    assert table.num_known_tokens == 2
    assert split.num_held_blocks == 2
    full = PrefixCache(1, BLOCK_SIZE, splits_blocks=False)
    table = full.open([1, 2])
    full.reserve(table, 2)
    full.append(table, [1])
    with pytest.raises(OutOfBlocks):
        full.branch(table)
    assert (full.match([1]), full.drain_copies()) == (0, [])
    full.append(table, [2])


@pytest.mark.parametrize(
    ("cached", "prompt", "num_reused"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7], 6),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 3),  # all but the last token would end inside a block
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9], 3),
        ([1, 2, 3, 4, 5, 6], [1, 2, 9], 0),
        ([1, 2, 3, 4], [1, 2, 3, 4, 9], 4),  # behind all tokens of a partly filled block
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9], 3),
        ([1, 2], [1, 2, 9], 2),
        ([1, 2], [1, 9], 0),
    ],
)
def test_a_prefix_that_is_reused_ends_with_a_block(cached: list[int], prompt: list[int], num_reused: int) -> None:
    cache = PrefixCache(8, BLOCK_SIZE, splits_blocks=False)
    leave(cache, cached)
    assert cache.match(prompt[:-1]) == cache.explain(prompt).num_reused_tokens == num_reused
    assert cache.demand(prompt).num_cached_tokens == num_reused
    table = cache.open(prompt)
    assert table.num_tokens == num_reused
    assert [copy.num_tokens for copy in cache.drain_copies()] == [num_reused % BLOCK_SIZE] * (
        num_reused % BLOCK_SIZE > 0
    )


def test_explained_are_tokens_that_are_cached_inside_a_block_and_a_last_block_that_is_computed_again() -> None:
    cache = PrefixCache(8, BLOCK_SIZE, splits_blocks=False)
    leave(cache, [1, 2, 3, 4, 5, 6])

    def reasons(prompt: list[int]) -> list[tuple[Reason, int]]:
        return [(part.reason, part.num_tokens) for part in cache.explain(prompt).computed]

    assert reasons([1, 2, 3, 4, 5, 9, 9]) == [(Reason.INSIDE_BLOCK, 2), (Reason.NEW, 2)]
    assert reasons([1, 2, 3, 4, 5]) == [(Reason.INSIDE_BLOCK, 2)]
    assert reasons([1, 2, 3, 4, 5, 6]) == [(Reason.LAST_TOKEN, 3)]
    assert [part.reason for part in cache.explain([1, 2, 3, 4], read=False).computed] == [Reason.READ_OFF]
