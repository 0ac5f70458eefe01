"""`radixkv bench tier-reads`: how fast the disk tier reads and writes, against a plain loop over a file of the same layout.

The loop reads as many bytes per block at the offsets of the tier's slots, one call per block, and compares nothing. Reads are
measured from the page cache and, after advising the system to drop the files' pages, from the disk; all in turns. Opening a
store is measured with an index of 100,000 blocks.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import DIGEST_BYTES, block_keys, namespace_digest
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import IndexedBlock, SlotIndex
from radixkv.tiers.disk.store_folder import store_folders
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.tier import BlockBytes
from radixkv_cpu import library, read_records

BLOCK_SIZE = 16
BLOCK_BYTES = 30 * 2 * 3 * 64 * 2 * BLOCK_SIZE  # of the default model in bfloat16
NUM_BLOCKS = 256
NUM_INDEXED = 100_000


@dataclass(frozen=True, slots=True)
class TierReads:
    """Gigabytes of blocks a second, medians.

    Attributes:
        memcpy: from memory to memory.
        cached: of reads from the page cache, by reader.
        disk: of reads from the disk.
        written: of writes into the page cache, until the last is done.
        open_seconds: of a store of `NUM_INDEXED` blocks.
    """

    memcpy: float
    cached: Mapping[str, float]
    disk: Mapping[str, float]
    written: Mapping[str, float]
    open_seconds: float


def run_tier_reads(console: Console, folder: Path | None, rounds: int, json_path: Path | None) -> None:
    """Measure, print a table, write JSON.

    Raises:
        OSError: the folder cannot be written.
    """
    with console.status("reading and writing"):
        reads = measure_tier_reads(folder, rounds)
    columns = ("", "plain loop", "disk tier", "ratio", "encrypted")
    table = figure_table(*columns, title=f"{NUM_BLOCKS} blocks of {BLOCK_BYTES:,} bytes, GB/s, median of {rounds}")
    for name, rates in (("page cache", reads.cached), ("disk", reads.disk), ("writing", reads.written)):
        ratio = rates["tier"] / rates["plain"]
        sealed = f"{rates['sealed']:.2f}" if "sealed" in rates else ""
        table.add_row(name, f"{rates['plain']:.2f}", f"{rates['tier']:.2f}", f"{ratio:.2f}", sealed)
    console.print(table)
    console.print(
        f"memcpy {reads.memcpy:.2f} GB/s: from the page cache {reads.cached['tier'] / reads.memcpy:.2f} of it"
    )
    console.print(f"opening {NUM_INDEXED:,} blocks: {reads.open_seconds:.2f} s")
    figures = asdict(reads)
    document = {
        "machine": describe_machine("numpy", "xxhash"),
        "block_bytes": BLOCK_BYTES,
        "num_blocks": NUM_BLOCKS,
        "open_seconds": figures.pop("open_seconds"),
        "gigabytes_per_second": figures,
    }
    write_figures(json_path, document)


def measure_tier_reads(folder: Path | None, rounds: int) -> TierReads:
    """Measure in a new folder, which is removed.

    Args:
        folder: below which it is made; None: where temporary files are.
        rounds: of each kind, in turns.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=folder) as root:
        rates = _Reads(Path(root) / "reads", NUM_BLOCKS, BLOCK_BYTES).measure(rounds)
        return TierReads(*rates, _measure_opening(Path(root) / "index", rounds))


def _measure_opening(root: Path, rounds: int) -> float:
    block_format = BlockFormat(b"bench", BLOCK_SIZE, 1)

    def open_tier() -> DiskTier:
        return DiskTier(root, block_format, capacity_bytes=NUM_INDEXED * 4096)

    open_tier().close()
    (folder,) = store_folders(root)
    index = SlotIndex(folder, writable=True)
    name = bytes(DIGEST_BYTES)
    digests = (slot.to_bytes(DIGEST_BYTES, "big") for slot in range(NUM_INDEXED))
    index.commit((IndexedBlock(slot, digest, name, slot) for slot, digest in enumerate(digests)), [], [])
    index.close()
    files = SlotFiles(folder, 4096, writable=True)
    while files.num_slots < NUM_INDEXED:
        files.grow(NUM_INDEXED)
    files.close()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        tier = open_tier()
        seconds.append(time.perf_counter() - begin)
        assert len(tier) == NUM_INDEXED
        tier.close()
    return statistics.median(seconds)


