"""The stores of blocks are public: a wrong argument is named before anything is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tier_model import FORMAT

from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.shared_tier import SharedTier


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: DiskTier(str(folder), FORMAT, capacity_bytes=1 << 20), "root: expected a Path, got '"),
        (lambda folder: DiskTier(folder, FORMAT, capacity_bytes=4095), "capacity_bytes: .* at least 4096, got 4095"),
        (
            lambda folder: DiskTier(folder, FORMAT, capacity_bytes="1GiB"),
            "capacity_bytes: .* at least 4096, got '1GiB'",
        ),
        (
            lambda folder: DiskTier(folder, FORMAT, capacity_bytes=1, queue_bytes=1.5),
            "queue_bytes: .* least 1, got 1.5",
        ),
        (lambda folder: DiskTier(folder, FORMAT, capacity_bytes=1, key=b"short"), "key: expected 32 bytes, got 5"),
        (lambda folder: FolderBlobs(str(folder), capacity_bytes=1), "root: expected a Path, got '"),
        (lambda folder: FolderBlobs(folder, capacity_bytes=0), "capacity_bytes: .* at least 1, got 0"),
        (lambda folder: FolderBlobs(folder, capacity_bytes="1GiB"), "capacity_bytes: .* at least 1, got '1GiB'"),
        (lambda folder: SharedTier(None, FORMAT, queue_bytes=0), "queue_bytes: .* at least 1, got 0"),
        (lambda folder: HostTier(10, 11), "capacity_bytes: .* at least 11, got 10"),
        (lambda folder: HostTier(10, 0), "block_nbytes: .* at least 1, got 0"),
        (lambda folder: HostTier(10.5, 5), "capacity_bytes: .* at least 5, got 10.5"),
        (lambda folder: BlockFormat("text", 16, 100), "fingerprint: expected at least one byte, got 'text'"),
        (lambda folder: BlockFormat(b"", 16, 100), "fingerprint: expected at least one byte, got b''"),
        (lambda folder: BlockFormat(b"1", True, 100), "block_size: .* at least 1, got True"),
        (lambda folder: BlockFormat(b"1", 16, 0), "block_bytes: .* at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_named(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make(tmp_path / "store")
    assert not (tmp_path / "store").exists()
