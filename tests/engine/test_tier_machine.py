"""The cache's state machine with a tier below it that fails in every way: all rules hold, and reads return the right data.

Instead of keys and values, blocks hold the tags of a shadow memory, so the tier stores tags. What threads would do is done
when the machine says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from numpy.typing import NDArray
from support.dict_tier import FAULTS, Fault, PartlyFilledDictTier

from radixkv import SamplingParams
from radixkv.cache import PrefixCache
from radixkv.routing import PrefillRate
from radixkv.scheduling.prefix_loads import PrefixLoads
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence
from radixkv.testing import CheckedCache, PrefixCacheAdapter
from radixkv.testing.machine import cache_machine
from radixkv.testing.shadow_memory import ShadowMemory
from radixkv.testing.strategies import PoolShape, pool_shapes
from radixkv.tiers.moves import loader, writer
from radixkv.tiers.moves.block_moves import BlockMoves
from radixkv.tiers.moves.known_blocks import KnownBlocks
from radixkv.tiers.moves.loader import BlockLoader
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.rates import Rates
from radixkv.tiers.moves.writer import BlockWriter
from radixkv.tiers.stack import TierStack
from radixkv.tiers.tier import BlockBytes

MEANWHILE = ("nothing", "clear", "abort", "give up")


class ManualWorker:
    """Jobs wait until `run`."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def run(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()


class ShadowRows:
    """The shadow memory's blocks as bytes: each slot's tag, and the one before it."""

    def __init__(self, memory: Callable[[], ShadowMemory], block_size: int) -> None:
        self._memory = memory
        self.nbytes = 16 * block_size
        self.num_blocks = 0

    def read(self, block_ids: NDArray[np.int32]) -> BlockBytes:
        memory = self._memory()
        tags = np.concatenate([memory._tags[block_ids], memory._before[block_ids]], axis=1)
        return tags.view(np.uint8)

    def fence(self) -> None:
        return None

    def to_host(self, data: BlockBytes, fence: object) -> BlockBytes:
        return data

    def release(self, data: BlockBytes) -> None:
        data[:] = 0xEE  # whoever still uses this memory writes wrong data

    def erase_behind(self, row: BlockBytes, num_tokens: int) -> None:
        row.view(np.uint64).reshape(2, -1)[:, num_tokens:] = 0

    def prepare(self, block_ids: NDArray[np.int32]) -> None:
        pass

    def write(self, block_ids: NDArray[np.int32], data: BlockBytes, fence: object) -> None:
        memory = self._memory()
        tags, before = np.ascontiguousarray(data).view(np.uint64).reshape(len(block_ids), 2, -1).swapaxes(0, 1)
        memory._tags[block_ids], memory._before[block_ids] = tags, before


