"""Derives how the arguments of calls are written, from calls that differ in these alone."""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from radixkv.tools.derivation.probes import NAMES, NESTED, NUMBERS, STRINGS, NotDerivableError, TemplateProbe
from radixkv.tools.derivation.segments import Segmenter
from radixkv.tools.formats.elements import KEY, ElementNotation, ValueFrame
from radixkv.tools.formats.notation import ArgumentNotation, JsonNotation

# What ends a string that stands as it is must be nothing that is often in one.
_ENDS_STRINGS = re.compile(r"\s*\S.*\S.*\S\s*", re.DOTALL)


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
        """Whether what follows the arguments tells that there are no more."""
        return False


class JsonArguments(WrittenArguments):
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
class ElementArguments(WrittenArguments):
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


def written_arguments(probe: TemplateProbe, segments: Segmenter) -> WrittenArguments:
    """How a template writes the arguments of calls.

    Raises:
        NotDerivableError: it writes no calls, or the arguments in some other way.
    """
    arguments = {**STRINGS, **NUMBERS}
    written = JsonArguments()
    try:
        written.find(_after_name(probe, arguments), 0, arguments)
    except NotDerivableError:
        return _element_arguments(probe, segments)
    return written


def _after_name(probe: TemplateProbe, arguments: Mapping[str, Any]) -> str:
    """What follows the name of a call with these arguments."""
    _, name, after = probe.answer("", [arguments]).rpartition(NAMES[0])
    if not name:
        raise NotDerivableError
    return after


def _element_arguments(probe: TemplateProbe, segments: Segmenter) -> ElementArguments:
    strings, numbers = (_Elements.of(probe, segments, values) for values in (STRINGS, NUMBERS))
    if (strings.first, strings.between, strings.rest) != (numbers.first, numbers.between, numbers.rest):
        raise NotDerivableError
    if not _ENDS_STRINGS.fullmatch(strings.frame.end) or not numbers.frame.end:
        raise NotDerivableError
    key_begin = segments.common_end(numbers.first, numbers.between)
    opening = numbers.first.removesuffix(key_begin)
    if _after_name(probe, {}).split() != f"{opening}{numbers.rest}".split():
        raise NotDerivableError
    separator = numbers.between.removesuffix(key_begin)
    elements = ElementNotation(key_begin, strings.frame, numbers.frame, separator, "")
    return ElementArguments(elements, _nested_as_json(probe, numbers.frame))


@dataclass(frozen=True)
class _Elements:
    """What is around arguments of one kind.

    Attributes:
        first: between the name and the first key.
        frame: around values.
        between: from there to the next key.
        rest: after the last value and the end of its frame.
    """

    first: str
    frame: ValueFrame
    between: str
    rest: str

    @classmethod
    def of(cls, probe: TemplateProbe, segments: Segmenter, arguments: Mapping[str, Any]) -> _Elements:
        before: list[str] = []
        rest = _after_name(probe, arguments)
        for place in itertools.chain.from_iterable(arguments.items()):
            part, found, rest = rest.partition(str(place))
            if not found:
                raise NotDerivableError
            before.append(part)
        first, begin, between, other_begin = before
        if begin != other_begin:
            raise NotDerivableError
        one, other = arguments
        between, rest = between.replace(one, KEY), rest.replace(other, KEY)
        end = segments.common_start(between, rest)
        return cls(first, ValueFrame(begin, end), between.removeprefix(end), rest.removeprefix(end))


def _nested_as_json(probe: TemplateProbe, frame: ValueFrame) -> Mapping[str, Any]:
    """The nested arguments; none where they are in Python's syntax, which does not say what the model writes."""
    ((key, nested),) = NESTED.items()
    _, _, written = _after_name(probe, NESTED).partition(f"{key}{frame.begin}")
    if written.startswith(str(nested)):
        return {}
    try:
        value, _ = json.JSONDecoder().raw_decode(written)
    except ValueError as error:
        raise NotDerivableError from error
    if value != nested:
        raise NotDerivableError
    return NESTED
