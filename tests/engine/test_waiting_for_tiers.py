"""Requests that wait for tiers: all that tiers have is reused, in a pool too small for all, and while it is written."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from support.dict_tier import DictTier, SlowlyRead, SlowlyWritten
from support.tiered_llm import GREEDY, answers, evict_all, free_blocks, make
from support.time_limit import HANGING
from support.tiny_engine import add

from radixkv import SamplingParams
from radixkv.engine import engine as engine_module
from radixkv.engine.compute_timer import ComputeTimer
from radixkv.engine.engine import Engine
from radixkv.errors import NoBlocksLeftError
from radixkv.serving.engine_thread import EngineThread
from radixkv.threads import Worker
from radixkv.tiers.moves.load import Load, LookUp
from radixkv.tiers.moves.loader import BlockLoader
from radixkv.tiers.moves.pool_rows import PoolRows
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.writer import BlockWriter, PrefixBlocks
from radixkv.tiers.stack import Span, TierStack
from radixkv.tiers.tier import BlockBytes

# Eight prompts of 41 tokens that have nothing in common: with their answers, they need 96 blocks.
UNLIKE: list[Any] = [{"prompt_token_ids": [(i * i + 13 * n) % 190 + 3 for i in range(41)]} for n in range(8)]


@pytest.mark.usefixtures("loads_are_worth_it")
@pytest.mark.parametrize("num_blocks", [13, 25, 31])
def test_what_is_loaded_for_a_waiting_request_is_not_evicted_for_another(num_blocks: int) -> None:
    """Loads used to take blocks that other loads had just filled, so half of what the tier had was computed again."""
    tier = DictTier()
    llm = make(tiers=[tier], num_blocks=num_blocks)
    expected = answers(llm, UNLIKE)
    evict_all(llm)
    outputs = llm.generate(UNLIKE, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [40] * 8


class Borrowing(DictTier):
    """Writes from memory that belongs to others, and may never be done with it."""

    def __init__(self, gives_back: bool) -> None:
        super().__init__()
        self.borrowed: list[BlockBytes] = []
        self.timeouts: list[float | None] = []
        self.gives_back = gives_back

    def borrow_many(self, keys: Any, blocks: BlockBytes) -> None:
        self.borrowed.append(blocks)

    def flush(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        return self.gives_back


class _Rows:
    nbytes = 8
    num_blocks = 0


def around(tier: DictTier, clock: Callable[[], float] = time.monotonic) -> tuple[BlockWriter, BlockLoader]:
    """A writer into a tier and a loader from it, without a pool."""
    stack, keys, rows = TierStack([tier]), PrefixKeys(b"model", b"", 16), cast(PoolRows, _Rows())
    writer = BlockWriter(stack, keys, 8, 1 << 10)
    return writer, BlockLoader(stack, writer, keys, rows, lambda n, size: np.empty((n, size), np.uint8), 0, clock)


def test_a_block_that_is_wanted_again_while_it_is_written_is_found() -> None:
    """Looked for just after its eviction, it used to be neither in the pool nor in the tier yet, and was computed again."""
    tier = SlowlyWritten()
    writer, loader = around(tier)
    tokens = bytes(range(64))
    assert writer.reserve(3)
    writer.put([PrefixBlocks("", tokens, 0, 3)], lambda: np.ones((3, 8), np.uint8))
    assert tier.puts.wait(600)
    wanted = [LookUp("", tokens, 0), LookUp("", tokens[:32] + bytes(32), 1)]
    others = [LookUp("tenant", tokens, 0), LookUp("", tokens[:28] + bytes(36), 1)]
    others += [LookUp("", tokens[:24], 1), LookUp("", tokens, 3)]
    for each in (*wanted, *others):
        loader.look_up(each)
    for each in others:
        assert each.done.wait(600)
        assert each.spans == []
    for each in wanted:
        assert each.spans is None
        assert each.waits_for_writer
    tier.may_put.set()
    for each, spans in zip(wanted, ([Span(0, 0, 3)], [Span(0, 1, 2)]), strict=True):
        assert each.done.wait(600)
        assert not each.waits_for_writer
        assert each.spans == spans
    assert writer.stop(60)
    assert loader.stop(60)


@pytest.mark.parametrize("gives_back", [True, False])
def test_memory_that_a_tier_still_writes_from_is_not_used_again(gives_back: bool) -> None:
    tier, blocks, released = Borrowing(gives_back), np.ones((3, 8), np.uint8), list[bool]()
    writer, loader = around(tier)
    assert writer.reserve(3)
    writer.put([PrefixBlocks("", bytes(range(48)), 0, 3)], lambda: blocks, lambda: released.append(True))
    assert writer.stop(60)
    assert np.shares_memory(tier.borrowed[0], blocks)  # no copy was made of it
    assert released == [True] * gives_back
    assert loader.stop(60)


def test_a_tier_that_hangs_is_waited_for_once_and_again_when_it_is_back() -> None:
    """A shared store that hung used to make host memory and the disk wait for it after each batch."""
    tier, blocks = Borrowing(False), np.ones((3, 8), np.uint8)
    writer, loader = around(tier)

    def put() -> list[float | None]:
        tier.timeouts.clear()
        assert writer.reserve(3)
        writer.put([PrefixBlocks("", bytes(range(48)), 0, 3)], lambda: blocks)
        assert writer.flush(60)
        return list(tier.timeouts)

    (patience,) = put()
    assert patience
    assert put() == put() == [0.0, 0.0]
    tier.gives_back = True
    assert put() == [0.0, patience]
    assert put() == [patience]
    assert writer.stop(60)
    assert loader.stop(60)


def test_what_was_read_is_lent_to_no_nearer_tier() -> None:
    """The memory belongs to the loader, which reads the next blocks into it."""
    near, far, keys = Borrowing(True), DictTier(), PrefixKeys(b"model", b"", 16)
    prefix = keys.of("", bytes(range(32)))
    far.put_many(prefix, np.ones((2, 8), np.uint8))
    out = np.zeros((2, 8), np.uint8)
    assert TierStack([near, far]).read(Span(1, 0, 2), prefix, out) == 2
    assert not near.borrowed
    assert len(near.blocks) == 2


def test_a_prefix_that_was_evicted_in_two_steps_is_found_while_it_is_written() -> None:
    """Once its first part was written, it used to be looked up a last time, and the rest was computed again."""
    tier = SlowlyWritten()
    writer, loader = around(tier)
    tokens = bytes(range(64))
    assert writer.reserve(4)
    writer.put([PrefixBlocks("", tokens[:32], 0, 2)], lambda: np.ones((2, 8), np.uint8))
    fetches, may_fetch = threading.Event(), threading.Event()

    def fetch() -> BlockBytes:
        fetches.set()
        assert may_fetch.wait(600)
        return np.ones((2, 8), np.uint8)

    writer.put([PrefixBlocks("", tokens, 2, 4)], fetch)
    assert tier.puts.wait(600)
    wanted, others = LookUp("", tokens, 0), [LookUp("tenant", tokens, 0) for _ in range(2)]
    loader.look_up(wanted)
    loader.look_up(others[0])
    assert others[0].done.wait(600)
    tier.may_put.set()
    assert fetches.wait(600)  # the first two blocks are written, and what waited for them is looked for
    loader.look_up(others[1])
    assert others[1].done.wait(600)
    assert wanted.spans is None
    may_fetch.set()
    assert wanted.done.wait(600)
    assert wanted.spans == [Span(0, 0, 4)]
    assert writer.stop(60)
    assert loader.stop(60)


class Hanging(SlowlyWritten):
    """A medium that answers nothing, not even when it is closed."""

    def close(self) -> None:
        assert self.may_put.wait(600)
        super().close()


def test_a_medium_that_hangs_does_not_keep_an_engine_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "_QUEUE_SECONDS", 0.01)
    tier = Hanging()
    llm = make(tiers=[tier], cache_write_policy="write-through")
    answers(llm, UNLIKE[:1])
    assert tier.puts.wait(600)
    with caplog.at_level(logging.WARNING):
        llm.shutdown(0.0)
    assert not tier.closed
    assert re.search("[1-9][0-9]* blocks were not written", caplog.text)
    tier.may_put.set()


def test_an_engine_that_is_dropped_leaves_a_medium_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `shutdown`, the end of the process used to wait for the medium for ever."""
    monkeypatch.setattr(engine_module, "_QUEUE_SECONDS", 0.01)
    tier = Hanging()
    llm = make(tiers=[tier], cache_write_policy="write-through")
    answers(llm, UNLIKE[:1])
    assert tier.puts.wait(600)
    # Would free a close that waits for ever, too late for this test to pass.
    rescue = threading.Timer(600.0, tier.may_put.set)
    rescue.start()
    del llm
    gc.collect()
    assert not tier.may_put.is_set()
    assert not tier.closed
    rescue.cancel()
    tier.may_put.set()


