"""Requests and items of the Responses API in the form of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from radixkv.server.assistant_turns import add_to_assistant_turn
from radixkv.server.prompt_caching import Breakpoint, last_marks
from radixkv.server.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputText,
    MessageItem,
    ReasoningItem,
)
from radixkv.server.responses.objects import (
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
)
from radixkv.server.responses.request import AllowedFunctions, JsonSchemaTextFormat, NamedFunction, ResponseRequest
from radixkv.server.responses.store import StoredResponse
from radixkv.server.tool_protocol import function_tool, named_tool
from radixkv.server.translated_chat import same_fields

# Request fields with the same meaning in chat completions, by the name that they have there.
_SAME_MEANING = MappingProxyType(
    {
        "model": "model",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "seed": "seed",
        "stream": "stream",
        "cache_salt": "cache_salt",
        "parallel_tool_calls": "parallel_tool_calls",
        "prompt_cache_options": "prompt_cache_options",
        "max_completion_tokens": "max_output_tokens",
    }
)

# The field of a request that a field of chat completions was made from, for errors that name it.
FIELD_NAMES = MappingProxyType(
    {
        "messages": "input",
        "prompts": "input",
        "prompt_token_ids": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "structured_outputs": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
)


def as_chat_request(body: ResponseRequest, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of the chat completion that answers a request.

    Args:
        messages: the conversation without ``instructions``.
    """
    chat = {"messages": instructed(body, messages), **same_fields(body, _SAME_MEANING)}
    if body.tools:
        chat["tools"] = [
            function_tool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
            for tool in body.tools
        ]
    if isinstance(body.tool_choice, NamedFunction):
        chat["tool_choice"] = named_tool(body.tool_choice.name)
    elif isinstance(body.tool_choice, AllowedFunctions):
        named = [named_tool(tool.name) for tool in body.tool_choice.tools]
        chat["tool_choice"] = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": body.tool_choice.mode, "tools": named},
        }
    elif body.tool_choice is not None:
        chat["tool_choice"] = body.tool_choice
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    text_format = None if body.text is None else body.text.format
    if isinstance(text_format, JsonSchemaTextFormat):
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True),
        }
    elif text_format is not None:
        chat["response_format"] = text_format.model_dump()
    return chat


def instructed(body: ResponseRequest, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages behind a request's ``instructions``."""
    before = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    return [*before, *messages]


def input_messages(items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """A request's ``input`` as messages.

    Reasoning, text and calls that follow each other are one message of the assistant, as the model wrote them.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case ReasoningItem():
                texts = item.content or item.summary or []
                add_to_assistant_turn(messages, reasoning="\n".join(part.text for part in texts))
            case MessageItem(role="assistant"):
                add_to_assistant_turn(messages, text="".join(part.text for part in item.parts))
            case MessageItem():
                messages.append({"role": item.role, "content": "\n".join(part.text for part in item.parts)})
            case FunctionCallItem():
                add_to_assistant_turn(messages, call=(item.call_id, item.name, item.arguments))
            case FunctionCallOutputItem():
                output = "\n".join(part.text for part in item.parts)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return messages


def conversation_breakpoints(body: ResponseRequest, earlier: StoredResponse | None) -> list[Breakpoint]:
    """The last ``prompt_cache_breakpoint`` of each time to live in a conversation, without ``instructions``, in order.

    Args:
        earlier: the response that the request continues.
    """
    before, breakpoints = ((), ()) if earlier is None else (earlier.messages, earlier.breakpoints)
    found = {each.ttl: each for each in breakpoints}
    items = [] if isinstance(body.input, str) else body.input
    marks = (
        ((index, number), part.prompt_cache_breakpoint)
        for index, item in enumerate(items)
        if isinstance(item, MessageItem | FunctionCallOutputItem)
        for number, part in enumerate(item.parts)
        if isinstance(part, InputText)
    )
    for ttl, (index, number) in last_marks(marks, body.prompt_cache_options):
        marked = items[index]
        assert isinstance(marked, MessageItem | FunctionCallOutputItem)
        field = "content" if isinstance(marked, MessageItem) else "output"
        cut = marked.model_copy(update={field: marked.parts[: number + 1]})
        found.pop(ttl, None)  # what is later in the conversation comes later
        found[ttl] = Breakpoint([*before, *input_messages([*items[:index], cut])], ttl)
    return list(found.values())


def output_messages(output: Sequence[OutputItem]) -> list[dict[str, Any]]:
    """A response's ``output`` as messages: one of the assistant."""
    messages: list[dict[str, Any]] = []
    for item in output:
        match item:
            case OutputReasoning():
                add_to_assistant_turn(messages, reasoning="".join(part.text for part in item.content))
            case OutputMessage():
                add_to_assistant_turn(messages, text="".join(part.text for part in item.content))
            case OutputFunctionCall():
                add_to_assistant_turn(messages, call=(item.call_id, item.name, item.arguments))
    return messages
