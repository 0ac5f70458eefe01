"""Weights are moved into large pages while their addresses and values stay the same."""

from __future__ import annotations

import ctypes
import errno
import logging
import re
from types import SimpleNamespace

import pytest
import torch

from radixkv.model.weights import large_pages
from radixkv.model.weights.large_pages import LARGE_PAGE, collapse, large_pages_of, use_large_pages
from radixkv_cpu import PackedWeight, library

MIB = 1 << 20


@pytest.mark.parametrize(
    ("spans", "pages"),
    [
        ([], []),
        ([(2 * MIB, MIB - 1)], []),
        ([(2 * MIB, MIB)], [1]),
        # Only together do the two fill half of the page.
        ([(2 * MIB, MIB // 2), (3 * MIB, MIB // 2)], [1]),
        # From within one page into the third.
        ([(3 * MIB, 4 * MIB)], [1, 2, 3]),
        ([(3 * MIB + 1, 3 * MIB)], [2]),
    ],
)
def test_pages_are_taken_that_weights_fill_at_least_half(spans: list[tuple[int, int]], pages: list[int]) -> None:
    assert large_pages_of(spans) == [page * LARGE_PAGE for page in pages]


def test_a_page_that_is_refused_is_asked_for_in_time_and_the_others_go_on() -> None:
    calls: list[tuple[int, int, int]] = []

    def madvise(address: int, size: int, advice: int) -> int:
        calls.append((address, size, advice))
        return -1 if address == LARGE_PAGE else 0

    assert collapse([LARGE_PAGE, 3 * LARGE_PAGE], madvise) == 1
    assert calls == [(LARGE_PAGE, LARGE_PAGE, 25), (LARGE_PAGE, LARGE_PAGE, 14), (3 * LARGE_PAGE, LARGE_PAGE, 25)]


def test_memory_is_left_to_others_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step, which takes memory too, used to wait until all pages were large: it never got a turn between two."""
    now, pauses = [0.0], []
    monkeypatch.setattr(large_pages, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pauses.append))

    def madvise(address: int, size: int, advice: int) -> int:
        now[0] += 0.25
        return 0

    assert collapse([LARGE_PAGE, 3 * LARGE_PAGE], madvise) == 2
    assert pauses == [1.0, 1.0]


@pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")
def test_weights_stay_what_and_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(None, ctypes.c_size_t(0), 25) and ctypes.get_errno() == errno.EINVAL:
        pytest.skip("this system puts memory into large pages only in time")
    torch.manual_seed(0)
    weights = [PackedWeight([torch.randn(1024, 1024)]) for _ in range(4)]
    before, places = [w.panels.clone() for w in weights], [w.panels.data_ptr() for w in weights]
    with caplog.at_level(logging.INFO, "radixkv"):
        thread = use_large_pages(weights)
        assert thread is not None
        thread.join()
    # Of pages that the system makes large it may have none, and it may split them again at any time.
    assert re.search(r"\b[0-9]+ of [0-9]+ pages of 2 MiB hold weights", caplog.text)
    assert [w.panels.data_ptr() for w in weights] == places
    assert all(torch.equal(w.panels, panels) for w, panels in zip(weights, before, strict=True))


@pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")
def test_small_weights_take_no_thread() -> None:
    assert use_large_pages([PackedWeight([torch.randn(32, 32)])]) is None
