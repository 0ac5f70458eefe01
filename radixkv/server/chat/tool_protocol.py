"""Tools in requests and answers, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from radixkv.server.chat.prompt_caching import IgnoredCacheControl
from radixkv.server.strict import StrictModel

# Each is described in the prompt and is a branch of a grammar. That of 256 tools of a coding agent compiles in 0.2 s.
MAX_TOOLS = 256

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class FunctionDefinition(StrictModel):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments; None: it has none.
        strict: refuse a schema that cannot be enforced whole, rather than enforce what can be.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: IgnoredCacheControl | None = Field(default=None, exclude=True)


class NamedFunction(StrictModel):
    """A function by its name."""

    name: FunctionName


class NamedTool(StrictModel):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedToolSet(StrictModel):
    """Tools of the request by name, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)]


class AllowedTools(StrictModel):
    """The tools that may be called. The prompt describes all, so that it is in the cache whichever they are."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


ToolDefinitions = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def function_tool(**definition: Any) -> dict[str, Any]:
    """A `ToolDefinition` as it is sent, for a function with these fields; those that are None are left out."""
    fields = {name: value for name, value in definition.items() if value is not None}
    return {"type": "function", "function": fields}


def named_tool(name: str) -> dict[str, Any]:
    """A `NamedTool` as it is sent."""
    return {"type": "function", "function": {"name": name}}


class FunctionCall(StrictModel):
    """A function's name, and JSON text of its arguments."""

    name: str
    arguments: str


class AssistantToolCall(StrictModel):
    """A call within an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class EarlierFunctionCall(FunctionCall):
    """That of an earlier answer, with what clients add to it."""

    parsed_arguments: Any = Field(default=None, exclude=True)  # OpenAI's
    provider_specific_fields: Any = Field(default=None, exclude=True)  # LiteLLM's


class EarlierToolCall(AssistantToolCall):
    """A call of an earlier answer, as clients send it back."""

    index: int | None = None
    function: EarlierFunctionCall
    provider_specific_fields: Any = Field(default=None, exclude=True)
    extra_content: Any = Field(default=None, exclude=True)  # of Gemini's answers


class FunctionCallDelta(TypedDict, total=False):
    """The new part of a call; only its first one has the name."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    """The new part of a call; only its first one has the id and the type."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionCallDelta
