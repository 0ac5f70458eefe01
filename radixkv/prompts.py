"""Prompts and messages as users pass them, converted to token ids.

A prompt is a string, a list of token ids, or a dictionary (`TextPrompt`, `TokensPrompt`) with ``prompt`` or
``prompt_token_ids``, or with both, which are then its text and its tokens; and optionally

- ``cache_salt``: only prompts with the same salt share cached prefixes (a tenant, a user, an adapter);
- ``cache``: ``{"read": bool, "write": bool}``: whether to reuse what is cached, and to publish what is computed;
- ``resume``: `CompletionOutput`, one for each of ``n``: answers that were begun, perhaps by another engine with
  the same model, and go on where they stopped, exactly as they would have gone on there. Outputs hold only what follows.
- ``prediction``: text that the answer is expected to be, mostly; with ``speculative_config``, its tokens are drafts.

A message is a dictionary with ``role`` and ``content``: a string, or a list of parts ``{"type": "text", "text": ...}``, which
are joined by line ends. The role "developer" is what OpenAI called "system" before, and what chat templates still do. The
assistant's messages may have ``tool_calls`` in OpenAI's form, and then no content; a message of the role "tool" has the
result of a call.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, NotRequired, TypedDict, TypeVar

from jinja2 import TemplateError

from radixkv.model.text_interface import TextInterface
from radixkv.outputs import CompletionOutput
from radixkv.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from radixkv.tools.chat_format import AnswerForm
from radixkv.tools.definitions import ParsedAnswer, ToolOptions

_Params = TypeVar("_Params", bound=SamplingParams | BeamSearchParams)

Message = Mapping[str, Any]


class _PromptOptions(TypedDict, total=False):
    cache_salt: str | None
    cache: Mapping[str, bool] | None
    resume: Sequence[CompletionOutput]
    prediction: str | None


class TextPrompt(_PromptOptions):
    """A prompt as text, with what is said of it above."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids, and its text if that is to be in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptInput = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
_PROMPT_KEYS = frozenset({*TextPrompt.__annotations__, *TokensPrompt.__annotations__, *_PromptOptions.__annotations__})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids, with its text where there is one, and how it uses the cache.

    Attributes:
        namespace: only prompts of the same namespace share cached prefixes.
        read_cache: reuse what is cached.
        write_cache: publish what is computed.
        answer_form: what the answer looks like, where it is more than text.
        resume: what was generated of the answers already.
        prediction: what the answer is expected to be, as token ids.
    """

    token_ids: Sequence[int]
    text: str | None = None
    namespace: str = ""
    read_cache: bool = True
    write_cache: bool = True
    answer_form: AnswerForm | None = None
    resume: Sequence[CompletionOutput] = ()
    prediction: Sequence[int] = ()

    def parse_answer(self, text: str) -> ParsedAnswer:
        """The parts of a whole answer to it."""
        return ParsedAnswer(text) if self.answer_form is None else self.answer_form.parse(text)


def as_prompts(
    prompts: PromptInput | Sequence[PromptInput], loaded: TextInterface, add_special_tokens: bool = True
) -> list[Prompt]:
    """One prompt or a list of them, tokenized.

    Args:
        prompts: texts or token ids.
        loaded: the model.
        add_special_tokens: add to texts those that the tokenizer begins or ends one with.

    Raises:
        TypeError, ValueError: a prompt is none of the forms above.
    """
    if isinstance(prompts, bytes) or not isinstance(prompts, str | Mapping | Sequence):
        raise TypeError(
            f"prompts: expected a string, token ids, a dictionary or a list of those, got {type(prompts).__name__}"
        )
    many: Any = [prompts] if isinstance(prompts, str | Mapping) or is_token_ids(prompts) else prompts
    return [_as_prompt(prompt, loaded, add_special_tokens) for prompt in many]


def is_token_ids(prompt: Any) -> bool:
    """Whether this is one prompt as a list of token ids, rather than a list of prompts or of messages."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Integral)


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
                or not {"content", "tool_calls"} & set(message)
            ):
                raise ValueError(f"messages: expected a dictionary with 'role' and 'content', got {message!r:.80}")
    return [[as_template_message(message) for message in conversation] for conversation in conversations]


