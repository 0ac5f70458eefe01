"""Conversations as users pass them, written by a model's chat template and converted to token ids.

A message is a dictionary with ``role`` and ``content``: a string, or a list of parts ``{"type": "text", "text": ...}``, which
are joined by line ends. "developer" is OpenAI's newer name for the role "system", which chat templates use. The assistant's
messages may have ``tool_calls`` in OpenAI's form, and then no content; a message of the role "tool" has the result of a call.
A ``refusal``, as a field or a part, is what the assistant said instead of an answer, and counts as content; ``reasoning`` is
another name for ``reasoning_content``, and so are parts ``{"type": "thinking", "thinking": ...}``. The template is given all
other fields, except those that are null or say nothing to a model. Other roles are the template's to know, but one that is
spelled nearly like one of these, and that the template does not name, is a mistake.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2 import TemplateError

from radixkv.model.text_interface import TextInterface
from radixkv.model.tokenizer import with_chat_template
from radixkv.option_words import nearest
from radixkv.prompts.chat_options import DEFAULT_CHAT_OPTIONS, ChatOptions
from radixkv.prompts.prompt import Prompt, cache_options, tokenize

Message = Mapping[str, Any]

# "tools" is a role of Granite's templates: what may be called.
_ROLES = ("system", "developer", "user", "assistant", "tool", "tools")
# What clients (OpenAI's, LiteLLM, those of OpenRouter and Gemini) send back with an answer, and no model reads; and likewise
# with a call and its function.
_UNREAD = frozenset(
    "annotations type parsed provider_specific_fields thinking_blocks reasoning_details cache_control".split()
)
_UNREAD_OF_CALLS = frozenset({"index", "provider_specific_fields", "extra_content"})
_UNREAD_OF_FUNCTIONS = frozenset({"parsed_arguments", "provider_specific_fields"})


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One conversation or a list of them.

    Raises:
        TypeError, ValueError: a message is not a dictionary with ``role`` and ``content``, a part of a content is not text,
            or a conversation is empty.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: expected a list of messages or of conversations, got {type(messages).__name__}")
    if len(messages) == 0:
        raise ValueError("messages: expected at least one message, got an empty list")
    conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence) or len(conversation) == 0:
            raise ValueError(f"messages: expected a non-empty list of messages, got {conversation!r:.80}")
        for message in conversation:
            if (
                not isinstance(message, Mapping)
                or "role" not in message
                or not {"content", "tool_calls", "refusal"} & set(message)
            ):
                raise ValueError(f"messages: expected a dictionary with 'role' and 'content', got {message!r:.80}")
    return [[as_template_message(message) for message in conversation] for conversation in conversations]


def as_template_message(message: Message) -> Message:
    """A message as chat templates expect it: one text, a role that they know, and arguments of tool calls as objects.

    Raises:
        ValueError: its role is not a string, it has no content, a part of it is not text, or a tool call is malformed.
    """
    role = message["role"]
    if not isinstance(role, str):
        raise ValueError(f"messages: expected role to be a string, got {role!r:.80}")
    fields = {name: value for name, value in message.items() if value is not None and name not in {"role", *_UNREAD}}
    content, refusal = fields.pop("content", None), fields.pop("refusal", None)
    thought, calls = fields.pop("reasoning", None), fields.pop("tool_calls", None)
    if role == "assistant" and content is not None:
        content, thinking = _without_thinking(content)
        thought = thinking if thought is None else thought
    if thought is not None:
        fields.setdefault("reasoning_content", thought)
    if calls:
        fields["tool_calls"] = _as_template_calls(role, calls)
    if content is None and refusal is None and role not in ("assistant", "tool"):
        raise ValueError(f"messages: expected content to be a string or a list of text parts, got {content!r:.80}")
    text = "\n".join([*_texts(content), *_texts(refusal)])
    return {"role": "system" if role == "developer" else role, "content": text, **fields}


def _without_thinking(content: Any) -> tuple[Any, str | None]:
    """A content without its parts of thinking, and what they say; None: there is none that can be read."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content, None
    thoughts = [part["thinking"] for part in content if _is_thinking(part) and part["type"] == "thinking"]
    rest = [part for part in content if not _is_thinking(part)]
    return rest or None, "".join(thoughts) or None


def _is_thinking(part: Any) -> bool:
    match part:
        case {"type": "thinking", "thinking": str()} | {"type": "redacted_thinking"}:
            return True
    return False


def _texts(content: Any) -> list[str]:
    """The texts of a content, or of a refusal; raises a ValueError if a part of it is not text."""
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    texts = [_text(part) for part in content] if isinstance(content, Sequence) else [None]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        raise ValueError(f"messages: expected content to be a string or a list of text parts, got {content!r:.80}")
    return known


