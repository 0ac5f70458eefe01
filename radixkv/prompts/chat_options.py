"""How a conversation is written for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.tools.definitions import ToolOptions


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a conversation is written, and what its answer may call. (The names and meanings of vLLM and transformers.)

    Attributes:
        add_generation_prompt: end where the assistant's next message begins.
        continue_final_message: end within the last message, the assistant's, as if it were being written; only without
            ``add_generation_prompt``.
        chat_template: Jinja, or a file of it, by which conversations are written and answers read; None: the model's own.
        tools: to be described by the template or, if it does not support tools, in words.
        chat_template_kwargs: variables for the template, such as ``enable_thinking``.
        add_special_tokens: add the tokens with which the tokenizer begins or ends a text to what the template writes.

    Raises:
        TypeError: an option has another type.
        ValueError: a message is to be continued and answered.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | Path | None = None
    tools: ToolOptions | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_special_tokens: bool = False

    def __post_init__(self) -> None:
        for name, kind, what in (
            ("add_generation_prompt", bool, "True or False"),
            ("continue_final_message", bool, "True or False"),
            ("chat_template", str | Path | None, "a file or a Jinja template"),
            ("chat_template_kwargs", Mapping | None, "a dictionary"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name}: expected {what}, got {value!r:.80}")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message: only for add_generation_prompt=False; a message is continued or answered, not both"
            )


DEFAULT_CHAT_OPTIONS = ChatOptions()
