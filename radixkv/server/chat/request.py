"""A request for the next message of a conversation, as `/v1/chat/completions` takes it.

Endpoints of other forms translate theirs into it, see `radixkv.server.chat.events`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.model.text_interface import TextInterface
from radixkv.prompts import ChatOptions, Message, Prompt, as_chat_prompts, tokenize
from radixkv.server.chat.messages import ContentPart, Messages, TextPart
from radixkv.server.chat.prompt_caching import Breakpoint, PromptCacheOptions, last_marks
from radixkv.server.chat.tool_protocol import AllowedTools, NamedTool, ToolChoice, ToolDefinitions
from radixkv.server.not_supported import NotSupportedInChat
from radixkv.server.protocol import MAX_LOGPROBS, GenerationRequest
from radixkv.server.strict import StrictModel
from radixkv.tools.definitions import as_tool_options

# How long an answer is to be: a hint, accepted because clients send it; without effect.
Verbosity = Literal["low", "medium", "high"]


class Prediction(StrictModel):
    """What the client expects of the answer: a draft, where the server has drafts, and no more than that."""

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        """As one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationRequest, NotSupportedInChat):
    """A conversation to be continued by the assistant."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # the same by its older name; used where that is not given
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: ToolDefinitions | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    # A variable of the chat template.
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    verbosity: Verbosity | None = None

    # vLLM's extensions.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def request_field_names(self) -> dict[str, str]:
        names = super().request_field_names | {"prompts": "messages", "prompt_token_ids": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.tools:
            names.setdefault("structured_outputs", "tools")  # whose calls have a grammar, too
        return names

    @property
    def breakpoints(self) -> list[Breakpoint]:
        """The last ``prompt_cache_breakpoint`` of each time to live, in the order of the prompt."""
        marks = (
            ((index, number), part.prompt_cache_breakpoint)
            for index, message in enumerate(self.messages)
            if isinstance(message.content, list)
            for number, part in enumerate(message.content)
            if isinstance(part, TextPart)
        )
        last = last_marks(marks, self.prompt_cache_options)
        return [Breakpoint(self._messages_up_to(*place), ttl) for ttl, place in last]

    def _messages_up_to(self, index: int, number: int) -> list[dict[str, Any]]:
        """The messages up to part ``number`` of the one at ``index``, without its calls of tools, which would follow."""
        cut = self.messages[index]
        assert isinstance(cut.content, list)
        cut = cut.model_copy(update={"content": cut.content[: number + 1], "refusal": None, "tool_calls": None})
        return [message.model_dump(exclude_none=True) for message in [*self.messages[:index], cut]]

    @property
    def chat_options(self) -> ChatOptions:
        """How the conversation is written, and which tools the answer may call.

        Raises:
            ValueError: ``tool_choice`` or ``continue_final_message`` is impossible, or two tools have one name.
        """
        definitions = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedTool | AllowedTools):
            choice = choice.model_dump()
        return ChatOptions(
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=self.continue_final_message is True,
            tools=as_tool_options(definitions, choice, self.parallel_tool_calls),
            chat_template_kwargs=self.template_variables,
            add_special_tokens=self.add_special_tokens is True,
        )

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template is given beside the messages and the tools."""
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            # The name that templates which can think, such as Qwen3's, have for it.
            effort["enable_thinking"] = False
        return {**effort, **(self.chat_template_kwargs or {})}

    def as_prompt(self, messages: list[Message], options: ChatOptions, loaded: TextInterface) -> Prompt:
        """The request's ``messages``, see `as_messages`, as the chat template writes them.

        Raises:
            TypeError, ValueError: the template refuses it, or it cannot be continued as asked.
        """
        (prompt,) = as_chat_prompts(messages, loaded, options=options)
        if self.prediction is None:
            return prompt
        expected = tokenize("prediction", self.prediction.text, loaded, add_special_tokens=False)
        return replace(prompt, prediction=expected)