def _text(part: Any) -> str | None:
    """The text of a part; None: it has none."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    return text if isinstance(text, str) else None


def _as_template_calls(role: Any, calls: Any) -> list[dict[str, Any]]:
    if role != "assistant":
        raise ValueError(
            f"messages: expected tool_calls in an assistant's message, got them in one of role {role!r:.80}"
        )
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise ValueError(f"messages: expected tool_calls to be a list, got {calls!r:.80}")
    return [_as_template_call(call) for call in calls]


def _as_template_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"messages: expected a tool call with a function and its name, got {call!r:.80}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # malformed arguments are shown to the model as it wrote them
            arguments = json.loads(arguments or "{}")
    return {
        "type": "function",
        **{name: value for name, value in call.items() if value is not None and name not in _UNREAD_OF_CALLS},
        "function": {
            "name": function["name"],
            **{name: value for name, value in function.items() if name not in _UNREAD_OF_FUNCTIONS},
            "arguments": arguments,
        },
    }


def render_chat(messages: Sequence[Message], loaded: TextInterface, options: ChatOptions = DEFAULT_CHAT_OPTIONS) -> str:
    """The conversation as the model's own chat template writes it, whatever ``options.chat_template`` says.

    Raises:
        ValueError: there is no chat template, it refuses the messages or a variable, a role is misspelt, or there is nothing
            to continue.
    """
    if options.continue_final_message:
        _check_continuation(messages[-1])
    tokenizer = loaded.require_tokenizer()
    if loaded.chat_format is None:
        raise ValueError(f"{loaded.name} has no chat template: use generate() with a prompt written for it")
    tools = loaded.chat_format.template_tools(options.tools)
    _check_roles(messages, tokenizer.get_chat_template(tools=tools))
    variables = _template_variables(tokenizer, options.chat_template_kwargs or {})
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in loaded.chat_format.as_template_messages(messages, options.tools)],
            **variables,
            tools=tools,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
        )
    except TemplateError as error:
        raise ValueError(f"messages: the chat template refuses them: {error}") from error
    except TypeError as error:
        raise ValueError(f"messages, tools, chat_template_kwargs: the chat template refuses them: {error}") from error
    except RecursionError as error:
        raise ValueError("messages, tools: expected fewer lists and objects within each other") from error
    except ValueError as error:
        if not options.continue_final_message:
            raise
        raise ValueError(
            "continue_final_message: the chat template does not write the last message's text as it is"
        ) from error
    return text


def _check_roles(messages: Sequence[Message], template: str) -> None:
    """Raise a ValueError if a role is misspelt. One with digits or marks is one of several speakers, such as user2."""
    for role in dict.fromkeys(message["role"] for message in messages):
        if role in _ROLES or not role.isalpha() or f"'{role}'" in template or f'"{role}"' in template:
            continue
        if meant := nearest(role.lower(), _ROLES, 0.75):
            raise ValueError(
                f"messages: expected role to be one that the chat template knows, got {role!r}; did you mean {meant}?"
            )


def _check_continuation(last: Message) -> None:
    """Raise a ValueError unless the last message can be continued: it is the assistant's and ends in text."""
    if last["role"] != "assistant":
        problem = f"expected the last message to be the assistant's, got role {last['role']!r:.80}"
    elif last.get("tool_calls"):
        problem = "the last message ends in tool calls, not in text"
    elif not last["content"].strip():
        problem = "the last message has no text"
    else:
        return
    raise ValueError(f"continue_final_message: {problem}")


def _template_variables(tokenizer: Any, variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables for a template, none of which may have the name of an argument of the function that renders it."""
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if not isinstance(name, str) or name in arguments or name in ("messages", "self"):
            raise ValueError(f"chat_template_kwargs: {name!r} is not a variable of the chat template")
    return variables


def as_chat_prompts(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    loaded: TextInterface,
    cache_salt: str | None = None,
    cache: Mapping[str, bool] | None = None,
    options: ChatOptions = DEFAULT_CHAT_OPTIONS,
) -> list[Prompt]:
    """One conversation or a list of them, each as the prompt for an answer, or for more of one.

    Raises:
        TypeError, ValueError: a conversation or a cache option is invalid, or there is no chat template.
    """
    of_cache = cache_options(cache_salt, cache)
    loaded = with_chat_template(loaded, options.chat_template)
    prompts = []
    for conversation in as_conversations(messages):
        text = render_chat(conversation, loaded, options)
        assert loaded.chat_format is not None
        continued = conversation[-1]["content"] if options.continue_final_message else None
        answer_form = loaded.chat_format.answer_form(text, options.tools, continued=continued)
        token_ids = tokenize("messages", text, loaded, add_special_tokens=options.add_special_tokens)
        prompts.append(Prompt(token_ids, text, **of_cache, answer_form=answer_form))
    return prompts
