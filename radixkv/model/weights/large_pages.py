"""Packed weights in large pages, so that reading them takes fewer translations of addresses.

A step reads all weights once, and in pages of 4 KiB they are more pages than a processor keeps translations of
(docs/benchmarks/cpu.md has the figures). Steps of many rows, which read a weight many times from a cache, gain nothing; nor
do keys and values.

Memory is put into large pages where it lies, while it is in use, by a thread of its own, which pauses most of the time: a
system hands out no memory while it makes a page large, and the first tokens would wait for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from radixkv.memory.pages import madvise
from radixkv_cpu import Weight

LARGE_PAGE = 2 << 20
# Linux 6.1 or later puts memory into large pages at once, by the second advice; older ones do so later, by the first.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25

# Memory cannot be taken from the system while a page becomes large: for each second of that, so many are left to others.
_PAUSE = 4

_log = logging.getLogger(__name__)


def large_pages_of(spans: Iterable[tuple[int, int]]) -> list[int]:
    """The addresses of large pages at least half of which some spans of memory fill, in order.

    Args:
        spans: address and bytes of each, none of which overlap.
    """
    num_bytes: Counter[int] = Counter()
    for start, size in spans:
        stop = start + size
        for page in range(start // LARGE_PAGE * LARGE_PAGE, stop, LARGE_PAGE):
            num_bytes[page] += min(stop, page + LARGE_PAGE) - max(start, page)
    return sorted(page for page, filled in num_bytes.items() if 2 * filled >= LARGE_PAGE)


def collapse(pages: Iterable[int], madvise: Callable[[int, int, int], int] = madvise) -> int:
    """Put memory into large pages, or have the system do it in time; what is in it stays, and may be read meanwhile.

    Args:
        pages: addresses of large pages. What is no longer there, or no memory of the process alone, is left as it is.
        madvise: as `radixkv.memory.pages.madvise`.

    Returns:
        How many pages are large now.
    """
    num_collapsed = 0
    for page in pages:
        began = time.monotonic()
        if not madvise(page, LARGE_PAGE, _MADV_COLLAPSE):
            num_collapsed += 1
        else:
            madvise(page, LARGE_PAGE, _MADV_HUGEPAGE)
        time.sleep(_PAUSE * (time.monotonic() - began))
    return num_collapsed


def use_large_pages(weights: Iterable[Weight]) -> threading.Thread | None:
    """Begin to put packed weights into large pages.

    Args:
        weights: of a model, each once, where they will stay.

    Returns:
        The thread that does it; None: they are too small.
    """
    pages = large_pages_of((weight.panels.data_ptr(), weight.nbytes) for weight in weights)
    if not pages:
        return None

    def run() -> None:
        num_collapsed = collapse(pages)
        _log.info("%d of %d pages of %d MiB hold weights", num_collapsed, len(pages), LARGE_PAGE >> 20)

    thread = threading.Thread(target=run, name="radixkv-large-pages", daemon=True)
    thread.start()
    return thread
