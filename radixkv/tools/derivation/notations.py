"""Derives how the arguments of calls are written, from calls that differ in these alone."""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixkv.tools.derivation.probes import NAMES, NESTED, NUMBERS, STRINGS, NotDerivableError, TemplateProbe
from radixkv.tools.derivation.segments import Segmenter
from radixkv.tools.formats.element_syntax import KEY, Members, Nested, ValueFrame, ValueFrames
from radixkv.tools.formats.elements import ElementNotation, write_members
from radixkv.tools.formats.notation import ArgumentNotation, JsonNotation

# What ends a string that stands as it is must be nothing that is often in one.
_ENDS_STRINGS = re.compile(r"\s*\S.*\S.*\S\s*", re.DOTALL)

# What may follow a number that nothing else ends.
_AFTER_SCALARS = (",", "}", "]")


class WrittenArguments(ABC):
    """Where arguments stand in what a template writes.

    Attributes:
        nested: arguments with lists and objects, if these are written as JSON; else none.
    """

    nested: Mapping[str, Any]

    @abstractmethod
    def find(self, text: str, begin: int, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """Where the arguments begin and end in a text, after ``begin``.

        Raises:
            NotDerivableError: they are not there.
        """

    @abstractmethod
    def notation(self, close: str) -> ArgumentNotation:
        """The notation, if this text follows the arguments of every call."""

    @property
    def needs_close(self) -> bool:
        """Whether the end of the arguments is known only from what follows them."""
        return False


class _JsonArguments(WrittenArguments):
    """One JSON object, however it is spaced."""

    nested = NESTED

    def find(self, text: str, begin: int, arguments: Mapping[str, Any]) -> tuple[int, int]:
        decoder = json.JSONDecoder()
        for brace in re.finditer(r"\{", text[begin:]):
            start = begin + brace.start()
            try:
                value, end = decoder.raw_decode(text, start)
            except ValueError:
                continue
            if value == arguments:
                return start, end
        raise NotDerivableError

    def notation(self, close: str) -> ArgumentNotation:
        return JsonNotation()


@dataclass(frozen=True)
class _ElementArguments(WrittenArguments):
    """A key and a value for each argument."""

    elements: ElementNotation
    nested: Mapping[str, Any]

    @property
    def needs_close(self) -> bool:
        return True

    def find(self, text: str, begin: int, arguments: Mapping[str, Any]) -> tuple[int, int]:
        written = self.elements.write(arguments)
        start = text.find(written, begin)
        if start < 0:
            raise NotDerivableError
        return start, start + len(written)

    def notation(self, close: str) -> ArgumentNotation:
        return replace(self.elements, close=close)


def written_arguments(probe: TemplateProbe) -> WrittenArguments:
    """How a template writes the arguments of calls.

    Raises:
        NotDerivableError: it writes no calls, or the arguments in some other way.
    """
    arguments = {**STRINGS, **NUMBERS}
    written = _JsonArguments()
    try:
        written.find(_after_name(probe, arguments), 0, arguments)
    except NotDerivableError:
        return _element_arguments(probe)
    return written


def _after_name(probe: TemplateProbe, arguments: Mapping[str, Any]) -> str:
    """What follows the name of a call with these arguments."""
    _, name, after = probe.answer("", [arguments]).rpartition(NAMES[0])
    if not name:
        raise NotDerivableError
    return after


def _element_arguments(probe: TemplateProbe) -> _ElementArguments:
    strings, numbers = (_Elements.of_arguments(probe, each) for each in (STRINGS, NUMBERS))
    frames = _frames(strings, numbers)
    if strings.begin != numbers.begin:
        raise NotDerivableError
    if _after_name(probe, {}).split() != f"{numbers.opening}{numbers.rest}".split():
        raise NotDerivableError
    members = Members(numbers.begin, frames, numbers.separator)
    nested, is_json = _nested(probe, members, numbers)
    return _ElementArguments(ElementNotation(replace(members, nested=nested), ""), NESTED if is_json else {})


@dataclass(frozen=True)
class _Elements:
    """What is around elements of one kind: the members of an object, or the items of a list.

    Attributes:
        opening: before the first element.
        begin: begins each element.
        frame: around the value.
        separator: between two elements.
        rest: after the last element.
    """

    opening: str
    begin: str
    frame: ValueFrame
    separator: str
    rest: str

    @classmethod
    def of(cls, segments: Segmenter, first: str, between: str, rest: str, value_begin: str = "") -> _Elements:
        """From the texts before the first element, between two and after the second."""
        begin = segments.common_end(first, between)
        between = between.removesuffix(begin)
        end = segments.common_start(between, rest)
        frame = ValueFrame(value_begin, end)
        return cls(first.removesuffix(begin), begin, frame, between.removeprefix(end), rest.removeprefix(end))

    @classmethod
    def of_arguments(cls, probe: TemplateProbe, arguments: Mapping[str, Any]) -> _Elements:
        places = [str(place) for place in itertools.chain.from_iterable(arguments.items())]
        first, begin, between, other_begin, rest = _split(_after_name(probe, arguments), places)
        if begin != other_begin:
            raise NotDerivableError
        one, other = arguments
        return cls.of(probe.segments, first, between.replace(one, KEY), rest.replace(other, KEY), begin)

    @classmethod
    def of_items(cls, segments: Segmenter, text: str, items: Iterable[Any]) -> _Elements:
        elements = cls.of(segments, *_split(text, [str(item) for item in items]))
        return replace(elements, frame=ValueFrame(elements.begin, elements.frame.end))


def _split(text: str, places: Sequence[str]) -> list[str]:
    """The texts around places that follow each other."""
    parts = []
    for place in places:
        part, found, text = text.partition(place)
        if not found:
            raise NotDerivableError
        parts.append(part)
    return [*parts, text]


def _frames(strings: _Elements, numbers: _Elements) -> ValueFrames:
    if (strings.opening, strings.separator, strings.rest) != (numbers.opening, numbers.separator, numbers.rest):
        raise NotDerivableError
    if not _ENDS_STRINGS.fullmatch(strings.frame.end):
        raise NotDerivableError
    return ValueFrames(strings.frame, numbers.frame)


def _nested(probe: TemplateProbe, members: Members, numbers: _Elements) -> tuple[Nested | None, bool]:
    """How lists and objects are written, None: as JSON, and whether the template writes them like that.

    Those in Python's syntax do not say what the model writes, which is then JSON.
    """
    ((key, value),) = NESTED.items()
    frame = members.values.others

    def written(value: Any) -> str:
        before = f"{numbers.opening}{members.key_begin}{key}{frame.begin}"
        after = f"{frame.end}{numbers.rest}".replace(KEY, key)
        text = _after_name(probe, {key: value})
        if not text.startswith(before) or not text.endswith(after):
            raise NotDerivableError
        return text[len(before) : len(text) - len(after)]

    text = written(value)
    try:
        is_json = json.loads(text) == value
    except ValueError:
        is_json = False
    if frame.end and (is_json or text == str(value)):
        return None, is_json
    if is_json:
        raise NotDerivableError
    of_members = write_members(members, {**STRINGS, **NUMBERS})
    object_open, object_close = _split(written({**STRINGS, **NUMBERS}), [of_members])
    of_strings, of_numbers = (
        _Elements.of_items(probe.segments, written(list(each.values())), each.values()) for each in (STRINGS, NUMBERS)
    )
    items = _frames(of_strings, of_numbers)
    after_scalars = (members.separator, object_close, of_numbers.separator, of_numbers.rest, numbers.rest)
    if not (frame.end and items.others.end) and not all(text[:1] in _AFTER_SCALARS for text in after_scalars):
        raise NotDerivableError
    nested = Nested(object_open, object_close, of_numbers.opening, of_numbers.rest, items, of_numbers.separator)
    return nested, True
