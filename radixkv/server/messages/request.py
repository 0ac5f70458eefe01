"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.server.chat.tool_protocol import MAX_TOOLS, FunctionName
from radixkv.server.messages.blocks import MAX_BLOCKS, Block, CacheControl, TextBlock
from radixkv.server.not_supported import Only
from radixkv.server.protocol import MAX_STOP_STRINGS, StopString
from radixkv.server.strict import StrictModel
from radixkv.server.unions import OneOf


class MessageParam(StrictModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_BLOCKS)]


class CustomTool(StrictModel):
    """A tool that the client carries out; the server has none of its own."""

    type: Literal["custom"]
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are generated
    defer_loading: Only[Literal[False] | None] = None
    allowed_callers: Only[list[Literal["direct"]] | None] = None
    input_examples: list[dict[str, Any]] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of its input, with the examples under their keyword."""
        return {**self.input_schema, "examples": self.input_examples} if self.input_examples else self.input_schema


Tool = Annotated[CustomTool, OneOf("tools", default="custom")]


class ToolChoice(StrictModel):
    """Which tool to use; ``any``: some tool, ``tool``: the named one."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(StrictModel):
    """Whether the model thinks before it answers, where it can. A budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None  # never summarised: all of it, or empty blocks
    block_binding: Only[None] = None


class JsonSchemaOutput(StrictModel):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """What the answer looks like, and how much effort it is worth."""

    format: JsonSchemaOutput | None = None
    effort: str | None = None
    task_budget: Only[None] = None


class KeepThinking(StrictModel):
    """An edit that changes nothing: all thinking stays in the history, for the chat template to write or to leave out."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(StrictModel):
    """Edits of the history by the server; only the one that changes nothing is supported."""

    edits: Only[list[KeepThinking]] = Field(default_factory=list)


class BillingPolicy(StrictModel):
    """Who is billed; only the sender of the request can be."""

    type: Literal["billing_policy"]
    bill_to: Literal["self"] | None = None


class Metadata(StrictModel):
    """Accepted because clients send it; without effect."""

    user_id: str | None = None


class CountTokensRequest(StrictModel):
    """A prompt; null selects the default."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_BLOCKS)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaOutput | None = None  # older name of ``output_config.format``
    # As if it stood on the last block that can have it.
    cache_control: CacheControl | None = None

    billing_policy: Only[BillingPolicy | None] = None
    compaction: Only[None] = None
    container: Only[None] = None
    context_management: ContextManagement | None = None
    mcp_servers: Only[Annotated[list[Any], Field(max_length=0)] | None] = None
    speed: Only[Literal["standard"] | None] = None
    # Whose request it is, for an account of Anthropic's; without effect.
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation to be continued by the assistant."""

    max_tokens: Annotated[int, Field(ge=0)]  # 0: only cache the prompt
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    # Not Anthropic's: only prompts with the same salt share what is cached.
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    # Accepted because clients send them; without effect.
    metadata: Metadata | None = None
    service_tier: Only[Literal["auto", "standard_only"] | None] = None
    inference_geo: str | None = None

    diagnostics: Only[None] = None
    fallback_credit_token: Only[None] = None
    # "default" are a model's own, if it has any.
    fallbacks: Only[Literal["default"] | Annotated[list[Any], Field(max_length=0)] | None] = None
    # The client sends the whole conversation instead, see `RefusedThread`.
    thread: Only[None] = None
