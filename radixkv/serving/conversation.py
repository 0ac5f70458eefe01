"""`Conversation`: what `Chat` and `AsyncChat` keep, and the turns that they run. Nothing here runs a model or waits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from radixkv.model.text_interface import TextInterface
from radixkv.outputs import RequestOutput
from radixkv.prompts import (
    ChatOptions,
    Message,
    Prompt,
    as_conversations,
    as_template_message,
    cache_options,
    render_chat,
    tokenize,
)
from radixkv.sampling.detokenizer import decode_tokens
from radixkv.sampling_params import SamplingParams
from radixkv.tools.definitions import as_tool_options
from radixkv.tools.pieces import ParsedAnswer, TextPiece


@dataclass(frozen=True, slots=True)
class _Transcript:
    """The messages up to an answer, and the tokens of the last turn.

    A turn replaces it as a whole, so that forks, and threads that read, can share it.

    Attributes:
        prompt_text: the last turn's prompt.
        prompt_ids: its tokens.
        answer_ids: the last answer's tokens, as they were generated.
        output: the last turn's request, with all of its answer; None, like ``answer``, before the first.
    """

    messages: Sequence[dict[str, Any]]
    prompt_text: str = ""
    prompt_ids: Sequence[int] = ()
    answer_ids: Sequence[int] = ()
    answer: ParsedAnswer | None = None
    output: RequestOutput | None = None


class Conversation:
    """A conversation, kept as token ids.

    It takes the arguments of `Chat`, but for the model.

    Raises:
        TypeError, ValueError: an argument is impossible; the message names it.
    """

    def __init__(
        self,
        system: str | None,
        sampling_params: SamplingParams | None,
        cache_salt: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        parallel_tool_calls: bool | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        history: Sequence[Message],
    ) -> None:
        if not isinstance(system, str | None):
            raise TypeError(f"system: expected a string or None, got {system!r:.80}")
        _check_params(sampling_params)
        self._sampling_params = sampling_params or SamplingParams(temperature=0.0, max_tokens=512)
        as_tool_options(tools, None, parallel_tool_calls)
        self._cache_options = cache_options(cache_salt, None)
        options = ChatOptions(chat_template_kwargs=chat_template_kwargs)
        self._tools, self._options = copy.deepcopy((tools, options))
        self._parallel_tool_calls = parallel_tool_calls
        messages = _checked_history(history)
        if messages and system is not None:
            raise ValueError(f"system: expected None with history, which has its own, got {system!r:.80}")
        self._transcript = _Transcript(messages if system is None else [{"role": "system", "content": system}])

    @property
    def history(self) -> list[dict[str, Any]]:
        """A copy of all messages so far: system, user and assistant in turn, and the results of tools."""
        return copy.deepcopy(list(self._transcript.messages))

    @property
    def answer(self) -> ParsedAnswer | None:
        """The last turn's answer in its parts; None before the first."""
        return self._transcript.answer

    @property
    def last_output(self) -> RequestOutput | None:
        """The request of the last answer: all of the answer, its times, and how many tokens were reused."""
        return self._transcript.output

    @property
    def last_num_tokens(self) -> int:
        """How many tokens the last answer has; 0 before the first."""
        return len(self._transcript.answer_ids)

    def fork(self) -> Self:
        """A second conversation that goes on from here; both share what has been computed."""
        return copy.copy(self)

    def _message(
        self, text: str, sampling_params: SamplingParams | None, tool_choice: str | Mapping[str, Any] | None
    ) -> Turn:
        """The turn that sends a message; raises what `Chat.stream` says of its arguments."""
        if not isinstance(text, str):
            raise TypeError(f"text: expected a string, got {text!r:.80}")
        if self.answer is not None and self.answer.tool_calls:
            raise ValueError("the last answer has tool calls: send_results() comes first")
        return self._turn([{"role": "user", "content": text}], sampling_params, tool_choice)

    def _results(
        self,
        results: Mapping[str, str],
        sampling_params: SamplingParams | None,
        tool_choice: str | Mapping[str, Any] | None,
    ) -> Turn:
        """The turn that sends what calls returned; raises what `Chat.send_results` says of its arguments."""
        if not isinstance(results, Mapping):
            raise TypeError(f"results: expected a dictionary of texts by the calls' ids, got {results!r:.80}")
        calls = [] if self.answer is None else [call.id for call in self.answer.tool_calls]
        if not calls:
            raise ValueError(
                f"results: expected those of calls, which the last answer does not have, got {list(results)!r:.200}"
            )
        if set(results) != set(calls):
            raise ValueError(f"results: expected one for each of the calls {calls}, got {list(results)!r:.200}")
        for result in results.values():
            if not isinstance(result, str):
                raise TypeError(f"results: expected strings, got {result!r:.80}")
        messages = [{"role": "tool", "tool_call_id": call, "content": results[call]} for call in calls]
        return self._turn(messages, sampling_params, tool_choice)

    def _turn(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None,
        tool_choice: str | Mapping[str, Any] | None,
    ) -> Turn:
        _check_params(sampling_params)
        params = sampling_params or self._sampling_params
        if params.n != 1:
            raise ValueError(f"a conversation has one answer per turn, got n={params.n}")
        if not params.detokenize:
            raise ValueError("sampling_params: a conversation keeps text, expected detokenize=True, got False")
        tools = as_tool_options(self._tools, tool_choice, self._parallel_tool_calls)
        return Turn(self, messages, copy.deepcopy(params), replace(self._options, tools=tools))


