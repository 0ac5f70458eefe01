"""Conversations whose parts are known, as a chat template writes them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from radixkv.tools.derivation.segments import Segmenter

# What a template may raise where it does not take a conversation.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_QUESTION = "What is asked"
_RESULT = "What was returned"
TEXT = "A text beside it"
THOUGHT = "What was thought"
NAMES = ("probe_first", "probe_second", "probe_third")
# Nine letters and digits, which Mistral's templates demand.
IDS = ("idofcall1", "idofcall2", "idofcall3")
# Kimi K2's, whose template writes an id and no name.
_NUMBERED_NAMES = tuple(f"functions.{name}:{number}" for number, name in enumerate(NAMES))
# No value is part of another, or of a name.
STRINGS: Mapping[str, str] = MappingProxyType({"key_a": "a value", "key_b": "another value"})
NUMBERS: Mapping[str, int] = MappingProxyType({"key_c": 70571, "key_d": 80682})
NESTED: Mapping[str, Any] = MappingProxyType(
    {"key_e": {"text": "value within", "list": ["item"], "deep": {"number": 5}}}
)
# The arguments of answers with up to three calls.
CALLS: Sequence[Mapping[str, Any]] = tuple({"key_a": value} for value in ("a value", "another value", "one value more"))
_OBJECT = MappingProxyType(
    {
        "type": "object",
        "description": "d",
        "properties": {
            "text": {"type": "string"},
            "list": {"type": "array", "items": {"type": "string"}},
            "deep": {"type": "object", "properties": {"number": {"type": "integer"}}},
        },
    }
)
_PARAMETERS = MappingProxyType(
    {
        "type": "object",
        "properties": {
            **{key: {"type": "string", "description": "d"} for key in STRINGS},
            **{key: {"type": "integer", "description": "d"} for key in NUMBERS},
            **{key: dict(_OBJECT) for key in NESTED},
        },
        "required": list(STRINGS),
    }
)
TOOLS: Sequence[Mapping[str, Any]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": dict(_PARAMETERS),
        },
    }
    for name in NAMES
)


class NotDerivableError(Exception):
    """The template does not show how calls are written."""


class TemplateProbe:
    """Renders known conversations.

    Args:
        tokenizer: which has a chat template.

    Attributes:
        added_tokens: the texts that are tokens of their own.
        end_of_text: the token that ends an answer; empty: there is none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: Sequence[str] = IDS
        self._answers: dict[str, str] = {}
        self.added_tokens = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
        self.end_of_text: str = tokenizer.eos_token or ""

    @cached_property
    def segments(self) -> Segmenter:
        """Splits what the template writes of answers.

        Raises:
            NotDerivableError: the template refuses answers with text, or with a call.
        """
        answers = (self.answer(TEXT), self.answer("", CALLS[:1]))
        # Only those in an answer: some tokenizers have thousands.
        return Segmenter(token for token in self.added_tokens if any(token in answer for answer in answers))

    def takes_tools(self) -> bool:
        """Whether the template writes something for tools; not if it refuses a question with them."""
        return self._differ(_messages(["user"]), _messages(["user"]), TOOLS)

    def takes_system(self, roles: Sequence[str]) -> bool:
        """Whether it writes something for the system messages among messages of these roles; not if it refuses them."""
        return self._differ(_messages(roles), _messages(role for role in roles if role != "system"), None)

    def _differ(
        self, messages: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> bool:
        try:
            return self._render(messages, tools) != self._render(others, None)
        except NotDerivableError:
            return False

    def with_ids_that_name(self) -> TemplateProbe:
        """The same where a call is recognised by its name in the template; else one whose ids have the names in them."""
        written = self.answer("", CALLS[:1])
        if NAMES[0] in written or IDS[0] not in written:
            return self
        numbered = copy.copy(self)
        numbered._ids = _NUMBERED_NAMES
        return numbered

    def answer(self, text: str, calls: Sequence[Mapping[str, Any]] = (), thought: str = "") -> str:
        """What follows the user's question where the answer is this text, and calls with these arguments.

        The calls have the first of `NAMES`, and of `IDS` where the template writes the names.

        Args:
            thought: precedes them.

        Raises:
            NotDerivableError: the template refuses this conversation, or leaves out the question.
        """
        message = self._message(text, calls)
        if thought:
            message["reasoning_content"] = thought
        key = repr(message)
        if key not in self._answers:
            self._answers[key] = self._after_question([message], prompt=False)
        return self._answers[key]

    def writes_calls(self) -> bool:
        """Whether the template writes the calls of an answer; also if it refuses them."""
        try:
            written = self.answer("", CALLS[:1])
        except NotDerivableError:
            return True
        return any(part in written for part in (NAMES[0], *CALLS[0].values()))

    def writes_results(self) -> bool:
        """Whether the template writes the result of a call."""
        result = {"role": "tool", "tool_call_id": self._ids[0], "name": NAMES[0], "content": _RESULT}
        try:
            return _RESULT in self._after_question([self._message("", CALLS[:1]), result], prompt=True)
        except NotDerivableError:
            return False

    def _message(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in zip(self._ids, NAMES, calls, strict=False)
            ]
        return message

    def generation_prompt(self) -> str:
        """What follows the user's question where an answer is asked for.

        Raises:
            NotDerivableError: the template refuses a question with tools.
        """
        return self._after_question([], prompt=True)

    def _after_question(self, answer: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        rendered = self._render([{"role": "user", "content": _QUESTION}, *answer], TOOLS, prompt=prompt)
        _, question, after = rendered.rpartition(_QUESTION)
        if not question:
            raise NotDerivableError
        return after

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, prompt: bool = True
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    tokenize=False,
                    add_generation_prompt=prompt,
                )
            )
        except _REFUSALS as error:
            raise NotDerivableError from error


def _messages(roles: Iterable[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": "x"} for role in roles]