def test_a_medium_that_hangs_leaves_the_others_time_to_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to take all of the time, and what a healthy tier had queued was lost."""
    tier = Hanging()
    llm = make(tiers=[tier], cache_write_policy="write-through")
    answers(llm, UNLIKE[:1])
    assert tier.puts.wait(600)
    timeouts = []

    def close(stack: TierStack, timeout: float) -> bool:
        timeouts.append(timeout)
        return True

    monkeypatch.setattr(TierStack, "close", close)
    assert llm.engine.tiers is not None
    llm.engine.tiers.close(0.4)
    assert timeouts[0] >= 0.1
    tier.may_put.set()


def test_the_threads_of_a_loader_have_one_deadline_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them used to be given all of the time."""
    now, timeouts = [0.0], []
    writer, loader = around(DictTier(), lambda: now[0])

    def hangs(worker: Worker, timeout: float) -> bool:
        timeouts.append(timeout)
        now[0] += min(timeout, 2.0)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "stop", hangs)
        assert not loader.stop(3.0)
    assert timeouts == [3.0, 1.0, 0.0, 0.0]
    assert loader.stop(HANGING)
    assert writer.stop(HANGING)


def test_writing_at_the_end_is_no_step_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(tiers=[DictTier()])
    now, seconds = [0.0], []

    def write_hot(seconds_left: Any) -> None:
        now[0] = 1e6
        seconds.append(thread.seconds_in_step)

    monkeypatch.setattr(llm.engine.tiers, "write_hot", write_hot)
    thread = EngineThread(llm.engine, lambda result: None, lambda: now[0])
    thread.start()
    thread.stop(30.0).result(HANGING)
    assert seconds == [0.0]


