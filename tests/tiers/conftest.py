"""Tiers in one folder, and their clock; a folder of a store that was closed; a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.disk_tiers import BLOCKS, BOB, SLOT, OpenTier, put, tier_in
from support.key_value_server import EXECUTABLE, KeyValueServer
from support.tier_model import FORMAT, FakeClock

from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.disk import store_writer
from radixkv.tiers.disk.slot_index import SlotIndex
from radixkv.tiers.disk.slot_reader import RecordsReader
from radixkv.tiers.disk.store_folder import store_folders
from radixkv.tiers.disk_tier import DiskTier
from radixkv_cpu import library, read_records


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=[None, read_records], ids=["by Python", "by native code"])
def reads_records(request: pytest.FixtureRequest) -> RecordsReader | None:
    """How tiers read records: by native code, or by Python where this is None."""
    if request.param is not None and library() is None:
        pytest.skip("no native code for this processor")
    reader: RecordsReader | None = request.param
    return reader


@pytest.fixture
def open_tier(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, reads_records: RecordsReader | None
) -> Iterator[OpenTier]:
    """Open tiers in one folder; those left open are closed. A slow disk does not count as one that hangs."""
    monkeypatch.setattr(store_writer, "_CLEAR_SECONDS", 600)
    tiers: list[DiskTier] = []

    def open_tier(block_format: BlockFormat = FORMAT, **options: Any) -> DiskTier:
        defaults = {"capacity_bytes": 64 * SLOT, "queue_bytes": 1 << 20, "clock": clock}
        options = defaults | {"read_records": reads_records} | options
        tiers.append(DiskTier(tmp_path / "store", block_format, **options))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


@pytest.fixture(scope="module")
def server() -> Iterator[KeyValueServer]:
    """A server that tests share."""
    if EXECUTABLE is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    server = KeyValueServer()
    yield server
    server.kill()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a store with six blocks of one namespace, and three of another that were used earlier."""
    tier = tier_in(tmp_path)
    put(tier, BOB, BLOCKS[:3])
    put(tier)
    tier.close()
    (folder,) = store_folders(tmp_path)
    index = SlotIndex(folder, writable=True)
    index.commit([], [(1000.0 + i, row.slot) for i, row in enumerate(index.all())], [])
    index.close()
    return tmp_path