class _Reads:
    def __init__(self, root: Path, num_blocks: int, block_bytes: int) -> None:
        root.mkdir()
        self._block_format = BlockFormat(b"bench", BLOCK_SIZE, block_bytes)
        tokens = np.arange(num_blocks * BLOCK_SIZE, dtype="<i4").tobytes()
        self._keys = list(block_keys(namespace_digest(b"bench", ""), tokens, 4 * BLOCK_SIZE))
        self._blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        self._out = np.ones_like(self._blocks)
        self._root = root
        self._plain = root / "plain"
        self._slot_bytes = 4096 * -(-(block_bytes + 256) // 4096)

    def measure(self, rounds: int) -> tuple[float, dict[str, float], dict[str, float], dict[str, float]]:
        """The rates of `TierReads`, in its order."""
        tiers = {"tier": self._open("tier", None)}
        if find_spec("cryptography") is not None:
            tiers["sealed"] = self._open("sealed", bytes(32))
        reads: dict[str, Callable[[], None]] = {
            "plain": self._read_plainly,
            **{name: partial(self._read, tier) for name, tier in tiers.items()},
        }
        writes: dict[str, Callable[[], None]] = {
            "plain": self._write_plainly,
            **{name: partial(self._write, tier) for name, tier in tiers.items()},
        }
        seconds: dict[tuple[str, str], list[float]] = {}

        def measure(kind: str, name: str, work: Callable[[], None]) -> None:
            begin = time.perf_counter()
            work()
            seconds.setdefault((kind, name), []).append(time.perf_counter() - begin)

        for _ in range(rounds + 1):
            measure("memcpy", "", lambda: np.copyto(self._out, self._blocks))
            for name, write in writes.items():
                measure("written", name, write)
            for name, read in reads.items():
                self._sync(forget=False)
                measure("cached", name, read)
            for name, read in reads.items():
                self._sync(forget=True)
                measure("disk", name, read)
        for tier in tiers.values():
            tier.close()
        size = self._blocks.nbytes / 1e9
        rates = {kind: size / statistics.median(times[1:]) for kind, times in seconds.items()}  # the first warms up
        cached, disk, written = ({name: rates[kind, name] for name in reads} for kind in ("cached", "disk", "written"))
        return rates["memcpy", ""], cached, disk, written

    def _open(self, name: str, key: bytes | None) -> DiskTier:
        size = self._blocks.nbytes
        return DiskTier(
            self._root / name,
            self._block_format,
            capacity_bytes=2 * size,
            queue_bytes=size,
            key=key,
            read_records=None if library() is None else read_records,
        )

    def _read(self, tier: DiskTier) -> None:
        """Read by two threads that take eight blocks at a time, as loads do."""

        def read(start: int) -> int:
            some = slice(start, start + 8)
            return tier.get_many(self._keys[some], self._out[some])

        with ThreadPoolExecutor(2) as threads:
            counts = threads.map(read, range(0, len(self._keys), 8))
        if sum(counts) != len(self._keys):
            raise OSError("blocks that were written a moment before cannot be read")

    def _write(self, tier: DiskTier) -> None:
        tier.clear()
        tier.put_many(self._keys, self._blocks)
        tier.flush()

    def _read_plainly(self) -> None:
        file = os.open(self._plain, os.O_RDONLY)
        try:
            for row, block in enumerate(self._out):
                os.preadv(file, [block.data], row * self._slot_bytes)
        finally:
            os.close(file)

    def _write_plainly(self) -> None:
        file = os.open(self._plain, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(file, 0, len(self._blocks) * self._slot_bytes)
            header: BlockBytes = np.zeros(self._slot_bytes - self._blocks.shape[1], dtype=np.uint8)
            for row, block in enumerate(self._blocks):
                os.pwritev(file, [header.data, block.data], row * self._slot_bytes)
        finally:
            os.close(file)

    def _sync(self, *, forget: bool) -> None:
        """Write all files to the disk, so that no write disturbs a measurement; ``forget``: drop them from the page cache."""
        folders = [folder for store in self._root.iterdir() if store.is_dir() for folder in store_folders(store)]
        for path in (self._plain, *(path for folder in folders for path in folder.glob("blocks-*"))):
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                if forget:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
