"""Responses and their output items, as they are returned."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from radixkv.server.output.logprobs import ChosenTokenLogprob, EncodedTokenLogprobs

Status = Literal["in_progress", "completed", "incomplete"]
# Of the tokens of a text, if they are included.
Logprobs = list[ChosenTokenLogprob] | EncodedTokenLogprobs


class OutputTextPart(BaseModel):
    """Text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: Logprobs = []


class ReasoningTextPart(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    """The assistant's answer."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart]


class OutputFunctionCall(BaseModel):
    """A call of a function, to be carried out by the client."""

    type: Literal["function_call"] = "function_call"
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputReasoning(BaseModel):
    """Reasoning of the model."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningTextPart]
    encrypted_content: None = None


OutputItem = Annotated[OutputMessage | OutputFunctionCall | OutputReasoning, Field(discriminator="type")]


def as_input(item: OutputItem) -> dict[str, Any]:
    """An item of the output as one of an input, which has no log-probabilities."""
    return item.model_dump(exclude={"content": {"__all__": {"logprobs"}}})


class InputTokensDetails(BaseModel):
    """Counts of the prompt's tokens.

    Attributes:
        cached_tokens: those that were reused rather than computed.
        cache_write_tokens: those that were computed, and are kept for a ``prompt_cache_breakpoint``.
    """

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """``reasoning_tokens``: tokens of reasoning among those generated."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens of the prompt, the whole conversation that it continues included, and of the output."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why a streamed response failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """A response, finished or not, with what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    previous_response_id: str | None
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    max_output_tokens: int | None
    top_logprobs: int
    temperature: float
    top_p: float
    truncation: Literal["auto", "disabled"]
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"
    prompt_cache_key: str | None
    prompt_cache_options: dict[str, str] | None
    safety_identifier: str | None
    store: bool
    metadata: dict[str, str]
    user: str | None


class DeletedResponse(BaseModel):
    """A response that can be continued no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokenCount(BaseModel):
    """Tokens of a prompt, the whole conversation that it continues included."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
