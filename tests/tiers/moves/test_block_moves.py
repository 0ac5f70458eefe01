"""Which blocks go down from a cache, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cache_driver import press
from support.dict_tier import DictTier

from radixkv.cache import PrefixCache
from radixkv.cache.tokens import decode, encode
from radixkv.config import CacheWritePolicy
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.moves import block_moves
from radixkv.tiers.moves.block_moves import BlockMoves
from radixkv.tiers.moves.known_blocks import KnownBlocks
from radixkv.tiers.moves.pool_rows import PoolRows
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.writer import BlockWriter
from radixkv.tiers.stack import TierStack
from radixkv.tiers.tier import BlockBytes


class Rows:
    """Of a pool; each block holds its id."""

    nbytes = 4

    def read(self, block_ids: NDArray[np.int32]) -> BlockBytes:
        return block_ids.copy().view(np.uint8).reshape(-1, 4)

    def fence(self) -> None:
        return None

    def to_host(self, data: BlockBytes, fence: object) -> BlockBytes:
        return data

    def release(self, data: BlockBytes) -> None:
        pass


def moves_into(
    tier: DictTier,
    num_known: int,
    policy: CacheWritePolicy = "write-through",
    on_clear: Callable[[str | None], None] = lambda namespace: None,
) -> tuple[PrefixCache, BlockMoves, BlockWriter]:
    """A cache with blocks of four tokens that are written when they are computed, or as ``policy`` says."""
    writer = BlockWriter(TierStack([tier]), PrefixKeys(b"model", b"", 16), 4, 1 << 10)
    rows, known = cast(PoolRows, Rows()), KnownBlocks(num_known)
    moves = BlockMoves(rows, writer, known, policy, 16, False, on_clear)
    return PrefixCache(64, 4, observers=[moves]), moves, writer


def compute(cache: PrefixCache, tokens: list[int], namespace: str = "") -> None:
    table = cache.open(tokens, namespace)
    cache.reserve(table, len(tokens))
    cache.append(table, tokens[table.num_tokens :])
    cache.close(table)


def test_a_prefix_of_more_blocks_than_are_known_to_be_below_is_sent_once() -> None:
    """Its first blocks were forgotten over its last ones."""
    tier = DictTier()
    cache, moves, writer = moves_into(tier, 4)
    compute(cache, [*range(48)])
    left = iter([1.0] * 8)
    moves.write_wanted(cache, lambda: next(left, 0.0))
    assert not moves.has_wanted
    assert writer.flush(600)
    assert writer.stop(600)
    assert len(tier.blocks) == 12


@pytest.mark.parametrize("evicted", [True, False])
@pytest.mark.parametrize(("cleared", "num_left"), [("a", 1), (None, 0), ("c", 2)])
def test_what_is_cleared_does_not_go_down_although_it_was_to(cleared: str | None, num_left: int, evicted: bool) -> None:
    tier, told = DictTier(), list[str | None]()
    cache, moves, writer = moves_into(tier, 100, "write-back" if evicted else "write-through", on_clear=told.append)
    for namespace in "ab":
        compute(cache, [*range(8)], namespace)
    if evicted:
        press(cache, 64)
    cache.clear(cleared)
    assert told == [cleared]
    assert (len(moves._wanted), moves.has_unsent) == (0 if evicted else num_left, evicted and num_left > 0)
    moves.send_down(cache)
    assert writer.stop(600)
    assert len(tier.blocks) == 2 * num_left


@pytest.mark.parametrize(
    ("cleared", "left", "goes_down_again"), [("a", "a/salt", True), ("a/salt", "a", True), ("a", "b", False)]
)
def test_of_what_is_below_what_tiers_have_cleared_goes_down_again(
    cleared: str, left: str, goes_down_again: bool
) -> None:
    """After each clearing, all of every tenant was copied out of the pool once more."""
    tier = DictTier()
    cache, moves, writer = moves_into(tier, 100)
    for each in (cleared, left):
        compute(cache, [*range(8)], each)
    moves.send_down(cache)
    assert writer.stop(600)
    assert len(tier.blocks) == 4
    cache.clear(cleared)
    press(cache, 64)
    assert moves.has_unsent == goes_down_again


def test_what_is_computed_again_goes_down_again() -> None:
    """Tiers had it, and may have lost it since."""
    tier = DictTier()
    cache, moves, writer = moves_into(tier, 100, "write-back")
    for _ in range(2):
        tier.blocks.clear()
        compute(cache, [*range(8)])
        press(cache, 64)
        assert moves.has_unsent
        moves.send_down(cache)
        assert not moves.has_unsent  # later, other blocks are in their place
        assert writer.flush(600)
        assert len(tier.blocks) == 2
    assert writer.stop(600)


def test_where_a_block_that_was_evicted_is_gone_below_those_sent_before_it_are_sent_again() -> None:
    tier = DictTier()
    cache, moves, writer = moves_into(tier, 100, "write-back")
    compute(cache, [*range(8)])
    moves.want_prefix(encode([*range(8)]), "")
    moves.write_wanted(cache, lambda: 600.0)
    compute(cache, [*range(12)])
    press(cache, 62)
    moves.send_down(cache)
    assert writer.flush(600)
    assert len(tier.blocks) == 3
    tier.blocks.clear()
    table = cache.open([*range(12)])
    moves.note_missing(table, encode([*range(8, 12)]))
    cache.abort(table)
    press(cache, 64)
    moves.send_down(cache)
    assert writer.stop(600)
    assert [decode(key.tokens).tolist() for key, _ in tier.blocks.values()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_once_it_is_stopped_nothing_goes_down() -> None:
    tier = DictTier()
    cache, moves, writer = moves_into(tier, 100)
    compute(cache, [*range(8)])
    press(cache, 64)
    compute(cache, [*range(100, 108)])
    assert moves.has_unsent
    assert moves.has_wanted
    moves.stop()
    compute(cache, [*range(200, 208)])
    press(cache, 64)
    assert not moves.has_unsent
    assert not moves.has_wanted
    moves.send_down(cache)
    assert writer.stop(600)
    assert not tier.blocks


def test_in_the_end_what_a_tier_has_lost_goes_down_again_and_no_more_than_there_is_room_for() -> None:
    """Though it went down before, or more was to: what was used last goes first."""
    tier = DictTier()
    cache, moves, writer = moves_into(tier, 100)
    for start in (0, 100):
        compute(cache, [*range(start, start + 8)])
    moves.write_wanted(cache, lambda: 600.0)
    assert writer.flush(600)
    assert len(tier.blocks) == 4
    tier.blocks.clear()
    compute(cache, [*range(200, 208)])
    assert moves.has_wanted
    compute(cache, [*range(100, 112)])
    moves.write_hot(cache, 4, lambda: 600.0)
    assert writer.stop(600)
    kept = [decode(key.tokens).tolist() for key, _ in tier.blocks.values()]
    assert kept == [[start, start + 1, start + 2, start + 3] for start in (100, 104, 108, 200)]


def test_few_wanted_prefixes_are_looked_at_in_a_step() -> None:
    """However many wait of which nothing is to be sent."""
    cache, moves, writer = moves_into(DictTier(), 100)
    for first in range(20):
        moves.want_prefix(encode([first] * 4), "")
    moves.send_down(cache)
    assert len(moves._wanted) == 20 - block_moves._PREFIXES_PER_STEP
    assert writer.num_queued == 0
    assert writer.stop(600)


class MarkedTier(DictTier):
    """Notes how long what is marked as used is."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: list[int] = []

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        self.marked.append(len(prefix))


