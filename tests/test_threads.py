"""How threads call an event loop, which the program may close at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from radixkv.threads import call_in_loop


@pytest.fixture
def calls() -> list[str]:
    return []


def test_a_loop_calls_what_it_is_given_until_it_is_closed(calls: list[str]) -> None:
    loop = asyncio.new_event_loop()
    call_in_loop(loop, partial(calls.append, "before"))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    call_in_loop(loop, partial(calls.append, "after"))
    assert calls == ["before"]


def test_a_loop_may_close_while_it_is_being_called(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed after a look whether it was, it made the engine's thread raise, within a step."""
    loop = asyncio.new_event_loop()
    call_soon = loop.call_soon_threadsafe

    def close_first(function: Callable[[], object]) -> None:
        loop.close()
        call_soon(function)

    monkeypatch.setattr(loop, "call_soon_threadsafe", close_first)
    call_in_loop(loop, partial(calls.append, "after"))
    assert calls == []


def test_other_errors_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()

    def fail(function: Callable[[], object]) -> None:
        raise RuntimeError("another error")

    monkeypatch.setattr(loop, "call_soon_threadsafe", fail)
    with pytest.raises(RuntimeError, match="another error"):
        call_in_loop(loop, list)
    loop.close()
