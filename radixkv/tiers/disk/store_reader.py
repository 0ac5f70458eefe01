"""A store of blocks that another process writes, or wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk.namespace_secret import check_secret
from radixkv.tiers.disk.open_store import FoundBlocks, MediumErrors, OpenStore, open_to_read
from radixkv.tiers.record import RecordCodec, Verdict

# How often to look whether the store is still the one in the folder.
_LOOK_SECONDS = 1.0


class StoreReader:
    """Opens a store once it is there, and anew when it failed or was replaced. Any thread may call.

    Args:
        root: the folder of stores.
        codec: of the records.
        secret: see `radixkv.tiers.disk_tier.DiskTier`.
        clock: seconds.
    """

    def __init__(self, root: Path, codec: RecordCodec, secret: bytes | None, clock: Callable[[], float]) -> None:
        self._root = root
        self._codec = codec
        self._secret = secret
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows; held even while the disk hangs
        self._closed = False
        self._opened: OpenStore | None = None
        self._look_at = 0.0

    def __len__(self) -> int:
        """How many blocks there were when the store was opened last, or since."""
        with self._lock:
            return len(self._opened.index) if self._opened else 0

    def find(self, keys: Sequence[BlockKey]) -> FoundBlocks:
        """The leading blocks that are there.

        Raises:
            OSError, sqlite3.Error, UnicodeDecodeError: there is no store, its folder holds another secret, or its disk fails;
                the next call opens it anew.
        """
        with self._lock:
            try:
                opened = self._current()
                if opened is None:
                    return FoundBlocks(None, [])
                rows = opened.index.find([key.digest for key in keys])
            except MediumErrors:
                self._give_up()
                raise
            return FoundBlocks(opened.files, list(zip(keys, rows, strict=False)))

    def note_verdicts(self, found: FoundBlocks, verdicts: Sequence[Verdict | None], count: int) -> int:
        """How many blocks were corrupt, or seemed so while their writer overwrote them.

        If one could not be read, the store is opened anew.
        """
        if None in verdicts:
            with self._lock:
                self._give_up()
        return verdicts.count(Verdict.CORRUPT)

    def close(self) -> None:
        """Close the store; nothing is found afterwards."""
        with self._lock:
            self._closed = True
            self._give_up()

    def _current(self) -> OpenStore | None:
        if self._closed:
            return None
        now = self._clock()
        if self._opened is not None and now >= self._look_at and not self._opened.is_current:
            self._give_up()
        if self._opened is None:
            if self._secret is not None:
                check_secret(self._root, self._secret)
            self._opened = open_to_read(self._root, self._codec)
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
        return self._opened

    def _give_up(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