class TieredAdapter(PrefixCacheAdapter):
    """RadixKV's cache with a tier below it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.tier = PartlyFilledDictTier()
        self.checked: CheckedCache | None = None
        self.now = 0.0
        self.group: SequenceGroup | None = None
        stack, keys = TierStack([self.tier]), PrefixKeys(b"model", b"", 4 * block_size)
        rows = ShadowRows(self._memory, block_size)
        self.writer = BlockWriter(stack, keys, rows.nbytes, 1 << 20)
        self.loader = BlockLoader(
            stack, self.writer, keys, rows, lambda n, size: np.empty((n, size), np.uint8), 0, lambda: self.now
        )
        self.moves = BlockMoves(
            rows,
            self.writer,
            KnownBlocks(1000),
            "write-through-selective",
            4 * block_size,
            stack.keeps_partly_filled,
            lambda namespace: stack.clear(None if namespace is None else keys.group(namespace)),
        )
        self.cache = PrefixCache(num_blocks, block_size, remembered_blocks=4 * num_blocks, observers=[self.moves])
        self.loads = PrefixLoads(
            self.cache,
            self.loader,
            Rates(1, PrefillRate()),
            ["dict"],
            lambda: self.now,
            self.moves,
        )

    def _memory(self) -> ShadowMemory:
        assert self.checked is not None
        return self.checked._memory

    def take_copies(self) -> Any:
        self.moves.send_down(self.cache)
        self.writer._worker.run()
        return super().take_copies()

    def load(self, prompt: list[int], namespace: str, meanwhile: str) -> None:
        """Do what the engine does for a waiting request, until it could be admitted."""
        request = Request("r", None, np.array(prompt, np.int32), SamplingParams(), 0, 1, frozenset(), namespace)
        sequence = TokenSequence(request, 0, prompt)
        group = SequenceGroup(request, [sequence], request.prompt_token_ids)
        loads = self.loads
        loads.expect(group)
        self.moves.send_down(self.cache)
        loads.send_look_ups()
        self.loader._finder.run()
        self.writer._worker.run()
        self.loader._finder.run()
        while loads.find_or_load(group, lambda: self.cache.num_available_blocks, would_preempt=False):
            # As in a step: evicted bytes are read before anything is overwritten.
            self.moves.send_down(self.cache)
            if meanwhile == "clear":
                self.cache.clear(namespace)
            if meanwhile == "abort":
                loads.forget(group)
            elif meanwhile == "give up":
                self.now += 1e6
                loads.publish_done()  # a step begins, and finds the load over time
                assert not loads.find_or_load(group, lambda: self.cache.num_available_blocks, would_preempt=False)
            loads.send_look_ups()
            loads.begin(None)
            self.writer._worker.run()
            self.loader._readers.run()
            self.loader._finder.run()
            loads.publish_done()
            if meanwhile != "nothing":
                break
        loads.forget(group)
        assert not loads.in_progress
        self.cache.check()


class TieredMachine(cache_machine(TieredAdapter, max_examples=12, steps=20)):  # type: ignore[misc]
    """The cache's state machine, and prefixes that are loaded from a tier that works or fails."""

    @initialize(shape=pool_shapes())
    def start(self, shape: PoolShape) -> None:
        super().start(shape)
        self.cache.adapter.checked = self.cache

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=12, max_size=60),
        namespace=st.sampled_from(["", "tenant"]),
        meanwhile=st.sampled_from(MEANWHILE),
    )
    def come_back(self, prompt: list[int], namespace: str, meanwhile: str) -> None:
        """A prompt is computed, evicted as far as others allow, loaded, and used again."""
        self._run(prompt, namespace)
        self.squeeze(max(1, self.cache.adapter.num_blocks * self.cache.adapter.block_size // 2), namespace)
        self.cache.adapter.load([*prompt, 1], namespace, meanwhile)
        if meanwhile == "clear":
            self.cache.clear(namespace)
        self.cache.verify()
        self._run(prompt, namespace)

    def _run(self, prompt: list[int], namespace: str) -> None:
        self.seen.append(prompt)
        sequence = self.cache.open(prompt, namespace)
        if sequence is not None:
            self.cache.compute(sequence, len(prompt))
            self.cache.close(sequence)

    @rule(fault=st.sampled_from([None, *FAULTS]))
    def fail(self, fault: Fault | None) -> None:
        self.cache.adapter.tier.fault = fault


def test_every_rule_holds_whatever_a_tier_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "Worker", ManualWorker)
    monkeypatch.setattr(writer, "Worker", ManualWorker)
    run_state_machine_as_test(TieredMachine, settings=TieredMachine.TestCase.settings)


def test_what_comes_back_is_read_from_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the machine's random runs, few of which read anything, would show nothing."""
    monkeypatch.setattr(loader, "Worker", ManualWorker)
    monkeypatch.setattr(writer, "Worker", ManualWorker)
    machine = TieredMachine()
    machine.start(PoolShape(num_blocks=8, block_size=4))
    machine.come_back([0, 1, 2] * 8 + [0, 1], "", "nothing")
    tier = machine.cache.adapter.tier
    assert tier.num_read > tier.num_read_partly_filled > 0
    machine.teardown()
