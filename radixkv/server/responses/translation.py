"""Requests and items of the Responses API in the form of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from radixkv.server.chat.prompt_caching import Breakpoint, last_marks
from radixkv.server.chat.tool_protocol import function_tool, named_tool
from radixkv.server.chat.translated_chat import same_fields
from radixkv.server.chat.turns import Turns
from radixkv.server.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
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
from radixkv.server.responses.request import (
    AllowedFunctions,
    InputTokensRequest,
    JsonSchemaTextFormat,
    NamedFunction,
    ResponseRequest,
)
from radixkv.server.responses.store import StoredResponse

# The field of a request that a field of chat completions was made from, for errors that name it.
FIELD_NAMES = MappingProxyType(
    {
        "messages": "input",
        "prompts": "input",
        "prompt_token_ids": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "logprobs": "include",
        "response_format": "text.format",
        "structured_outputs": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
)


def as_chat_request(body: InputTokensRequest, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of the chat completion that answers a request.

    Args:
        messages: the conversation without ``instructions``.
    """
    chat = same_fields(body, "model", "parallel_tool_calls")
    if isinstance(body, ResponseRequest):
        # Not ``stream``: the last event holds all of the response, whose size is bounded.
        names = ("temperature", "top_p", "top_k", "seed", "cache_salt", "prompt_cache_options")
        chat |= same_fields(body, *names, max_completion_tokens="max_output_tokens")
        if body.num_top_logprobs is not None:
            chat |= {"logprobs": True, "top_logprobs": body.num_top_logprobs}
    chat["messages"] = instructed(body, messages)
    if body.truncation == "auto":
        chat["drops_oldest_turns"] = True
    if body.tools:
        chat["tools"] = [
            function_tool(
                name=_qualified_name(namespace, function.name),
                description=function.description,
                parameters=function.parameters,
                strict=function.strict,
            )
            for namespace, function in body.functions
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


def namespaced_functions(body: ResponseRequest) -> dict[str, tuple[str, str]]:
    """The namespace and the name of each function that is in a namespace, by its name in prompts."""
    return {
        _qualified_name(namespace, function.name): (namespace, function.name)
        for namespace, function in body.functions
        if namespace is not None
    }


def _qualified_name(namespace: str | None, name: str) -> str:
    """A function's name in prompts: with its namespace, in the form that agents give to tools of MCP's servers."""
    return f"{namespace}__{name}" if namespace else name


def instructed(body: InputTokensRequest, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages behind a request's ``instructions``, which a system message at the beginning goes on with."""
    turns = Turns()
    if body.instructions is not None:
        turns.add_text("system", body.instructions)
    if messages and messages[0]["role"] == "system":
        turns.add_text("system", messages[0]["content"])
        messages = messages[1:]
    return [*turns.messages(), *messages]


def input_messages(
    items: str | Sequence[InputItem], earlier: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """A request's ``input`` as messages, behind those of the conversation that it continues.

    Texts of one role that follow each other are one message, and so are reasoning, text and calls of the assistant.
    """
    turns = Turns(earlier)
    if isinstance(items, str):
        turns.add_text("user", items)
        return turns.messages()
    for item in items:
        match item:
            case ReasoningItem():
                turns.add_reasoning("\n".join(part.text for part in item.content or item.summary or []))
            case MessageItem():
                for part in item.parts:
                    # The name of this role that chat templates know.
                    turns.add_text("system" if item.role == "developer" else item.role, part.text)
            case FunctionCallItem():
                turns.add_call(item.call_id, _qualified_name(item.namespace, item.name), item.arguments)
            case FunctionCallOutputItem():
                text = "\n".join(part.text for part in item.parts)
                if item.call_id is not None:
                    turns.begin_result(item.call_id)
                    turns.add_text("tool", text)
                else:
                    turns.add_text("user", text if item.name is None else f"{item.name}: {text}")
    return turns.messages()


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
        if isinstance(part, InputText | InputImage)
    )
    for ttl, (index, number) in last_marks(marks, body.prompt_cache_options):
        marked = items[index]
        assert isinstance(marked, MessageItem | FunctionCallOutputItem)
        field = "content" if isinstance(marked, MessageItem) else "output"
        cut = marked.model_copy(update={field: marked.parts[: number + 1]})
        found.pop(ttl, None)  # what is later in the conversation comes later
        found[ttl] = Breakpoint(input_messages([*items[:index], cut], before), ttl)
    return list(found.values())


def output_messages(output: Sequence[OutputItem]) -> list[Mapping[str, Any]]:
    """A response's ``output`` as messages: one of the assistant."""
    turns = Turns()
    for item in output:
        match item:
            case OutputReasoning():
                turns.add_reasoning("".join(part.text for part in item.content))
            case OutputMessage():
                turns.add_text("assistant", "".join(part.text for part in item.content))
            case OutputFunctionCall():
                turns.add_call(item.call_id, _qualified_name(item.namespace, item.name), item.arguments)
    return turns.messages()