class Turn:
    """What is sent next in a conversation, and the answer to it as it arrives.

    Whoever runs it makes its prompt, has it answered with ``params``, reads every output, and lets the turn join at the end.

    Args:
        conversation: which it joins.
        messages: that are sent.
        params: of the answer.
        options: of how it is written, and the tools that the answer may call.
    """

    def __init__(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        options: ChatOptions,
    ) -> None:
        self.params = params
        self._conversation = conversation
        self._before = conversation._transcript
        self._messages = [*self._before.messages, *messages]
        self._options = options
        self._prompt_text = ""
        self._prompt_ids: list[int] = []
        self._output: RequestOutput | None = None

    def prompt(self, loaded: TextInterface) -> Prompt:
        """The turn's prompt: the tokens of all turns before, and those of what the chat template adds.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
            RuntimeError: another turn has joined the conversation.
        """
        self._refuse_if_overtaken()
        before, conversation = self._before, self._conversation
        text = render_chat([as_template_message(message) for message in self._messages], loaded, self._options)
        answer = decode_tokens(loaded.require_tokenizer(), before.answer_ids, skip_special_tokens=False)
        known_text, known_ids = before.prompt_text + answer, [*before.prompt_ids, *before.answer_ids]
        # Not where a template rewrites earlier turns, such as one that drops old reasoning.
        if not text.startswith(known_text):
            known_text, known_ids = "", []
        self._prompt_text = text
        self._prompt_ids = known_ids + tokenize("messages", text[len(known_text) :], loaded, add_special_tokens=False)
        assert loaded.chat_format is not None
        form = loaded.chat_format.answer_form(text, self._options.tools)
        return Prompt(self._prompt_ids, None, **conversation._cache_options, answer_form=form)

    def read(self, output: RequestOutput) -> list[str]:
        """The texts that a stream's next output adds to the answer; its reasoning and its calls are not among them."""
        (part,) = output.outputs
        texts = [piece.text for piece in part.pieces or () if isinstance(piece, TextPiece)]
        if self._output is not None:
            (whole,) = self._output.outputs
            whole.extend(part)
            part = whole
        self._output = replace(output, outputs=[part])
        return texts

    def join(self) -> None:
        """Take the answer, all of which has been read, into the conversation.

        Raises:
            RuntimeError: it was aborted, or another turn has joined the conversation; this one changes nothing then.
        """
        assert self._output is not None
        (part,) = self._output.outputs
        if part.finish_reason == "abort":
            raise RuntimeError("the answer was aborted before its end; its turn does not join the conversation")
        assert part.answer is not None
        transcript = _Transcript(
            [*self._messages, part.answer.as_message()],
            self._prompt_text,
            self._prompt_ids,
            list(part.token_ids),  # the output is the caller's
            part.answer,
            self._output,
        )
        self._refuse_if_overtaken()
        self._conversation._transcript = transcript

    def _refuse_if_overtaken(self) -> None:
        if self._conversation._transcript is not self._before:
            raise RuntimeError(
                "another turn joined the conversation since this one began; fork() it for several at a time"
            )


def _checked_history(history: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of messages to go on from.

    Raises:
        TypeError: they are no list.
        ValueError: one is no message, or the last has calls, which only the conversation that they were made in can answer.
    """
    if isinstance(history, str) or not isinstance(history, Sequence):
        raise TypeError(f"history: expected a list of messages, got {history!r:.80}")
    if not history:
        return []
    try:
        as_conversations([history])
    except ValueError as error:
        raise ValueError(f"history: {str(error).removeprefix('messages: ')}") from error
    messages = [dict(message) for message in history]
    if messages[-1].get("tool_calls"):
        raise ValueError("history: expected it to end with no tool calls, or with their results")
    return copy.deepcopy(messages)


def _check_params(params: SamplingParams | None) -> None:
    if not isinstance(params, SamplingParams | None):
        raise TypeError(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
