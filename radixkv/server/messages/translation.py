"""Requests of the Messages API in the form of chat completions, and where they ask for a prefix to stay cached."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from radixkv.server.chat.prompt_caching import SECONDS, Breakpoint
from radixkv.server.chat.tool_protocol import function_tool, named_tool
from radixkv.server.chat.translated_chat import same_fields
from radixkv.server.chat.turns import Turns
from radixkv.server.messages.blocks import (
    Block,
    CacheControl,
    DocumentBlock,
    ImageBlock,
    Piece,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from radixkv.server.messages.request import CountTokensRequest, MessageParam, MessagesRequest

MAX_BREAKPOINTS = 4
# Opens a block of the system prompt in which Claude Code names who is billed. It differs between conversations and
# stands before all that they share.
_BILLING_HEADER = "x-anthropic-billing-header:"

_FIELD_NAMES = MappingProxyType(
    {
        "prompts": "messages",
        "prompt_token_ids": "messages",
        "continue_final_message": "messages",
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "structured_outputs": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }
)


def as_chat_request(body: CountTokensRequest) -> tuple[dict[str, Any], list[Breakpoint]]:
    """The body of the chat completion that answers a request, and its breakpoints in order.

    Raises:
        ValueError: messages or `cache_control` are impossible; the message names the field.
    """
    messages, breakpoints = _as_messages(body)
    chat: dict[str, Any] = {"messages": messages}
    if isinstance(body, MessagesRequest):
        names = ("model", "stream", "temperature", "top_p", "top_k", "cache_salt")
        chat |= same_fields(body, *names, stop="stop_sequences")
        # With 0, the prompt is cached only: the engine always generates a token, which is left out of the answer.
        chat["max_completion_tokens"] = max(1, body.max_tokens)
    if messages[-1]["role"] == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        chat["tools"] = [
            function_tool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
            for tool in body.tools
        ]
    chat |= _tool_choice(body)
    if body.thinking is not None:
        # The name that templates which can think, such as Qwen3's, have for it.
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    output_format = body.output_format
    if body.output_config is not None:
        if output_format is not None and body.output_config.format is not None:
            raise ValueError("output_format: it is the older name of output_config.format, which is there, too")
        if body.output_config.effort is not None:
            chat["reasoning_effort"] = body.output_config.effort
        output_format = output_format or body.output_config.format
    if output_format is not None:
        schema = {"name": "output", "schema": output_format.json_schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat, breakpoints


def field_names(body: CountTokensRequest) -> Mapping[str, str]:
    """The field of a request that a field of chat completions was made from, for errors that name it."""
    if body.output_format is None:
        return _FIELD_NAMES
    return {**_FIELD_NAMES, "response_format": "output_format", "structured_outputs": "output_format"}


def _tool_choice(body: CountTokensRequest) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        raise ValueError("tool_choice: a name is expected for the type 'tool', and for no other")
    if choice.type in ("any", "tool") and not body.tools:
        raise ValueError(f"tool_choice: {choice.type!r} needs tools, and there are none")
    fields: dict[str, Any] = {}
    if choice.name is not None:
        fields["tool_choice"] = named_tool(choice.name)
    else:
        fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _as_messages(body: CountTokensRequest) -> tuple[list[Mapping[str, Any]], list[Breakpoint]]:
    """The messages, and the breakpoints in the order of the prompt: tools, system, messages."""
    prompt = _MarkedTurns()
    for tool in body.tools or []:
        prompt.mark(tool.cache_control)
    system = [TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system or []
    for text_block in system:
        if not text_block.text.startswith(_BILLING_HEADER):
            prompt.add_text("system", text_block.text)
        prompt.mark(text_block.cache_control)
    last_mark: CacheControl | None = None
    for index, message in enumerate(body.messages):
        for number, block in enumerate(_blocks(message)):
            if isinstance(block, ImageBlock) or (isinstance(block, DocumentBlock) and not block.is_text):
                # Anthropic's path: by it, Claude Code finds the block that it is to leave out.
                raise ValueError(
                    f"messages.{index}.content.{number}.{block.type}: expected text, which is all that this model reads"
                )
            prompt.add_block(message.role, block)
            prompt.mark(block.cache_control)
            last_mark = block.cache_control
    if last_mark is None:
        prompt.mark(body.cache_control)
    messages, breakpoints = prompt.messages(), prompt.breakpoints
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        # Left out, just as a message with an empty list of blocks makes none.
        breakpoints = [replace(point, messages=point.messages[: len(messages) - 1]) for point in breakpoints]
        del messages[-1]
    if not any(message["role"] != "system" for message in messages):
        raise ValueError("messages: expected at least one with content")
    return messages, breakpoints


def _blocks(message: MessageParam) -> list[Block]:
    if isinstance(message.content, str):
        return [TextBlock(type="text", text=message.content)]
    return message.content


class _MarkedTurns(Turns):
    """The messages, and the breakpoints among them.

    Attributes:
        breakpoints: in the order of the prompt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.breakpoints: list[Breakpoint] = []

    def add_block(self, role: str, block: Block) -> None:
        """Add a block, and the marks within it.

        Raises:
            ValueError: it is of another role, or what `mark` raises.
        """
        expected = "assistant" if isinstance(block, ToolUseBlock | ThinkingBlock | RedactedThinkingBlock) else role
        expected = "user" if isinstance(block, ToolResultBlock | DocumentBlock | SearchResultBlock) else expected
        if role != expected:
            raise ValueError(f"messages: a block of type {block.type!r} is {expected}'s, got role {role!r}")
        match block:
            case TextBlock() | DocumentBlock() | SearchResultBlock():
                self._add_pieces(role, block.pieces)
            case ThinkingBlock():
                self.add_reasoning(block.thinking)
            case RedactedThinkingBlock():
                self.add_reasoning("")
            case ToolUseBlock():
                self.add_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            case ToolResultBlock():
                self.begin_result(block.tool_use_id)
                self._add_pieces("tool", block.pieces)

    def mark(self, mark: CacheControl | None) -> None:
        """Add a breakpoint behind what was added so far, if there is a mark.

        Raises:
            ValueError: there are too many, or a longer-lived one follows a shorter-lived one.
        """
        if mark is None:
            return
        ttl = SECONDS[mark.ttl or "5m"]
        if len(self.breakpoints) == MAX_BREAKPOINTS:
            raise ValueError(f"cache_control: expected at most {MAX_BREAKPOINTS} of them")
        if self.breakpoints and ttl > self.breakpoints[-1].ttl:
            raise ValueError("cache_control: one with ttl '1h' must not follow one with ttl '5m'")
        self.breakpoints.append(Breakpoint(self.messages(), ttl))

    def _add_pieces(self, role: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                self.add_text(role, piece)
            else:
                self.mark(piece)
