"""Derives the form of calls from the answers that a chat template writes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from radixkv.tools.derivation.notations import WrittenArguments, written_arguments
from radixkv.tools.derivation.probes import CALLS, IDS, NAMES, NUMBERS, TEXT, NotDerivableError, TemplateProbe
from radixkv.tools.derivation.reading import reads, without_beginning
from radixkv.tools.derivation.segments import Segmenter
from radixkv.tools.formats.derived import DerivedFormat
from radixkv.tools.formats.heads import ID, INDEX, NAME, CallHead

_PLACES = MappingProxyType({**dict.fromkeys(NAMES, NAME), **dict.fromkeys(IDS, ID)})
_PLACE = re.compile("|".join(_PLACES))
# Where no tag begins calls, what may. JSON, a call in Python's syntax and words may as well be the text of an answer.
_MARKED_WORDS = re.compile(r"(?=.*([<>|]|```))[^\s({\[\"'].{2}", re.DOTALL)
_DIFFICULT: Mapping[str, Any] = MappingProxyType({"key_a": 'Is "a < b"\n and \\ <b>{}</b> so?', **NUMBERS})


def derived_form(probe: TemplateProbe) -> DerivedFormat:
    """The form in which a template writes calls.

    Raises:
        NotDerivableError: it writes none, or not their results, or the parts of an answer cannot be told apart.
    """
    probe = probe.with_ids_that_name()
    segments = probe.segments
    arguments = written_arguments(probe)
    plain_begin, text, plain_end = probe.answer(TEXT).partition(TEXT)
    if not text:
        raise NotDerivableError
    calls = _Calls.of(probe, arguments)
    if calls.between and plain_end.strip() and plain_end.strip() in calls.between[0]:
        calls = replace(calls, between=())  # each call is an answer of its own
    first = _first(probe, calls, arguments)
    if segments.common_start(first, plain_end.lstrip()).strip():
        raise NotDerivableError  # the text of an answer is marked as well
    begin = _trigger(segments, first, f"{plain_begin}{plain_end}")
    end = _end(probe, calls, plain_end)
    following = _with_index(calls.between) if calls.between else None
    close = ""
    if arguments.needs_close:
        close = end if following is None else segments.common_start(following, end)
        if not close.strip():
            raise NotDerivableError
    first_head = _head(_numbered_like(first, following), begin)
    following_head = None if following is None else _head(following, close)
    if following_head is not None and following_head.named != first_head.named:
        raise NotDerivableError
    form = DerivedFormat(
        begin,
        first_head,
        following_head,
        end.removeprefix(close),
        arguments.notation(close),
        probe.added_tokens,
    )
    calls_read = [{**_DIFFICULT, **arguments.nested}, CALLS[1]]
    if not reads(form, probe, calls_read if form.parallel else calls_read[:1]) or not probe.writes_results():
        raise NotDerivableError
    return form


@dataclass(frozen=True)
class _Calls:
    """What is around the arguments of calls, with places in it.

    Attributes:
        before: the first.
        between: two of them.
        after: the last.
    """

    before: str
    between: Sequence[str]
    after: str

    @classmethod
    def of(cls, probe: TemplateProbe, arguments: WrittenArguments) -> _Calls:
        try:
            return cls._of(probe.answer("", CALLS), arguments, CALLS)
        except NotDerivableError:  # some take one call at most
            return cls._of(probe.answer("", CALLS[:1]), arguments, CALLS[:1])

    @classmethod
    def _of(cls, answer: str, arguments: WrittenArguments, calls: Sequence[Mapping[str, Any]]) -> _Calls:
        answer = _with_places(answer)
        around, end = [], 0
        for each in calls:
            begin, next_end = arguments.find(answer, answer.find(NAME, end), each)
            around.append(answer[end:begin])
            end = next_end
        if ID in answer[end:] or NAME in answer[end:]:
            raise NotDerivableError
        return cls(around[0], around[1:], answer[end:])


def _with_places(text: str) -> str:
    return _PLACE.sub(lambda found: _PLACES[found[0]], text)


def _first(probe: TemplateProbe, calls: _Calls, arguments: WrittenArguments) -> str:
    """What begins the first call: where it follows text, all that stands between them."""
    _, _, after = _with_places(probe.answer(TEXT, CALLS[:1])).partition(TEXT)
    if NAME in after:
        begin, _ = arguments.find(after, 0, CALLS[0])
        first = after[:begin].lstrip()
        if calls.before.endswith(first):
            return first
    # The text beside calls is left out, or is an answer of its own.
    return without_beginning(probe, calls.before).lstrip()


def _trigger(segments: Segmenter, first: str, plain: str) -> str:
    """What begins calls, and is not in an answer without any.

    It is as short as it can be: what the model writes after it is constrained, and what it writes in its place is not.
    """
    text = CallHead(first).before
    marker, *others = segments.split(text) or [""]
    if not segments.is_marker(marker):
        lines = itertools.accumulate(text.splitlines(keepends=True))
        found = next(filter(_MARKED_WORDS.match, lines), None)
        if found is None:
            raise NotDerivableError
        marker, others = found.rstrip(), []
    while marker in plain:
        if not others:
            raise NotDerivableError
        marker += others.pop(0)
    return marker


def _end(probe: TemplateProbe, calls: _Calls, plain_end: str) -> str:
    """What follows the arguments of the last call, without what ends an answer."""
    after = calls.after.rstrip()
    ends_answer = probe.segments.common_end(after, plain_end.rstrip()) or probe.end_of_text
    if (ends_answer and after.endswith(ends_answer)) or not plain_end.strip():
        return after.removesuffix(ends_answer).rstrip()
    if not calls.between:
        raise NotDerivableError
    # Calls end an answer in another way than text does.
    return probe.segments.common_start(after, calls.between[0]).rstrip()


def _with_index(between: Sequence[str]) -> str:
    """What stands between two calls, with a place for the number that differs."""
    split = [re.split(r"(\d+)", each) for each in between]
    parts = []
    for one, two in itertools.zip_longest(*split, fillvalue=""):
        if one.isdigit() and two.isdigit() and int(two) == int(one) + 1:
            parts.append(INDEX)
        elif one == two:
            parts.append(one)
        else:
            raise NotDerivableError
    return "".join(parts)


def _numbered_like(first: str, following: str | None) -> str:
    """What begins the first call, with a place for the number where the following have one."""
    if following is None or INDEX not in following:
        return first
    _, *parts = following.split(INDEX)
    numbered = "[0-9]+".join(["(.*[^0-9])?", *map(re.escape, parts)])
    found = re.fullmatch(numbered, first, re.DOTALL)
    if found is None:
        raise NotDerivableError
    return INDEX.join([found[1] or "", *parts])


def _head(text: str, without: str) -> CallHead:
    """A head without what it begins with."""
    if not CallHead(text).is_readable:
        raise NotDerivableError
    return CallHead(text.removeprefix(without))
