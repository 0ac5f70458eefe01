"""Tools as a request describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

ToolMode = Literal["none", "auto", "required"]

# In some forms of calls, a name ends before one of these; the last stand for places in `radixkv.tools.formats.heads`.
_ENDS_OF_NAMES = re.compile(r"[\s<>\[\](){}\"\\\ue000-\ue003]")
# Optional keywords of the parameters' schema: their type, and its name in errors.
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
    chosen = _as_choice(choice)
    if not tools:
        if chosen.names is not None or chosen.mode == "required":
            raise ValueError(f"tool_choice: {choice!r:.80} needs tools, and there are none")
        return None
    names = list(tools) if chosen.names is None else chosen.names
    for name in names:
        if name not in tools:
            raise ValueError(f"tool_choice: there is no tool {name!r:.80}, only {', '.join(tools)}")
    callable_tools = {name: tools[name] for name in names}
    shown = [_shown(definition, tool) for definition, tool in zip(definitions or (), tools.values(), strict=True)]
    return ToolOptions(shown, callable_tools, chosen.mode, parallel is not False and chosen.may_be_parallel)


def _shown(definition: Mapping[str, Any], tool: Tool) -> Mapping[str, Any]:
    """A definition as chat templates take it: with what it may leave out, and without the marks of clients of caches."""
    shown = {key: value for key, value in definition.items() if key != "cache_control"}
    function = {key: value for key, value in shown["function"].items() if key != "cache_control"}
    return shown | {"function": function | {"description": tool.description or "", "parameters": tool.parameters}}


class _Choice(NamedTuple):
    mode: ToolMode
    names: list[str] | None = None  # None: all
    may_be_parallel: bool = True


def _as_choice(choice: str | Mapping[str, Any] | None) -> _Choice:
    match choice:
        case None:
            return _Choice("auto")
        case "none" | "auto" | "required":
            return _Choice(choice)
        case {"type": "allowed_tools", "allowed_tools": Mapping() as allowed}:
            match allowed:
                case {"mode": "auto" | "required" as mode, "tools": [_, *_] as given}:
                    names = [name for name in map(_named, given) if name is not None]
                    if len(names) == len(given):
                        return _Choice(mode, names)
            raise ValueError(
                f"tool_choice: expected a mode, auto or required, and functions by name, got {allowed!r:.200}"
            )
    name = _named(choice)
    if name is None:
        raise ValueError(
            "tool_choice: expected none, auto, required, a function, as {'type': 'function', 'function': {'name': ...}}, or "
            f"allowed_tools, got {choice!r:.80}"
        )
    return _Choice("required", [name], may_be_parallel=False)


def _named(choice: Any) -> str | None:
    """The name in a choice of one function; None: it is some other choice."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


def _as_tool(definition: Any) -> Tool:
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if not isinstance(function, Mapping) or definition.get("type") != "function":
        raise ValueError(f"tools: expected {{'type': 'function', 'function': {{...}}}}, got {definition!r:.80}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise ValueError(f"tools: expected a function with a name, got {function!r:.80}")
    if _ENDS_OF_NAMES.search(name):
        raise ValueError(
            f"tools: expected a name without white space, brackets, quotes and backslashes, got {name!r:.80}"
        )
    if not isinstance(parameters, Mapping | None):
        raise ValueError(f"tools: expected the parameters of {name!r:.80} to be a JSON schema, got {parameters!r:.80}")
    # Null, which some clients send for what they leave out, says nothing.
    schema = {key: value for key, value in (parameters or {}).items() if key not in _OPTIONAL or value is not None}
    # After what is given, which templates write in the client's order.
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
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
