"""`Chat`: a conversation in which every turn reuses all that came before it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from radixkv.llm import LLM
from radixkv.outputs import RequestOutput
from radixkv.prompts import Prompt, as_template_message, cache_options, encode, render_chat
from radixkv.sampling.detokenizer import decode_tokens
from radixkv.sampling_params import SamplingParams
from radixkv.tools.definitions import ParsedAnswer, ToolOptions, as_tool_options
from radixkv.tools.pieces import TextPiece


class Chat:
    """A conversation with a model.

    The conversation is kept as token ids. The next turn's prompt is those ids, the model's own answer exactly as it was
    generated, and the tokens of what the chat template adds; so all of it is found in the cache. (Rendering and
    tokenizing the whole text anew would often give other tokens for the answer, and lose it.)

    Args:
        llm: the model.
        system: the system prompt; None: the chat template's own, if it has one.
        sampling_params: for turns without their own; by default up to 512 tokens, greedily.
        cache_salt: share cached prefixes only with conversations of the same salt.
        tools: functions that the model may call, in OpenAI's form; `send_results` answers its calls.
        parallel_tool_calls: whether an answer may hold several calls.
        chat_template_kwargs: variables for the chat template, such as ``enable_thinking``.

    Raises:
        TypeError, ValueError: an argument is impossible; the message names it.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None = None,
        sampling_params: SamplingParams | None = None,
        cache_salt: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(llm, LLM):
            raise TypeError(f"llm: expected an LLM, got {type(llm).__name__}")
        if not isinstance(system, str | None):
            raise TypeError(f"system: expected a string or None, got {system!r:.80}")
        _check_params(sampling_params)
        cache_options(cache_salt, None)
        as_tool_options(tools, None, parallel_tool_calls)
        self._llm = llm
        self._sampling_params = sampling_params or SamplingParams(temperature=0.0, max_tokens=512)
        self._cache_salt = cache_salt
        self._tools = tools
        self._parallel_tool_calls = parallel_tool_calls
        self._chat_template_kwargs = chat_template_kwargs
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._token_ids: list[int] = []
        self._rendered = ""
        # The last turn's answer in its parts; None before the first.
        self.answer: ParsedAnswer | None = None
        # The request of the last answer as it finished, and how many tokens it generated.
        self.last_output: RequestOutput | None = None
        self.last_num_tokens = 0

    @property
    def history(self) -> list[dict[str, Any]]:
        """A copy of all messages so far: system, user and assistant in turn, and the results of tools."""
        return [dict(message) for message in self._messages]

    def send(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> str:
        """Send a message and return the text of the answer; its reasoning and its calls are in `answer`."""
        return "".join(self.stream(text, sampling_params, tool_choice))

    def stream(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> Iterator[str]:
        """Send a message and yield the text of the answer as it is generated.

        The turn joins the conversation when the answer is complete. It does not join, and the conversation stays as it is, if
        the iteration is left early, an error is raised, or another turn completes first (`fork` to have several at a time).
        Afterwards `answer` holds the whole answer, and `last_output` the times and how many tokens were reused.

        Args:
            tool_choice: which calls this turn's answer may hold, as for `LLM.chat`.

        Raises:
            TypeError: ``text`` is not a string, or ``sampling_params`` are not SamplingParams.
            ValueError: parameters ask for several answers, or for one without text; the conversation is too long for the
                model; or the last answer's calls have no results.
            RuntimeError: at the end, if another turn joined the conversation since this one began.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a string, got {text!r:.80}")
        if self.answer is not None and self.answer.tool_calls:
            raise ValueError("the last answer has tool calls: send_results() comes first")
        return self._begin([{"role": "user", "content": text}], sampling_params, tool_choice)

    def send_results(
        self,
        results: Mapping[str, str],
        sampling_params: SamplingParams | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> str:
        """Send what the last answer's calls returned, and return the text of the next answer; otherwise like `stream`.

        Args:
            results: each call's result as text, by the call's id.

        Raises:
            TypeError: a result is not a string.
            ValueError: there is not exactly one result for each of the last answer's calls; or what `stream` raises.
        """
        calls = [] if self.answer is None else [call.id for call in self.answer.tool_calls]
        if not calls or set(results) != set(calls):
            raise ValueError(f"results: expected one for each of the calls {calls}, got {list(results)!r:.200}")
        for result in results.values():
            if not isinstance(result, str):
                raise TypeError(f"results: expected strings, got {result!r:.80}")
        messages = [{"role": "tool", "tool_call_id": call, "content": results[call]} for call in calls]
        return "".join(self._begin(messages, sampling_params, tool_choice))

    def fork(self) -> Chat:
        """A second conversation that goes on from here; both share what has been computed."""
        return copy.copy(self)  # turns replace what is in it, and change none of it

    def _begin(
        self,
        new: list[dict[str, Any]],
        sampling_params: SamplingParams | None,
        tool_choice: str | Mapping[str, Any] | None,
    ) -> Iterator[str]:
        _check_params(sampling_params)
        params = sampling_params or self._sampling_params
        if params.n != 1:
            raise ValueError(f"a conversation has one answer per turn, got n={params.n}")
        if not params.detokenize:
            raise ValueError("sampling_params: a conversation keeps text, expected detokenize=True, got False")
        tools = as_tool_options(self._tools, tool_choice, self._parallel_tool_calls)
        return self._stream(new, params, tools)

    def _stream(self, new: list[dict[str, Any]], params: SamplingParams, tools: ToolOptions | None) -> Iterator[str]:
        loaded = self._llm.engine.loaded
        before = self._messages
        messages = [*before, *new]
        rendered = render_chat(
            [as_template_message(message) for message in messages],
            loaded,
            tools=tools,
            chat_template_kwargs=self._chat_template_kwargs,
        )
        if rendered.startswith(self._rendered):
            known_ids, rest = self._token_ids, rendered[len(self._rendered) :]
        else:  # a template that rewrites earlier turns, such as one that drops old reasoning
            known_ids, rest = [], rendered
        prompt_ids = known_ids + encode("messages", rest, loaded, add_special_tokens=False)
        assert loaded.chat_format is not None
        form = loaded.chat_format.answer_form(rendered, tools)
        prompt = Prompt(prompt_ids, None, **cache_options(self._cache_salt, None), answer_form=form)
        answer_ids: list[int] = []
        answer = output = None
        for output in self._llm.stream_prompt(prompt, params):
            (part,) = output.outputs
            answer_ids += part.token_ids
            answer = part.answer
            yield from (piece.text for piece in part.pieces or () if isinstance(piece, TextPiece))
        assert answer is not None
        if self._messages is not before:
            raise RuntimeError(
                "another turn joined the conversation since this one began; fork() it for several at a time"
            )
        self.answer = answer
        self.last_output, self.last_num_tokens = output, len(answer_ids)
        self._messages = [*messages, answer.as_message()]
        self._token_ids = prompt_ids + answer_ids
        self._rendered = rendered + decode_tokens(loaded.require_tokenizer(), answer_ids, skip_special_tokens=False)


def _check_params(params: SamplingParams | None) -> None:
    if not isinstance(params, SamplingParams | None):
        raise TypeError(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
