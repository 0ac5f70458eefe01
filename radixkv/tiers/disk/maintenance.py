"""What operators do with the folder of a disk tier: look into it, verify it, shrink it, empty it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from radixkv.tiers.disk.compaction import compact
from radixkv.tiers.disk.open_store import index_to_write
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import IndexedBlock, IndexErrors, SlotIndex
from radixkv.tiers.disk.slot_reader import slot_bytes_of, verdict_on
from radixkv.tiers.disk.store_folder import FolderLock, StoreHeader, owner_of, read_header, remove_header
from radixkv.tiers.record import RecordLayout, Verdict

# Waits between looks at a block that seems corrupt, in a store that some process writes.
_SECONDS_BETWEEN_LOOKS = (0.01, 0.02, 0.04, 0.08, 0.16)


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What is in a store.

    Attributes:
        header: what kind of blocks it holds.
        num_blocks: how many there are.
        slot_bytes: space per block.
        taken_bytes: space of all slots.
        namespaces: blocks by namespace.
        last_used: when one was last put or read, in seconds since 1970; None: there is none.
        owner: the process that writes to it now, if one does.
    """

    header: StoreHeader
    num_blocks: int
    slot_bytes: int
    taken_bytes: int
    namespaces: Mapping[bytes, int]
    last_used: float | None
    owner: str | None


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        right: blocks that are as they were put.
        corrupt: blocks that are not; a reader would count them as misses.
        replaced: blocks whose slot holds another one by now, from a process that was killed, or that is still writing.
    """

    right: int
    corrupt: int
    replaced: int


class UnreadableStoreError(ValueError):
    """A store is of another version of RadixKV, or damaged; the message says which."""


class UnreadableHeaderError(UnreadableStoreError):
    """A store's header is damaged; the message names the file."""


class UnreadableIndexError(UnreadableStoreError):
    """A store's index is damaged, or its disk fails; the message says how."""


def describe(folder: Path) -> StoreInfo:
    """Describe a store, which another process may be writing.

    Args:
        folder: of one store; see `radixkv.tiers.disk.store_folder.store_folders`.

    Raises:
        OSError: it cannot be read.
        UnreadableStoreError: it makes no sense to this version.
    """
    with _opened(folder, writable=False) as store:
        rows = store.index.all()
        return StoreInfo(
            header=store.header,
            num_blocks=len(rows),
            slot_bytes=store.files.slot_bytes,
            taken_bytes=store.files.num_slots * store.files.slot_bytes,
            namespaces=Counter(row.namespace for row in rows),
            last_used=rows[-1].used if rows else None,
            owner=owner_of(folder),
        )


def verify(folder: Path) -> Verification:
    """Read every block of a store, and check its checksum. Needs no key.

    Args:
        folder: of one store, which another process may be writing.

    Raises:
        OSError: it cannot be read.
        UnreadableStoreError: it makes no sense to this version.
    """
    with _opened(folder, writable=False) as store:
        verdicts = Counter(_judge(folder, store, row) for row in store.index.all())
    return Verification(verdicts[Verdict.RIGHT], verdicts[Verdict.CORRUPT], verdicts[Verdict.OTHER])


def _judge(folder: Path, store: _Store, row: IndexedBlock) -> Verdict:
    """What a block's slot holds. A slot that is given to another block seems corrupt until that block is written."""
    for seconds in (*_SECONDS_BETWEEN_LOOKS, 0.0):
        verdict = verdict_on(store.files, store.layout, row.slot, row.digest)
        if verdict is not Verdict.CORRUPT:
            return verdict
        if [found.slot for found in store.index.find([row.digest])] != [row.slot]:
            return Verdict.OTHER
        if owner_of(folder) is None:
            break
        time.sleep(seconds)
    return Verdict.CORRUPT


def prune(folder: Path, *, max_bytes: int | None = None, used_since: float | None = None) -> int:
    """Forget the least recently used blocks, and give their space back.

    Args:
        folder: of one store, which no other process writes.
        max_bytes: how much the remaining slots may take; None: any.
        used_since: forget blocks that were last used before then, in seconds since 1970; None: no block is too old.

    Returns:
        How many blocks were forgotten.

    Raises:
        OSError: it cannot be read or written.
        StoreInUseError: a process writes to it.
        UnreadableStoreError: it makes no sense to this version.
    """
    with _opened(folder, writable=True) as store:
        rows = store.index.all()
        there = [row for row in rows if row.slot < store.files.num_slots]  # a full disk may have cost the last slots
        kept = [row for row in there if used_since is None or row.used >= used_since]
        if max_bytes is not None:
            kept = kept[max(0, len(kept) - max_bytes // store.files.slot_bytes) :]
        return len(rows) - len(compact(store.index, store.files, rows, kept, len(kept)))


def clear(folder: Path, namespace: bytes | None = None) -> int:
    """Forget one namespace, or everything, and overwrite or give back the space.

    Args:
        folder: of one store, which no other process writes.
        namespace: as `describe` names it.

    Returns:
        How many blocks were forgotten; 0 if the header or the index, which are then removed, could not be read.

    Raises:
        OSError: it cannot be read or written.
        StoreInUseError: a process writes to it.
        UnreadableStoreError: it makes no sense to this version.
    """
    try:
        with _opened(folder, writable=True) as store:
            doomed = [row for row in store.index.all() if namespace in (None, row.namespace)]
            store.index.clear(namespace)
            store.index.change_pins([namespace], [], [])
            store.index.erase_deleted()
            if namespace is None:
                store.files.shrink(0)
            else:
                zeros = bytes(store.files.slot_bytes)
                for row in doomed:
                    if row.slot < store.files.num_slots:  # else its file is gone, or too short
                        store.files.write(row.slot, [zeros])
            return len(doomed)
    except (UnreadableHeaderError, UnreadableIndexError) as error:
        if namespace is not None:
            raise
        with closing(FolderLock(folder)), closing(SlotFiles(folder, 1, writable=True)) as files:  # slots of any size
            SlotIndex.remove(folder)
            files.shrink(0)
            if isinstance(error, UnreadableHeaderError):
                remove_header(folder)
        return 0


@dataclass(frozen=True, slots=True)
class _Store:
    header: StoreHeader
    layout: RecordLayout
    index: SlotIndex
    files: SlotFiles


@contextmanager
def _opened(folder: Path, *, writable: bool) -> Iterator[_Store]:
    try:
        header = read_header(folder)
    except ValueError as error:
        raise UnreadableHeaderError(str(error)) from error
    if not header.readable:
        raise UnreadableStoreError(
            f"{folder}: its format has version {header.version}, which this version of RadixKV does not read"
        )
    layout = RecordLayout(header.block_format, sealed=header.sealed)
    with ExitStack() as stack:
        if writable:
            stack.enter_context(closing(FolderLock(folder)))
        try:
            files = stack.enter_context(closing(SlotFiles(folder, slot_bytes_of(layout), writable=writable)))
            opened = index_to_write(folder, files) if writable else SlotIndex(folder, writable=False)
            index = stack.enter_context(closing(opened))
            yield _Store(header, layout, index, files)
        except IndexErrors as error:
            raise UnreadableIndexError(f"{folder}: its index cannot be read ({error})") from error
