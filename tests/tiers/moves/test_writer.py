"""The queue of blocks that go down: how many wait in it."""

from __future__ import annotations

import threading

from support.dict_tier import DictTier
from support.time_limit import HANGING

from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.writer import BlockWriter
from radixkv.tiers.stack import TierStack


def writer_of(block_nbytes: int, max_queued_bytes: int) -> BlockWriter:
    return BlockWriter(TierStack([DictTier()]), PrefixKeys(b"model", b"", 16), block_nbytes, max_queued_bytes)


def test_no_more_blocks_wait_than_there_is_room_for_and_those_dropped_are_counted() -> None:
    writer = writer_of(10, 49)
    assert writer.reserve(3) == 3
    assert writer.reserve(3, share=0.5) == 0
    assert writer.reserve(3) == 1
    assert writer.reserve_or_drop(2) == 0
    writer.give_back(3)
    assert writer.reserve(3, share=0.5) == 1
    assert (writer.num_queued, writer.num_dropped) == (2, 2)
    assert not writer.flush(0.0)
    writer.drop(2)
    assert writer.flush(0.0)
    assert writer.reserve_or_drop(2) == 2
    assert (writer.num_queued, writer.num_dropped) == (2, 4)
    assert writer.stop(HANGING)


def test_one_block_may_wait_however_large_it_is() -> None:
    writer = writer_of(10, 1)
    assert [writer.reserve(2, share=0.5), writer.reserve(2)] == [1, 0]
    assert writer.stop(HANGING)


def test_room_that_is_given_back_goes_to_who_waits_for_it() -> None:
    writer, reserved = writer_of(10, 10), list[int]()
    assert writer.reserve(1) == 1
    waiting = threading.Thread(target=lambda: reserved.append(writer.reserve(1, HANGING)), daemon=True)
    waiting.start()
    writer.give_back(1)
    waiting.join(HANGING)
    assert reserved == [1]
    assert writer.stop(HANGING)
