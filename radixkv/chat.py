"""`Chat`: a conversation in which every turn reuses all that came before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from radixkv.llm import LLM
from radixkv.prompts import Message
from radixkv.sampling_params import SamplingParams
from radixkv.serving.conversation import Conversation, Turn


class Chat(Conversation):
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
        history: messages to go on from, such as another conversation's `history`; in place of ``system``.

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
        history: Sequence[Message] = (),
    ) -> None:
        if not isinstance(llm, LLM):
            raise TypeError(f"llm: expected an LLM, got {type(llm).__name__}")
        super().__init__(system, sampling_params, cache_salt, tools, parallel_tool_calls, chat_template_kwargs, history)
        self._llm = llm

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
        the iteration is left early, an error is raised, or another turn has completed since this call (`fork` to have several
        at a time).
        Afterwards `answer` holds the answer in its parts, and `last_output` also its tokens, log-probabilities and times, and
        how many tokens were reused.

        Args:
            tool_choice: which calls this turn's answer may hold, as for `LLM.chat`.

        Raises:
            TypeError: ``text`` is not a string, or ``sampling_params`` are not SamplingParams.
            ValueError: parameters ask for several answers, or for one without text; the conversation is too long for the
                model; or the last answer's calls have no results.
            RuntimeError: by the first iteration or at the end, if another turn joined the conversation since this call.
        """
        return self._run(self._message(text, sampling_params, tool_choice))

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
            TypeError: ``results`` is not a dictionary, or a result is not a string.
            ValueError: there is not exactly one result for each of the last answer's calls; or what `stream` raises.
        """
        return "".join(self._run(self._results(results, sampling_params, tool_choice)))

    def _run(self, turn: Turn) -> Iterator[str]:
        for output in self._llm.stream_prompt(turn.prompt(self._llm.engine.loaded), turn.params):
            yield from turn.read(output)
        turn.join()