def test_a_prefix_that_grows_is_marked_as_a_whole_when_it_has_grown_by_a_part_of_itself() -> None:
    """Each block of an answer marked all before it, which took longer than to write the block."""
    tier = MarkedTier()
    cache, moves, writer = moves_into(tier, 100)
    table = cache.open([0] * 4)
    cache.reserve(table, 160)
    for block in range(40):
        cache.append(table, [block] * 4)
        moves.send_down(cache)
        assert writer.flush(600)
    assert writer.stop(600)
    of_one_block, wholes = [1] * 40, [*range(2, 8), *range(8, 16, 2), *range(16, 32, 4), *range(32, 41, 8)]
    assert sorted(tier.marked) == [1, *of_one_block, *wholes]


def test_what_prompts_have_in_common_is_marked_with_each_of_them() -> None:
    """A store that orders single blocks, such as Redis, evicted it: what each prompt added was too little to mark it."""
    tier = MarkedTier()
    cache, moves, writer = moves_into(tier, 100)
    for number in range(3):
        compute(cache, [*range(160), *[1000 + number] * 4])
        moves.write_wanted(cache, lambda: 600)
    moves.want_prefix(encode([*range(80)]), "")  # pinned
    moves.write_wanted(cache, lambda: 600)
    assert writer.stop(600)
    assert [length for length in tier.marked if length in (41, 20)] == [41, 41, 41, 20]


def test_in_the_end_what_was_used_last_is_marked_last_so_that_it_is_the_last_to_make_room() -> None:
    tier = MarkedTier()
    cache, moves, writer = moves_into(tier, 100, "write-back")
    for num_blocks in (1, 2, 3):
        compute(cache, [num_blocks] * 4 * num_blocks)
    moves.write_hot(cache, 100, lambda: 600.0)
    assert writer.stop(600)
    assert tier.marked[-3:] == [1, 2, 3]
