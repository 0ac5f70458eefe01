"""When reading a shared prefix once pays on a CPU with compiled code."""

from __future__ import annotations

from radixkv.attention.plan import SharingRule

# A shared prefix saves reading (sequences - 1) x tokens; merging its result costs as much as reading a few dozen tokens.
MIN_SAVED_TOKENS = 64


def sharing_rule(max_sequences: int) -> SharingRule:
    """A prefix is attended once for all sequences that share it where that saves `MIN_SAVED_TOKENS`."""
    return SharingRule((0, 0, *(-(-MIN_SAVED_TOKENS // (count - 1)) for count in range(2, max_sequences + 1))))