def as_template_message(message: Message) -> Message:
    """A message as chat templates expect it: one text, a role that they know, and arguments of tool calls as objects.

    Raises:
        ValueError: it has no content, a part of it is not text, or a tool call is malformed.
    """
    if message["role"] == "developer":
        message = {**message, "role": "system"}
    parts, calls = message.get("content"), message.get("tool_calls")
    if calls:
        message = {**message, "tool_calls": _as_template_calls(message["role"], calls)}
    if parts is None and message["role"] in ("assistant", "tool"):
        return {**message, "content": None if calls else ""}  # None: for templates that support tool calls
    if isinstance(parts, str):
        return message
    if not isinstance(parts, Sequence) or not all(_is_text(part) for part in parts):
        raise ValueError(f"messages: expected content to be a string or a list of text parts, got {parts!r:.80}")
    return {**message, "content": "\n".join(part["text"] for part in parts)}


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
        with suppress(ValueError, RecursionError):  # what a model wrote wrongly is shown to it as it wrote it
            arguments = json.loads(arguments or "{}")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def render_chat(
    messages: Sequence[Message],
    loaded: TextInterface,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: ToolOptions | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the model's chat template writes it.

    Args:
        add_generation_prompt: end where the assistant's next message begins.
        continue_final_message: end within the last message, the assistant's, as if it were being written; only without
            ``add_generation_prompt``. (The names and meanings of vLLM and transformers.)
        tools: those that the template describes or, where it knows none, the system message.
        chat_template_kwargs: variables for the template, such as ``enable_thinking``.

    Raises:
        TypeError, ValueError: the tokenizer has no chat template, it refuses the messages, or there is nothing to continue.
    """
    for name, value in {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r:.80}")
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message: only for add_generation_prompt=False; a message is continued or answered, not both"
        )
    if continue_final_message and messages[-1]["role"] != "assistant":
        raise ValueError(
            f"continue_final_message: expected the last message to be the assistant's, got role {messages[-1]['role']!r:.80}"
        )
    if continue_final_message and not (messages[-1]["content"] or "").strip():
        raise ValueError("continue_final_message: the last message has no text")
    tokenizer = loaded.require_tokenizer()
    if loaded.chat_format is None:
        raise ValueError(f"{loaded.name} has no chat template: use generate() with a prompt written for it")
    variables = _template_variables(tokenizer, chat_template_kwargs)
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in loaded.chat_format.as_template_messages(messages, tools)],
            **variables,
            tools=loaded.chat_format.template_tools(tools),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except TemplateError as error:
        raise ValueError(f"messages: the chat template refuses them: {error}") from error
    except ValueError as error:
        if not continue_final_message:
            raise
        raise ValueError(
            "continue_final_message: the chat template does not write the last message's text as it is"
        ) from error
    return text


def _template_variables(tokenizer: Any, variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Variables for a template, none of which is an argument of what renders it.

    Raises:
        TypeError, ValueError: they are not a dictionary, or one has such a name.
    """
    if not isinstance(variables, Mapping | None):
        raise TypeError(f"chat_template_kwargs: expected a dictionary, got {variables!r:.80}")
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables or {}:
        if name in arguments or name in ("messages", "self"):
            raise ValueError(f"chat_template_kwargs: {name!r} is not a variable of the chat template")
    return variables or {}


def encode_rendered(text: str, loaded: TextInterface, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text in which the chat template has already written every special token, unless some are to be added.

    Raises:
        ValueError: the text is not Unicode.
    """
    return encode("messages", text, loaded, add_special_tokens=add_special_tokens)


def encode(name: str, text: str, loaded: TextInterface, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of the text of an argument.

    Raises:
        ValueError: it is not Unicode.
    """
    _check_unicode(name, text)
    ids: list[int] = loaded.require_tokenizer()(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def _check_unicode(name: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON and the arguments of a process can hold, and UTF-8 cannot.

    Raises:
        ValueError: naming the argument.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} is half of a surrogate pair, not Unicode text") from error


def encode_bad_words(words: Sequence[str], loaded: TextInterface) -> list[list[int]]:
    """Token ids of words that may not be generated: each as a text begins with it, and as it follows a space.

    Raises:
        ValueError: a word is not Unicode, or the model has no tokenizer.
    """
    texts = [text for word in words for text in (word.strip(), f" {word.strip()}", word)]
    encoded = [encode("bad_words", text, loaded, add_special_tokens=False) for text in texts]
    # A tokenizer may know more tokens than the model, which generates none of those.
    return [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids and max(ids) < loaded.vocab_size]


def as_chat_prompts(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    loaded: TextInterface,
    cache_salt: str | None = None,
    cache: Mapping[str, bool] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: ToolOptions | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
) -> list[Prompt]:
    """One conversation or a list of them, each as the prompt for an answer, or for more of one (see `render_chat`).

    Raises:
        TypeError, ValueError: a conversation or a cache option is not possible, or there is no chat template.
    """
    options = cache_options(cache_salt, cache)
    texts = [
        render_chat(
            conversation,
            loaded,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        for conversation in as_conversations(messages)
    ]
    assert loaded.chat_format is not None
    answer_form = partial(loaded.chat_format.answer_form, options=tools, continues=not add_generation_prompt)
    return [
        Prompt(encode_rendered(text, loaded, add_special_tokens), text, **options, answer_form=answer_form(text))
        for text in texts
    ]


def with_answer_form(params: _Params, form: AnswerForm | None) -> _Params:
    """The parameters for an answer of this form: what they constrain is its content.

    Raises:
        ValueError: a tool's schema cannot be enforced, or a beam search could not read the answer.
    """
    if form is None:
        return params
    structured = params.structured_outputs
    frame = form.frame(content_is_constrained=structured is not None)
    if frame is not None:
        structured = replace(structured, frame=frame) if structured else StructuredOutputsParams(frame=frame)
        params = replace(params, structured_outputs=structured)
    if not form.needs_special_tokens:
        return params
    if isinstance(params, BeamSearchParams):
        raise ValueError("use_beam_search: not for this model's answers, whose parts are marked by special tokens")
    return replace(params, skip_special_tokens=False)


def cache_options(cache_salt: str | None, cache: Mapping[str, bool] | None) -> dict[str, Any]:
    """The arguments of `Prompt` for how it uses the cache.

    Raises:
        TypeError, ValueError: the salt is not a string of Unicode text, or ``cache`` has keys other than read and write, or
            values that are not booleans.
    """
    if cache_salt is not None:
        if not isinstance(cache_salt, str):
            raise TypeError(f"cache_salt: expected a string, got {cache_salt!r}")
        _check_unicode("cache_salt", cache_salt)
    switches = dict(cache or {})
    if not set(switches) <= {"read", "write"} or not all(isinstance(value, bool) for value in switches.values()):
        raise ValueError(f"cache: expected {{'read': bool, 'write': bool}}, got {cache!r}")
    return {
        "namespace": cache_salt or "",
        "read_cache": switches.get("read", True),
        "write_cache": switches.get("write", True),
    }


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _as_prompt(prompt: Any, loaded: TextInterface, add_special_tokens: bool) -> Prompt:
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        prompt = {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise TypeError(f"prompts: expected a string, token ids or a dictionary, got {prompt!r:.80}")
    if not set(prompt) <= _PROMPT_KEYS or not {"prompt", "prompt_token_ids"} & set(prompt):
        raise ValueError(
            f"prompts: expected 'prompt' or 'prompt_token_ids', and no keys but {sorted(_PROMPT_KEYS)}, got {sorted(prompt)}"
        )
    options = cache_options(prompt.get("cache_salt"), prompt.get("cache"))
    resume = prompt.get("resume", ())
    if not isinstance(resume, Sequence) or not all(isinstance(output, CompletionOutput) for output in resume):
        raise TypeError(f"prompts: 'resume' must be a list of CompletionOutput, got {resume!r:.80}")
    prediction = prompt.get("prediction")
    if not isinstance(prediction, str | None):
        raise TypeError(f"prompts: 'prediction' must be a string, got {prediction!r:.80}")
    if prediction:
        options["prediction"] = encode("prediction", prediction, loaded, add_special_tokens=False)
    text = prompt.get("prompt")
    if "prompt_token_ids" in prompt and isinstance(text, str | None):
        return Prompt(prompt["prompt_token_ids"], text, **options, resume=resume)
    if not isinstance(text, str):
        raise TypeError(f"prompts: 'prompt' must be a string, got {text!r:.80}")
    ids = encode("prompts", text, loaded, add_special_tokens=add_special_tokens)
    if not ids:
        raise ValueError(f"prompts: {text!r} has no tokens; a prompt needs at least one")
    return Prompt(ids, text, **options, resume=resume)
