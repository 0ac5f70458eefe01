"""`AsyncChat`: a conversation in an asyncio program."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from radixkv.async_llm import AsyncLLM
from radixkv.cache.arguments import is_whole
from radixkv.prompts import Message
from radixkv.sampling_params import SamplingParams
from radixkv.serving.conversation import Conversation, Turn


class AsyncChat(Conversation):
    """A conversation with a model that an `AsyncLLM` runs; otherwise like `Chat`.

    Args:
        llm: the model.
        system: the system prompt; None: the chat template's own, if it has one.
        sampling_params: for turns without their own; by default up to 512 tokens, greedily.
        cache_salt: share cached prefixes only with conversations of the same salt.
        tools: functions that the model may call, in OpenAI's form; `send_results` answers its calls.
        parallel_tool_calls: whether an answer may hold several calls.
        chat_template_kwargs: variables for the chat template, such as ``enable_thinking``.
        history: messages to go on from, such as another conversation's `history`; in place of ``system``.
        priority: of all turns, among the tenant's own requests: lower values are admitted earlier. None: 0.
        tenant: on whose behalf.

    Raises:
        TypeError, ValueError: an argument is impossible; the message names it.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        system: str | None = None,
        sampling_params: SamplingParams | None = None,
        cache_salt: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        history: Sequence[Message] = (),
        priority: int | None = 0,
        tenant: str = "",
    ) -> None:
        if not isinstance(llm, AsyncLLM):
            raise TypeError(f"llm: expected an AsyncLLM, got {type(llm).__name__}")
        if not (priority is None or is_whole(priority)):
            raise TypeError(f"priority: expected a whole number or None, got {priority!r:.80}")
        if not isinstance(tenant, str):
            raise TypeError(f"tenant: expected a string, got {tenant!r:.80}")
        super().__init__(system, sampling_params, cache_salt, tools, parallel_tool_calls, chat_template_kwargs, history)
        self._llm = llm
        self._priority = priority
        self._tenant = tenant

    async def send(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> str:
        """Send a message and return the text of the answer; its reasoning and its calls are in `answer`."""
        return "".join([piece async for piece in self.stream(text, sampling_params, tool_choice)])

    def stream(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[str, None]:
        """Send a message and yield the text of the answer as it is generated.

        The turn joins the conversation when the answer is complete. It does not join, and the conversation stays as it is, if
        the iteration is left early or cancelled, an error is raised, or another turn has completed since this call: end one
        turn before this is called for the next, within an `asyncio.Lock` where messages come from several tasks, or `fork`
        to have several at a time.

        Args:
            tool_choice: which calls this turn's answer may hold, as for `AsyncLLM.chat`.

        Raises:
            TypeError, ValueError: by the call itself, what `Chat.stream` raises for its arguments.
            Exception: by the first iteration, what `AsyncLLM.chat` raises.
            RuntimeError: by the first iteration or at the end, if another turn joined the conversation since this call; or at
                the end, if the answer was aborted.
        """
        return self._run(self._message(text, sampling_params, tool_choice))

    async def send_results(
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
            ValueError: there is not exactly one result for each of the last answer's calls.
            Exception: what `stream` raises.
        """
        return "".join([piece async for piece in self._run(self._results(results, sampling_params, tool_choice))])

    async def _run(self, turn: Turn) -> AsyncGenerator[str, None]:
        outputs = self._llm.stream_prompt(turn.prompt, turn.params, priority=self._priority, tenant=self._tenant)
        async with aclosing(outputs):
            async for output in outputs:
                for text in turn.read(output):
                    yield text
        turn.join()
