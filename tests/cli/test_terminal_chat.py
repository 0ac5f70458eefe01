"""What a conversation in the terminal prints."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from radixkv.cli.terminal_chat import run_chat


class Answers:
    """A chat in which each turn has the next of these answers, or fails with the next of these errors."""

    def __init__(self, *answers: list[str] | ValueError) -> None:
        metrics = SimpleNamespace(first_token_time=1.0, finished_time=2.0)
        self.last_output = SimpleNamespace(metrics=metrics, prompt_token_ids=[1, 2], num_cached_tokens=0)
        self.last_num_tokens = 2
        self._answers = list(answers)

    def stream(self, text: str) -> Iterator[str]:
        answer = self._answers.pop(0)
        if isinstance(answer, ValueError):
            raise answer
        return iter(answer)


def printed(chat: Any, monkeypatch: pytest.MonkeyPatch, turns: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(turns))
    file = io.StringIO()
    run_chat(chat, Console(file=file, width=20))
    return file.getvalue()


def test_an_answer_is_printed_as_the_model_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``:smile:`` became a picture."""
    pieces = ["a :smile: in [bold]x[/bold], ", "a line that is longer than the terminal is wide\n", "[/] end"]
    assert printed(Answers(pieces), monkeypatch, "Hello\n").startswith("".join(pieces) + "\n2 prompt tokens")


def test_an_error_is_printed_as_it_is_and_the_conversation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stood in brackets was taken for markup, which ended the program where it was no valid one."""
    chat = Answers(ValueError("expected [/x], got [bold] :smile:"), ["yes"])
    assert printed(chat, monkeypatch, "Hello\nHello\n").startswith("expected [/x], got [bold] :smile:\nyes\n2 prompt")
