"""What an engine does when its tiers' queue of blocks to be written has no room for all of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.dict_tier import DictTier, SlowlyWritten
from support.tiered_llm import GREEDY, PROMPTS, STEM, answers, evict_all, make
from support.time_limit import HANGING

from radixkv import LLM
from radixkv.cache.tokens import encode
from radixkv.tiers.moves import block_moves, wanted_prefixes

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")


def test_more_than_the_queue_holds_goes_down_as_far_as_it_does() -> None:
    tier = DictTier()
    llm = make(tiers=[tier], cache_write_policy="write-back")
    answers(llm, PROMPTS[:1])
    writer = llm.engine.tiers._writer
    writer._max_blocks = 5
    evict_all(llm)
    assert len(tier.blocks) == 5
    assert writer.num_dropped == 7
    answers(llm, PROMPTS[:1])  # what was dropped is not taken for written
    evict_all(llm)
    assert len(tier.blocks) == 10


def make_with_short_queue(tier: SlowlyWritten, policy: str) -> LLM:
    """An engine that queues five blocks at most."""
    llm = make(tiers=[tier], cache_write_policy=policy)
    llm.engine.tiers._writer._max_blocks = 5
    return llm


def pin(llm: LLM, tokens: list[int]) -> None:
    """Pin a prompt as if a disk would remember it."""
    pinned = llm.pin({"prompt_token_ids": tokens})
    llm.engine.tiers.send_prefix(encode(tokens[: pinned.num_tokens]), "")


def test_what_is_written_at_the_end_waits_for_room_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes for which the queue had no room within a second were given up, although there was time."""
    monkeypatch.setattr(block_moves, "_MAX_WAIT_SECONDS", 0.0)
    tier = SlowlyWritten()
    llm = make_with_short_queue(tier, "write-back")
    answers(llm)
    num_calls = itertools.count()

    def seconds_left() -> float:
        if next(num_calls) == 50:
            tier.may_put.set()
        return 60.0

    tiers = llm.engine.tiers
    tiers.write_hot(seconds_left)
    assert tiers.flush(60.0)
    assert len(tier.blocks) == 16
    assert tiers.totals.dropped_blocks == 0


@pytest.mark.parametrize("in_idle_time", [True, False])
def test_what_is_pinned_waits_for_room_in_the_queue(in_idle_time: bool) -> None:
    """A prefix that was pinned while the queue was full did not go down until it was evicted, so a crash lost it."""
    tier = SlowlyWritten()
    llm = make_with_short_queue(tier, "write-back")
    for first in range(3, 6):
        pin(llm, [first, *STEM[:40]])
    assert not llm.engine.tiers.flush(0.0)
    tier.may_put.set()
    while in_idle_time and llm.engine.write_behind():
        pass
    assert llm.engine.tiers.flush(60.0)
    assert len(tier.blocks) == 30
    assert llm.engine.tiers.totals.dropped_blocks == 0


def test_a_prefix_waits_for_the_queue_once_however_often_it_is_used() -> None:
    """Each use used to make it wait once more, with all its tokens: a long system prompt took a gigabyte."""
    tier = SlowlyWritten()
    llm = make_with_short_queue(tier, "write-through")
    num_waiting = []
    for first in (3, 4, 4, 4, 4):
        answers(llm, [{"prompt_token_ids": [first, *STEM[:40]]}])
        num_waiting.append(len(llm.engine.tiers._moves._wanted))
    assert 0 < num_waiting[2] == num_waiting[4]
    tier.may_put.set()
    assert llm.engine.tiers.flush(60.0)


def test_blocks_that_can_wait_leave_room_for_evicted_ones() -> None:
    tier = SlowlyWritten()
    llm = make_with_short_queue(tier, "write-through")
    for first in range(3, 7):
        answers(llm, [{"prompt_token_ids": [first, *STEM[:40]]}])
    writer = llm.engine.tiers._writer
    assert writer.num_queued <= writer._max_blocks // 2
    tier.may_put.set()
    assert llm.engine.tiers.flush(60.0)


def test_few_prefixes_wait_for_the_queue_and_pinned_ones_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted_prefixes, "_MAX_BLOCKS", 20)  # two of these prefixes
    tier = SlowlyWritten()
    llm = make_with_short_queue(tier, "write-through")
    for first in range(3, 7):
        answers(llm, [{"prompt_token_ids": [first, *STEM[:40]]}])
    pin(llm, [9, *STEM[:40]])
    tier.may_put.set()
    assert llm.engine.tiers.flush(60.0)
    llm.engine.tiers.close(HANGING)
    prompts: list[Any] = [{"prompt_token_ids": [first, *STEM[:40]]} for first in (6, 9)]
    outputs = make(tiers=[tier]).generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 40]
