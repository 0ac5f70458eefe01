"""Tools as a request describes them, and answers that call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from radixkv.tools.pieces import AnswerPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin

ToolMode = Literal["none", "auto", "required"]

# Of the parameters' schema: what each is, for Python and for errors.
_OPTIONAL: Mapping[str, tuple[type, str]] = MappingProxyType(
    {"properties": (Mapping, "an object"), "required": (list, "a list")}
)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: refuse a schema that cannot be fully enforced, rather than enforce a part of it.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True)
class ToolOptions:
    """Which tools there are, and which of them the answer may or must call.

    Attributes:
        definitions: all tools in OpenAI's form, as chat templates take them.
        tools: those that may be called, by name.
        mode: "none": nothing may be called; "required": the answer is a call.
        parallel: whether an answer may hold several calls.
    """

    definitions: Sequence[Mapping[str, Any]]
    tools: Mapping[str, Tool]
    mode: ToolMode
    parallel: bool


def as_tool_options(
    definitions: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolOptions | None:
    """The options for a request's tools and its choice of them.

    Args:
        definitions: in OpenAI's form: ``{"type": "function", "function": {"name", "description", "parameters", "strict"}}``.
        choice: "none", "auto" (the default), "required", ``{"type": "function", "function": {"name"}}``: that tool, or
            ``{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}``: only those tools,
            each named in the same way.
        parallel: False: at most one call; otherwise any number, except that only one is allowed if ``choice`` names one tool.

    Returns:
        None: there are no tools.

    Raises:
        TypeError: ``parallel`` or a tool's ``strict`` is neither a boolean nor None.
        ValueError: a tool is malformed, two have one name, or ``choice`` is impossible.
    """
    if not isinstance(parallel, bool | None):
        raise TypeError(f"parallel_tool_calls: expected a boolean or None, got {parallel!r:.80}")
    if not isinstance(definitions, Sequence | None) or isinstance(definitions, str):
        raise ValueError(f"tools: expected a list, got {definitions!r:.80}")
    tools: dict[str, Tool] = {}
    for definition in definitions or ():
        tool = _as_tool(definition)
        if tool.name in tools:
            raise ValueError(f"tools: expected different names, got {tool.name!r} twice")
        tools[tool.name] = tool
    some = _some(choice)
    if some is None and choice not in (None, "none", "auto", "required"):
        raise ValueError(
            f"tool_choice: expected none, auto, required, a function by its name or allowed_tools, got {choice!r:.80}"
        )
    if not tools:
        if some is not None or choice == "required":
            raise ValueError(f"tool_choice: {choice!r:.80} needs tools, and there are none")
        return None
    if some is None:
        mode: ToolMode = "none" if choice == "none" else "required" if choice == "required" else "auto"
        return ToolOptions(definitions or (), tools, mode, parallel is not False)
    for name in some.names:
        if name not in tools:
            raise ValueError(f"tool_choice: there is no tool {name!r:.80}, only {', '.join(tools)}")
    chosen = {name: tools[name] for name in some.names}
    return ToolOptions(definitions or (), chosen, some.mode, parallel is not False and some.may_be_parallel)


def _named(choice: str | Mapping[str, Any] | None) -> str | None:
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if choice.get("type") == "function" and isinstance(name, str) else None


class _SomeTools(NamedTuple):
    mode: ToolMode
    names: list[str]
    may_be_parallel: bool


def _some(choice: str | Mapping[str, Any] | None) -> _SomeTools | None:
    """A choice of one tool by its name, or among some of them; None: it is some other choice."""
    named = _named(choice)
    if named is not None:
        return _SomeTools("required", [named], may_be_parallel=False)
    allowed = (
        choice.get("allowed_tools") if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools" else None
    )
    if not isinstance(allowed, Mapping):
        return None
    mode, given = allowed.get("mode"), allowed.get("tools")
    names = [_named(each) for each in given] if isinstance(given, Sequence) else []
    known = [name for name in names if name is not None]
    if mode not in ("auto", "required") or not known or len(known) < len(names):
        raise ValueError(f"tool_choice: expected a mode, auto or required, and functions by name, got {allowed!r:.200}")
    return _SomeTools(mode, known, may_be_parallel=True)


def _as_tool(definition: Any) -> Tool:
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if not isinstance(function, Mapping) or definition.get("type") != "function":
        raise ValueError(f"tools: expected {{'type': 'function', 'function': {{...}}}}, got {definition!r:.80}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ValueError(f"tools: expected a function with a name, got {function!r:.80}")
    if not isinstance(parameters, Mapping | None):
        raise ValueError(f"tools: expected the parameters of {name!r:.80} to be a JSON schema, got {parameters!r:.80}")
    # Null, which some clients send for what they leave out, says nothing.
    given = {key: value for key, value in (parameters or {}).items() if key not in _OPTIONAL or value is not None}
    schema = {"type": "object", "properties": {}, **given}
    if schema["type"] != "object":
        raise ValueError(f"tools: expected the parameters of {name!r:.80} to be an object, got {schema['type']!r:.80}")
    for key, (kind, what) in _OPTIONAL.items():
        if key in schema and not isinstance(schema[key], kind):
            raise ValueError(
                f"tools: expected {key} of the parameters of {name!r:.80} to be {what}, got {schema[key]!r:.80}"
            )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise TypeError(f"tools: expected strict of {name!r:.80} to be a boolean or None, got {strict!r:.80}")
    return Tool(name, function.get("description"), schema, strict is True)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: names the call in the message with its result.
        arguments: JSON text of an object.
    """

    id: str
    name: str
    arguments: str


@dataclass
class ParsedAnswer:
    """The parts of a whole answer.

    Attributes:
        text: what is neither reasoning nor a call.
        reasoning: what the model thought before it answered; None: there is none.
    """

    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[AnswerPiece]) -> ParsedAnswer:
        """The answer that consists of these pieces."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[tuple[ToolCallBegin, list[str]]] = []
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    texts.append(text)
                case ReasoningPiece(text):
                    thoughts.append(text)
                case ToolCallBegin():
                    calls.append((piece, []))
                case ToolCallArguments(index, text):
                    calls[index][1].append(text)
        return cls(
            text="".join(texts),
            reasoning="".join(thoughts) if thoughts else None,
            tool_calls=[ToolCall(call.id, call.name, "".join(arguments)) for call, arguments in calls],
        )

    def as_message(self) -> dict[str, Any]:
        """The answer as a message of a conversation, in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
