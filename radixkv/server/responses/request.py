"""The body of `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from radixkv.server.chat.prompt_caching import PromptCacheOptions
from radixkv.server.chat.request import Verbosity
from radixkv.server.chat.tool_protocol import MAX_TOOLS, FunctionName
from radixkv.server.not_supported import Only
from radixkv.server.protocol import MAX_LOGPROBS
from radixkv.server.response_format import JsonObjectFormat, TextFormat
from radixkv.server.responses.items import MAX_ITEMS, InputItem
from radixkv.server.strict import StrictModel, refuse_lone_surrogates
from radixkv.server.unions import OneOf


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Only[Literal[False] | None] = None
    allowed_callers: Only[list[Literal["direct"]] | None] = None
    output_schema: Only[None] = None
    asynchronous: Only[Literal[False] | None] = Field(default=None, alias="async")


class NamespaceTool(StrictModel):
    """Functions that belong together: in prompts, each has both names, ``namespace__function``."""

    type: Literal["namespace"]
    name: FunctionName
    tools: Annotated[list[Annotated[FunctionTool, OneOf("tools in a namespace")]], Field(max_length=MAX_TOOLS)]
    description: str | None = None  # not part of the prompt


class NamedFunction(StrictModel):
    """``tool_choice``: call this function; one in a namespace has its name in prompts."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(StrictModel):
    """``tool_choice``: only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(max_length=MAX_TOOLS)]


class JsonSchemaTextFormat(StrictModel):
    """JSON that satisfies a schema; with ``strict`` as in `radixkv.server.response_format.JsonSchema`."""

    type: Literal["json_schema"]
    name: str
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(StrictModel):
    """What the answer's text looks like."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")] | None = None
    verbosity: Verbosity | None = None


class ReasoningConfig(StrictModel):
    """How long the model thinks; reasoning is returned as it is, never summarised."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Only[Literal["auto"] | None] = None
    mode: Only[Literal["standard"] | None] = None


class ResponseStreamOptions(StrictModel):
    """Accepted because clients send it; without effect."""

    include_obfuscation: bool | None = None


LOGPROBS = "message.output_text.logprobs"
# The others are of items that no answer has here, and of reasoning, which is always returned in the clear.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Tool = Annotated[FunctionTool | NamespaceTool, OneOf("tools")]


class InputTokensRequest(StrictModel):
    """A prompt; null selects the default."""

    _refuse_lone_surrogates = model_validator(mode="before")(refuse_lone_surrogates)

    input: str | Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: see `TranslatedChatRequest.as_prompt`

    conversation: Only[None] = None

    @property
    def functions(self) -> Iterator[tuple[str | None, FunctionTool]]:
        """Those of ``tools``, each behind its namespace; None: it is in none."""
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                yield from ((tool.name, function) for function in tool.tools)
            else:
                yield None, tool


class ResponseRequest(InputTokensRequest):
    """What the model is to respond to, and how."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    # Not OpenAI's; as for chat completions.
    top_k: int | None = None
    seed: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    include: list[Included] | None = None
    # Only where log-probabilities are included.
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    # Accepted because clients send them; without effect.
    client_metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None  # of tools that the server would run, which has none
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None

    access_programs: Only[None] = None
    background: Only[Literal[False] | None] = None
    context_management: Only[None] = None
    image: Only[None] = None
    moderation: Only[None] = None
    prompt: Only[None] = None
    prompt_cache_retention: Only[Literal["in_memory", "24h"] | None] = None  # for how long at most

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens to return at each place in the answer's text; None: no log-probabilities."""
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) else None
