"""Answers in every form of calls: how they are written and read, and what their grammar allows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import llguidance
import llguidance.hf
from support.chat_templates import DERIVED, TEMPLATES, make_tokenizer

from radixkv.sampling.grammar.answer_frames import frame_text, framed
from radixkv.tools.chat_format import CALL_FORMATS, AnswerForm, ChatFormat
from radixkv.tools.definitions import ToolOptions, as_tool_options
from radixkv.tools.formats.base import CallFormat
from radixkv.tools.pieces import ParsedAnswer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'S\u00e3o "Paulo" {', "days": 3, "unit": "c"}),
    ("get_weather", {"city": "Rome\nItaly"}),
]
FORMS = [*CALL_FORMATS, *DERIVED]


@cache
def calls_of(name: str) -> CallFormat:
    """The form of calls of a template."""
    return ChatFormat.of(make_tokenizer(TEMPLATES[name])).calls


def allowed(*names: str, mode: str = "required") -> dict[str, Any]:
    """A choice of some tools, by their names."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def options(choice: Any = "auto", parallel: bool = True, tools: Sequence[Any] = (WEATHER, NOW)) -> ToolOptions:
    made = as_tool_options(tools, choice, parallel)
    assert made is not None
    return made


def form_of(
    name: str,
    choice: Any = "auto",
    *,
    parallel: bool = True,
    markers: bool = False,
    prompt: str = "",
    tools: Sequence[Any] = (WEATHER, NOW),
) -> AnswerForm:
    tokenizer = make_tokenizer(TEMPLATES[name], with_markers=markers)
    form = ChatFormat.of(tokenizer).answer_form(prompt, options(choice, parallel, tools))
    assert form is not None
    return form


def read(form: AnswerForm, pieces: Iterable[str]) -> ParsedAnswer:
    parser = form.parser()
    read = [*itertools.chain.from_iterable(parser.feed(piece) for piece in pieces), *parser.finish()]
    return ParsedAnswer.of(piece for piece, _ in read)


def functions(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


def written(name: str) -> str:
    """An answer with text, as far as the form allows it, and calls."""
    form = calls_of(name)
    if name == "harmony":
        thought = "<|channel|>analysis<|message|>They want < weather.<|end|><|start|>assistant"
        return f"{thought}{form.write_calls(CALLS[:1])}"
    text = "I will look. <tool" if form.trigger else ""
    return f"{text}\n{form.write_calls(CALLS)}" if text else form.write_calls(CALLS)


class Grammar:
    """What a form allows, for a tokenizer."""

    def __init__(self, form: AnswerForm, tokenizer: Any, content: str | None = None) -> None:
        frame = form.frame(content_is_constrained=content is not None)
        assert frame is not None
        self._tokenizer = tokenizer
        vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
        self._matcher = llguidance.LLMatcher(vocabulary, framed(frame_text(frame), content or ""), log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, text: str) -> bool:
        """Whether a text is a whole answer."""
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def begins(self, text: str) -> bool:
        """Whether a text may be the beginning of an answer."""
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and not matcher.is_error()


def required_call(name: str, *tools: Any, markers: bool = True) -> tuple[AnswerForm, Grammar]:
    """The form of answers that call one of these tools, and what it allows."""
    form = form_of(name, "required", markers=markers, tools=tools)
    return form, Grammar(form, make_tokenizer(TEMPLATES[name], with_markers=markers))