class Timed:
    """An engine that takes a second for each batch by its own clock, and what it learns of them.

    Attributes:
        observed: prompt tokens, all tokens and seconds.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.observed: list[tuple[int, int, float]] = []
        engine._compute_timer = ComputeTimer(
            lambda *counts: self.observed.append(counts), lambda: self.now, bool(engine.async_scheduling)
        )
        self._run = engine._runner.run
        monkeypatch.setattr(engine._runner, "run", self._run_slowly)

    def _run_slowly(self, *args: Any) -> Any:
        self.now += 1.0
        return self._run(*args)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_computing_costs_is_learned_when_batches_land(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches in flight nothing used to be learned, so a tier slower than computing was believed to be faster."""
    engine = make(tiers=[DictTier()], async_scheduling=ahead).engine
    timed = Timed(engine, monkeypatch)
    for first in (50, 60):
        timed.now += 1000.0  # nothing is computed
        request = add(engine, f"{first}", [first, *range(3, 42)], GREEDY)
        while not request.finished:
            engine.step()
    prompts = [counts for counts in timed.observed if counts[0]]
    # Three batches together; on this device, the one launched before they land adds its time at once.
    assert prompts == ([(40, 40, 4.0)] if ahead else [(16, 16, 1.0), (16, 16, 1.0), (8, 8, 1.0)]) * 2


def test_the_time_after_the_last_request_was_aborted_is_not_that_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch stayed in flight until the next request came, and all the time in between counted as computing."""
    engine = make(async_scheduling=True).engine
    timed = Timed(engine, monkeypatch)
    for num_steps in range(1, 5):
        add(engine, "aborted", [10 * num_steps, *range(3, 42)], GREEDY)
        for _ in range(num_steps):
            engine.step()
        engine.abort("aborted")
        timed.now += 1000.0
    request = add(engine, "next", [50, *range(3, 42)], GREEDY)
    while not request.finished:
        engine.step()
    assert max(seconds for _, _, seconds in timed.observed) <= 4.0
    assert (40, 40, 4.0) in timed.observed


@pytest.mark.usefixtures("loads_are_worth_it")
@pytest.mark.parametrize("idle", [True, False])
def test_an_idle_engine_keeps_no_blocks_for_an_aborted_load(idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a chunk was being written when its request was aborted, the load kept its blocks until the next request came."""
    tier = SlowlyRead()
    llm = make(tiers=[tier])
    engine = llm.engine
    tier.may_read.set()
    answers(llm, UNLIKE[:1])
    evict_all(llm)
    tier.may_read.clear()
    add(engine, "loads", UNLIKE[0]["prompt_token_ids"], GREEDY)
    while not tier.reads.is_set():
        engine.step()
    monkeypatch.setattr(Load, "try_cancel", lambda load: False)  # as if a chunk were being written
    engine.abort("loads")
    assert free_blocks(llm) < 80
    if idle:
        engine.write_behind()
        assert free_blocks(llm) == 80
    assert llm.reset_prefix_cache()
    tier.may_read.set()
    llm.shutdown()


class HangingLookUps(DictTier):
    """Answers no look-up until it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def contains_prefix(self, keys: Any) -> int:
        assert self.may_answer.wait(600)
        return super().contains_prefix(keys)


def test_a_look_up_that_hangs_behind_a_request_without_room_does_not_stop_the_engine() -> None:
    """Nobody looks at what waits behind that request, so the look-up was never given up, and the engine waited for it."""
    tier = HangingLookUps()
    llm = make(tiers=[tier], num_blocks=20)
    engine, now = llm.engine, 0.0
    assert engine.tiers is not None
    engine.tiers.loads._clock = lambda: now
    tier.may_answer.set()
    llm.pin({"prompt_token_ids": list(range(10, 50))})
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    without_room = add(engine, "without room", [5, 6, 7], params)
    engine.step()
    tier.may_answer.clear()
    behind = add(engine, "behind", range(100, 120), GREEDY)
    while engine.scheduler.running:
        engine.step()
    assert without_room.failure is None
    now = 1e6
    for _ in range(100):
        engine.step()
    assert isinstance(without_room.failure, NoBlocksLeftError)
    assert len(behind.sequences[0].output_token_ids) == 6
    assert not engine.has_unfinished_requests
    tier.may_answer.set()
