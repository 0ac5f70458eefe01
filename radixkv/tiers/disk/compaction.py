"""Makes a store smaller: the blocks that are kept move to its first slots, and the space of the others is given back."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import IndexedBlock, SlotIndex


def compact(
    index: SlotIndex,
    files: SlotFiles,
    rows: Sequence[IndexedBlock],
    kept: Sequence[IndexedBlock],
    most: int,
) -> list[IndexedBlock]:
    """Forget all blocks but some, and give back the space of all but the first slots.

    Args:
        index: of the store.
        files: of the store.
        rows: all its blocks.
        kept: those to keep, at most ``most``.
        most: slots that remain.

    Returns:
        ``kept``, in its order, where the blocks are now; without those that had to move and could not be read.

    Raises:
        OSError, sqlite3.Error: the disk fails.
    """
    holes = sorted(set(range(most)) - {row.slot for row in kept}, reverse=True)
    remaining: list[IndexedBlock] = []
    moved: list[IndexedBlock] = []
    for row in kept:
        if row.slot < most:
            remaining.append(row)
            continue
        record = memoryview(bytearray(files.slot_bytes))
        try:
            files.read(row.slot, [record])
        except OSError:
            continue
        moved.append(row._replace(slot=holes.pop()))  # a record does not depend on its slot
        remaining.append(moved[-1])
        files.write(moved[-1].slot, [record])
    gone = {row.slot for row in rows} - {row.slot for row in kept if row.slot < most}
    files.shrink(most)  # first: a full disk has no room for the index to change
    index.commit(moved, [], gone)
    return remaining
