"""Streams and engines that the garbage collector ends: in any thread, at any moment, and without waiting for anything."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.prompt_sets import GREEDY, shared_prefix_prompts, tokens_of
from support.time_limit import HANGING
from support.tiny_engine import assert_empty, tiny

from radixkv import LLM, RequestOutput
from radixkv.cache.block_table import BlockTable
from radixkv.engine.kv_tiers import KVTiers
from radixkv.tiers.disk.store_writer import StoreWriter
from radixkv.tiers.disk_tier import DiskTier


def begun(llm: LLM) -> Iterator[RequestOutput]:
    stream = llm.stream(shared_prefix_prompts(1, 1)[0], GREEDY)
    next(stream)
    return stream


def disk_of(tiers: KVTiers) -> StoreWriter:
    (tier,) = tiers._stack._tiers
    assert isinstance(tier, DiskTier)
    assert tier._writer is not None
    return tier._writer


def once(whole: Callable[..., Any], job: Callable[[], object]) -> Callable[..., Any]:
    """A function that does a job, too, after its first call."""
    jobs = [job]

    def calling(*arguments: Any) -> Any:
        result = whole(*arguments)
        if jobs:
            jobs.pop()()
        return result

    return calling


@pytest.mark.parametrize("method", ["run", "schedule", "process"])
def test_a_stream_that_ends_within_a_step_is_aborted_after_it(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    llm = tiny()
    streams = [begun(llm)]
    engine = llm.engine
    owner = {"run": engine._runner, "schedule": engine.scheduler, "process": engine._output_processor}[method]
    monkeypatch.setattr(owner, method, once(getattr(owner, method), streams.clear))
    prompts = shared_prefix_prompts(1, 2)[1:]
    assert tokens_of(llm, prompts) == tokens_of(tiny(), prompts)
    assert not streams
    assert_empty(llm)


def test_a_stream_that_ends_while_the_cache_is_cleared_leaves_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be aborted in the middle, and changed the set of tables that was just being gone through."""
    llm = tiny()
    streams = [begun(llm) for _ in range(3)]
    monkeypatch.setattr(BlockTable, "detach", once(BlockTable.detach, streams.clear))
    llm.reset_prefix_cache()
    assert not streams
    assert_empty(llm)


def test_a_thread_in_which_a_stream_ends_does_not_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to stop until a whole `generate` of another thread was done; the thread that writes tiers, for ever."""
    llm = tiny()
    streams = [begun(llm)]
    num_unfinished: list[int] = []

    def end_elsewhere() -> None:
        thread = threading.Thread(target=streams.clear)
        thread.start()
        thread.join(HANGING)
        assert not thread.is_alive()
        num_unfinished.append(len(llm.engine._requests))

    monkeypatch.setattr(llm.engine._runner, "run", once(llm.engine._runner.run, end_elsewhere))
    steps = llm.engine.step

    def step() -> Any:
        num_unfinished.append(len(llm.engine._requests))
        return steps()

    monkeypatch.setattr(llm.engine, "step", step)
    tokens_of(llm, shared_prefix_prompts(1, 2)[1:])
    assert num_unfinished[:3] == [2, 2, 1]  # aborted between two steps, not only at the end
    assert_empty(llm)


def test_streams_that_end_in_many_threads_are_all_aborted() -> None:
    llm = tiny()
    (prompt,) = shared_prefix_prompts(1, 1)

    def begin_and_drop(number: int) -> None:
        stream = llm.stream(prompt, GREEDY)
        next(stream)
        if number % 3 == 0:
            llm.generate(prompt, GREEDY, use_tqdm=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(begin_and_drop, range(24)))
    assert_empty(llm)


@pytest.mark.parametrize("thread", ["radixkv-tier-writer", "disk-tier"])
def test_an_engine_that_a_tiers_thread_collects_is_closed(tmp_path: Path, thread: str) -> None:
    """That thread used to wait for its own end: in vain, and with the folder locked by this process, and blocks lost."""
    before = set(threading.enumerate())
    llms = [tiny(disk_cache=tmp_path, disk_cache_size="64MiB", cache_write_policy="write-through")]
    collected = threading.Event()

    def collect() -> None:
        llms.clear()
        gc.collect()
        collected.set()

    tiers = llms[0].engine.tiers
    assert tiers is not None
    submit = tiers._writer._worker.submit if thread == "radixkv-tier-writer" else disk_of(tiers)._writer.call
    tokens_of(llms[0], shared_prefix_prompts(1, 2))
    submit(collect)
    del tiers, submit
    assert collected.wait(HANGING)
    while ending := set(threading.enumerate()) - before:
        for each in ending:
            with suppress(RuntimeError):  # the thread that closes the disk is still being started
                each.join(HANGING)
                assert not each.is_alive()
    with tiny(disk_cache=tmp_path, disk_cache_size="64MiB") as llm:
        (output,) = llm.generate(shared_prefix_prompts(1, 1)[0], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens > 4


class Interrupted:
    """A lock during whose acquisition Ctrl-C is pressed."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, blocking: bool = True) -> bool:
        acquired: bool = self._lock.acquire(blocking=blocking)
        signal.raise_signal(signal.SIGINT)
        return acquired

    def release(self) -> None:
        self._lock.release()


def test_ctrl_c_while_a_stream_ends_leaves_the_engine_free(
    handled_by: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to come between taking the lock and all that gives it back: other threads waited for ever."""
    handled_by(signal.default_int_handler)  # tests in the background of a script ignore it
    llm = tiny()
    stream = begun(llm)
    monkeypatch.setattr(llm._use, "_lock", Interrupted(lock := llm._use._lock))
    with pytest.raises(KeyboardInterrupt):
        stream.close()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lock.acquire, blocking=False).result()
        pool.submit(lock.release)
    monkeypatch.undo()
    assert_empty(llm)
