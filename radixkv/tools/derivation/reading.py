"""Whether a form of calls is that of a chat template: it reads the calls that the template writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.tools.definitions import as_tool_options
from radixkv.tools.derivation.probes import NAMES, NUMBERS, STRINGS, TEXT, TOOLS, NotDerivableError, TemplateProbe
from radixkv.tools.formats.base import CallFormat
from radixkv.tools.pieces import ParsedAnswer
from radixkv.tools.source import AnswerSource


def without_beginning(probe: TemplateProbe, answer: str) -> str:
    """What a template writes of an answer, without what begins any answer.

    Raises:
        NotDerivableError: the template refuses plain answers.
    """
    of_text, _, _ = probe.answer(TEXT).partition(TEXT)
    beginnings = (probe.segments.common_start(each, answer) for each in (of_text, probe.generation_prompt()))
    return answer.removeprefix(max(beginnings, key=len))


def may_be_form_of(form: CallFormat, probe: TemplateProbe) -> bool:
    """Whether a form reads a call as the template writes it, or the template writes none."""
    call = {**STRINGS, **NUMBERS}
    try:
        return NAMES[0] not in probe.answer("", [call]) or reads(form, probe, [call])
    except NotDerivableError:
        return True


def reads(form: CallFormat, probe: TemplateProbe, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a form reads calls with these arguments as the template writes them.

    Raises:
        NotDerivableError: the template refuses such an answer.
    """
    options = as_tool_options(TOOLS, None, None)
    assert options is not None
    source = AnswerSource(options.tools)
    source.feed(without_beginning(probe, probe.answer("", calls)))
    source.ended = True
    answer = ParsedAnswer.of(piece for piece in form.parse(source) if piece is not None)
    try:
        read = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    except ValueError:
        return False
    return read == list(zip(NAMES, calls, strict=False))
