"""Random work on every store while its medium fails in every way: what it returns is what was put, or nothing."""

from __future__ import annotations

import errno
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.faulty_os import FAULTS, FaultyOs
from support.tier_model import FORMAT, FakeClock, TierModel, get, partly_filled, prefix_keys, random_blocks

from radixkv.tiers import folder_blobs
from radixkv.tiers.block_key import BlockKey, namespace_digest
from radixkv.tiers.disk import slot_files
from radixkv.tiers.disk.slot_index import SlotIndex
from radixkv.tiers.disk.slot_reader import RecordsReader
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.shared_tier import SharedTier
from radixkv.tiers.tier import BlockBytes
from radixkv_cpu import library, read_records

NAMESPACES = st.sampled_from(["", "ann", "bob"])
PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=5)
NUM_MORE = st.sampled_from([0, 0, 1, 3])


def keys_of(namespace: str, prefix: list[int], num_more: int) -> list[BlockKey]:
    """Keys of whole blocks and, if there are more tokens, of a partly filled one."""
    keys = prefix_keys(namespace, *prefix)
    return [*keys, partly_filled(keys[-1], num_more)] if num_more else keys


class TierMachine(RuleBasedStateMachine):
    """What holds for every tier."""

    capacity = 12

    def __init__(self) -> None:
        super().__init__()
        self.model = TierModel()
        self.clock = FakeClock()
        self.os = FaultyOs(self.clock)
        self.patches = self.put_in_place()
        self.folder = tempfile.TemporaryDirectory()
        self.version = 0
        self.asked = 0
        self.healthy = True

    def open_tier(self):
        raise NotImplementedError

    def put_in_place(self) -> ExitStack:
        """Have the tier use ``self.os`` until the end."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.tier = self.open_tier()

    @rule(namespace=NAMESPACES, prefix=PREFIXES, num_more=NUM_MORE, lent=st.booleans())
    def put(self, namespace: str, prefix: list[int], num_more: int, lent: bool) -> None:
        keys = keys_of(namespace, prefix, num_more)
        self.version += 1
        blocks = random_blocks(self.version, len(keys))
        self.model.put(keys, blocks)
        if lent:
            self.tier.borrow_many(keys, blocks)
        else:
            self.tier.put_many(keys, blocks)
            blocks[:] = 0  # what was put is not kept by reference
        assert self.tier.flush(600)
        blocks[:] = 0  # after the flush, lent memory is the caller's again
        if self.healthy:
            assert self.tier.contains_prefix(keys) == len(keys)

    @rule(namespace=NAMESPACES, prefix=PREFIXES)
    def find(self, namespace: str, prefix: list[int]) -> None:
        (*_, last) = prefix_keys(namespace, *prefix)
        lengths = [partly_filled(last, num_tokens) for num_tokens in (3, 2, 1)]
        first = self.tier.first_present(lengths)
        if self.healthy:
            assert first == next((i for i, key in enumerate(lengths) if self.tier.contains_prefix([key])), None)

    @rule(namespace=NAMESPACES, prefix=PREFIXES, num_more=NUM_MORE)
    def read(self, namespace: str, prefix: list[int], num_more: int) -> None:
        self.read_keys(keys_of(namespace, prefix, num_more))

    def read_keys(self, keys: list[BlockKey]) -> None:
        self.asked += len(keys)
        known = self.tier.contains_prefix(keys)
        blocks = get(self.tier, keys)
        self.model.check(keys, blocks)
        assert len(blocks) <= known
        if self.healthy:
            assert len(blocks) == known

    @rule(namespace=st.none() | NAMESPACES)
    def clear(self, namespace: str | None) -> None:
        digest = None if namespace is None else namespace_digest(FORMAT.fingerprint, namespace)
        self.tier.clear(digest)
        if self.healthy:
            self.model.clear(digest)

    @rule(fault=st.sampled_from(FAULTS), namespace=NAMESPACES, prefix=PREFIXES, num_more=NUM_MORE)
    def fail(self, fault: str, namespace: str, prefix: list[int], num_more: int) -> None:
        """The medium fails when something was just put, so that there is something to be read wrongly."""
        self.put(namespace, prefix, num_more, lent=False)
        self.healthy = False
        self.os.fault = fault
        self.read_keys(keys_of(namespace, prefix, num_more))

    @precondition(lambda self: not self.healthy)
    @rule()
    def come_back(self) -> None:
        """The medium works again, with whatever it has."""
        self.os.fault = "none"
        self.clock.now += 100

    @precondition(lambda self: not self.healthy)
    @rule()
    def mend(self) -> None:
        """The medium is back, and what it lost or garbled meanwhile is gone for good."""
        self.os.fault = "none"
        self.clock.now += 100
        self.tier.clear()
        self.tier.flush(600)
        self.tier.close()
        self.tier = self.open_tier()
        self.asked = 0
        self.model.clear(None)
        self.healthy = True

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.open_tier()
        self.asked = 0

    @invariant()
    def counts_add_up(self) -> None:
        if hasattr(self, "tier"):
            stats = self.tier.stats
            assert stats.hit_blocks + stats.missed_blocks == self.asked
            assert stats.read_bytes == stats.hit_blocks * FORMAT.block_bytes
            if self.healthy:
                assert not stats.corrupt_blocks
                assert not stats.errors

    def teardown(self) -> None:
        self.os.fault = "none"
        if hasattr(self, "tier"):
            self.tier.close()
        self.folder.cleanup()
        self.patches.close()


class DiskMachine(TierMachine):
    key: bytes | None = None
    reads_records: RecordsReader | None = None

    def put_in_place(self) -> ExitStack:
        real = SlotIndex.commit

        def commit(index: SlotIndex, *rows: object) -> None:
            if self.os.fault in ("full", "gone"):
                raise sqlite3.OperationalError("database or disk is full")
            real(index, *rows)

        patches = ExitStack()
        patches.enter_context(mock.patch.object(slot_files, "os", self.os))
        patches.enter_context(mock.patch.object(slot_files, "FILE_BYTES", 5 * 4096))  # so that there are several
        patches.enter_context(mock.patch.object(SlotIndex, "commit", commit))
        return patches

    def open_tier(self) -> DiskTier:
        return DiskTier(
            Path(self.folder.name),
            FORMAT,
            capacity_bytes=self.capacity * 4096,
            queue_bytes=1 << 16,
            key=self.key,
            read_records=self.reads_records,
            clock=self.clock,
        )

    @precondition(lambda self: self.os.fault == "none")
    @rule()
    def fill(self) -> None:
        """As many blocks as there is space for are kept: no slot is lost, and none is given to two blocks."""
        self.clock.now += 100
        self.version += 1
        keys = prefix_keys("eve", *range(self.version, self.version + self.capacity))
        blocks = random_blocks(self.version, self.capacity)
        self.model.put(keys, blocks)
        self.tier.put_many(keys, blocks)
        assert self.tier.flush(600)
        assert len(self.tier) == self.capacity
        self.asked += self.capacity
        assert np.array_equal(get(self.tier, keys), blocks)
        assert sum(path.stat().st_size for path in Path(self.folder.name).rglob("blocks-*")) == self.capacity * 4096


class NativeDiskMachine(DiskMachine):
    def reads_records(
        self, places: Sequence[tuple[int, int]], headers: bytes, slot_bytes: int, rows: BlockBytes
    ) -> list[int]:
        if self.os.fault in ("read fails", "gone"):
            return [-errno.EIO] * len(places)
        outcomes = read_records(places, headers, slot_bytes, rows)
        if self.os.fault in ("short read", "wrong bytes") and outcomes:
            outcomes[-1] = 2
        return outcomes


class SealedDiskMachine(DiskMachine):
    key = bytes(range(32))


class FolderMachine(TierMachine):
    def put_in_place(self) -> ExitStack:
        patches = ExitStack()
        patches.enter_context(mock.patch.object(folder_blobs, "os", self.os))
        return patches

    def open_tier(self) -> SharedTier:
        store = FolderBlobs(Path(self.folder.name), capacity_bytes=self.capacity * 172)
        return SharedTier(store, FORMAT, queue_bytes=1 << 16, clock=self.clock)


@pytest.mark.parametrize("machine", [DiskMachine, NativeDiskMachine, SealedDiskMachine, FolderMachine])
def test_a_tier_returns_what_was_put_or_nothing(machine: type[TierMachine]) -> None:
    if machine is NativeDiskMachine and library() is None:
        pytest.skip("no native code for this processor")
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=25, deadline=None))
