"""The text of an answer as a parser reads it: incrementally, whatever its pieces.

A parser is a generator. It yields the pieces of the answer, and None where it cannot go on without more text::

    def parse(source):
        while (yield from text_until(source, ("<tool_call>",))):
            yield from json_call(source)

The result must not depend on how the text is cut: a parser decides only what no later text can change.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeVar

from radixkv.tools.definitions import Tool
from radixkv.tools.pieces import AnswerPiece, ReasoningPiece, TextPiece, ToolCallBegin

_T = TypeVar("_T")
Parsing = Generator[AnswerPiece | None, None, _T]

WHITESPACE = " \t\r\n"


class MalformedCallError(Exception):
    """Text that looked like a call is not one."""


def new_call_id() -> str:
    """An id in the form of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


class AnswerSource:
    """Text that was generated and is not parsed yet.

    Its length and characters are those of the text. Taking a part does not copy the rest, for an answer may arrive whole,
    with thousands of calls.

    Args:
        tools: those that may be called, by name.
        new_id: makes the ids of calls.
        calls_required: whether the answer holds calls and no text.
        continues: whether the text goes on with a message that has begun.

    Attributes:
        ended: whether no more follows.
        num_calls: that have begun.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        new_id: Callable[[], str] = new_call_id,
        *,
        calls_required: bool = False,
        continues: bool = False,
    ) -> None:
        self.tools = tools
        self.ended = False
        self.calls_required = calls_required
        self.continues = continues
        self.num_calls = 0
        self._new_id = new_id
        self._text = ""
        self._start = 0  # of what is not parsed yet, within the text
        self._num_fed = 0
        self._taken: list[str] = []

    @property
    def cut_in_calls(self) -> bool:
        """Whether the answer has ended where only calls could follow; text still held back is then part of their syntax."""
        return self.ended and (self.calls_required or self.num_calls > 0)

    def __len__(self) -> int:
        return len(self._text) - self._start

    def __iter__(self) -> Iterator[str]:
        return map(self._text.__getitem__, range(self._start, len(self._text)))

    @property
    def num_taken(self) -> int:
        """How many characters of the answer have been parsed."""
        return self._num_fed - len(self)

    def feed(self, text: str) -> None:
        """More was generated."""
        self._num_fed += len(text)
        self._text, self._start = self._text[self._start :] + text, 0

    def peek(self, length: int) -> str:
        """The first characters, or all if there are fewer."""
        return self._text[self._start : self._start + length]

    def peek_from(self, begin: int) -> str:
        """All but the first ``begin`` characters."""
        return self._text[self._start + begin :]

    def find(self, pattern: re.Pattern[str], begin: int) -> tuple[int, str] | None:
        """How many characters are before the first match, and the match; None: there is none.

        Args:
            pattern: what to find.
            begin: how many characters are skipped, because no match begins there.
        """
        found = pattern.search(self._text, self._start + begin)
        return None if found is None else (found.start() - self._start, found[0])

    def take(self, length: int) -> str:
        """Remove and return the first characters."""
        text = self.peek(length)
        self._start += len(text)
        self._taken.append(text)
        return text

    def mark(self) -> None:
        """Begin to remember what is taken, for `since_mark`."""
        self._taken = []

    def since_mark(self) -> str:
        """All that was taken since the mark."""
        return "".join(self._taken)

    def back_to_mark(self) -> None:
        """Put back all that was taken since the mark."""
        self._text, self._start = self.since_mark() + self._text[self._start :], 0
        self._taken = []

    def begin_call(self, name: object, call_id: str | None = None) -> ToolCallBegin:
        """The next call.

        Args:
            call_id: the id that the model wrote; None: it wrote none.

        Raises:
            MalformedCallError: there is no such tool.
        """
        if not isinstance(name, str) or name not in self.tools:
            raise MalformedCallError
        self.num_calls += 1
        return ToolCallBegin(self.num_calls - 1, call_id or self._new_id(), name)


def more(source: AnswerSource) -> Parsing[bool]:
    """Wait for more text; False: there is none."""
    if source.ended:
        return False
    yield None
    return True


def skip_whitespace(source: AnswerSource) -> Parsing[None]:
    """Take whitespace up to something else, or the end."""
    while True:
        source.take(sum(1 for _ in itertools.takewhile(WHITESPACE.__contains__, source)))
        if source or not (yield from more(source)):
            return


def follows(source: AnswerSource, text: str) -> Parsing[bool]:
    """Whether what is left begins with ``text``."""
    while len(source) < len(text) and text.startswith(source.peek(len(text))):
        if not (yield from more(source)):
            return False
    return source.peek(len(text)) == text


def accept(source: AnswerSource, text: str) -> Parsing[bool]:
    """Take ``text`` if what is left begins with it, and return whether it does."""
    if not (yield from follows(source, text)):
        return False
    source.take(len(text))
    return True


def expect(source: AnswerSource, text: str) -> Parsing[None]:
    """Take ``text``, with which what is left must begin.

    Raises:
        MalformedCallError: something else follows.
    """
    if not (yield from accept(source, text)):
        raise MalformedCallError


def text_until(
    source: AnswerSource, markers: Sequence[str], piece: type[TextPiece] | type[ReasoningPiece] = TextPiece
) -> Parsing[str | None]:
    """Yield text up to one of the markers, without whitespace before it, and take the marker.

    The rest of an answer that was cut off within its calls is not text, and is dropped.

    Returns:
        The marker; None: the text ended.
    """
    pattern, searched, longest = _any_of(markers), 0, max(map(len, markers), default=0)
    # White space at the beginning is text unless a marker follows, and may go on for long.
    num_blank = 0
    while True:
        found = source.find(pattern, searched)
        if found is not None:
            position, marker = found
            length = len(source.peek(position).rstrip(WHITESPACE))
            if length:
                yield piece(source.take(length))
            source.take(position - length)
            source.mark()
            source.take(len(marker))
            return marker
        if source.cut_in_calls and piece is TextPiece:
            source.take(len(source))
        length = len(source)
        if not source.ended and markers:
            begin = max(0, num_blank - longest)  # a marker may have begun in it
            text = source.peek_from(begin)
            before = text[: _marker_start(text, markers)]
            kept = before.rstrip(WHITESPACE)
            length = begin + len(kept) if kept else 0
            num_blank = begin + len(before) - length
        if length:
            yield piece(source.take(length))
        searched = _searched(source, markers)
        if not (yield from more(source)):
            return None


def collect_until(source: AnswerSource, markers: Sequence[str]) -> Parsing[tuple[str, str]]:
    """The text up to one of the markers, and the marker, which is taken.

    Raises:
        MalformedCallError: the text ends without one.
    """
    pattern, searched = _any_of(markers), 0
    while True:
        found = source.find(pattern, searched)
        if found is not None:
            position, marker = found
            text = source.take(position)
            source.take(len(marker))
            return text, marker
        searched = _searched(source, markers)
        if not (yield from more(source)):
            source.take(len(source))
            raise MalformedCallError


def _any_of(markers: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the markers, of two that begin alike the shorter one; nothing if there are none.

    Not `str.find` for each: one that is nowhere would be looked for in all of the text.
    """
    return re.compile("|".join(map(re.escape, sorted(markers))) or "(?!)")


def _searched(source: AnswerSource, markers: Sequence[str]) -> int:
    """At how many of the characters none of the markers begins, whatever follows, if there is none in the text."""
    return max(0, len(source) - max(map(len, markers), default=0))


def _marker_start(text: str, markers: Sequence[str]) -> int:
    """Where the end of a text may be the beginning of a marker; its length, if it is not."""
    end = len(text)
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:length]):
                end = min(end, len(text) - length)
                break
    return end
