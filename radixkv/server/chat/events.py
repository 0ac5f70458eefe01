"""The answers to one chat request as events, between the engine and the forms in which clients read answers.

::

    /v1/chat/completions --.                                            .-> chunks of /v1/chat/completions
    another form of request +-> ChatCompletionRequest -> start_chat ->--+-> events of another form
                                                          ChatEvents
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from radixkv.outputs import CompletionOutput, RequestMetrics
from radixkv.prompts import Prompt
from radixkv.server.access.rate_limits import default_max_tokens
from radixkv.server.access.tenants import Tenant
from radixkv.server.chat.answer_tokens import AnswerTokens, LocatedPiece
from radixkv.server.chat.messages import as_messages
from radixkv.server.chat.prefix_keeper import PrefixKeeper
from radixkv.server.chat.prompt_caching import Breakpoint
from radixkv.server.chat.request import ChatCompletionRequest
from radixkv.server.errors import client_errors
from radixkv.server.generation import ChoiceDelta, Generation, extend_choice
from radixkv.server.output.logprobs import TextLength
from radixkv.server.output.response_size import check_response_size
from radixkv.server.protocol import Usage, finish_reason
from radixkv.server.service import Service
from radixkv.server.time_limits import Deadlines
from radixkv.serving.answer_reader import PieceReader
from radixkv.tools.chat_format import AnswerForm
from radixkv.tools.pieces import AnswerPiece, ReadPiece, ToolCallArguments, ToolCallBegin

ChatFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """What is new in one choice, or all of it.

    Attributes:
        located: new text, reasoning and parts of tool calls, in order, each with its tokens, if asked for; may be empty.
        output: the new tokens and their log-probabilities; its text is what the model wrote, markers included.
        finish_reason: why the choice ended; None while it has not. The output's own does not distinguish tool calls.
    """

    choice: int
    located: list[LocatedPiece]
    output: CompletionOutput
    finish_reason: ChatFinishReason | None

    @property
    def pieces(self) -> list[AnswerPiece]:
        """What is new, without its tokens."""
        return [piece for piece, _ in self.located]


async def start_chat(
    service: Service,
    body: ChatCompletionRequest,
    tenant: Tenant,
    request_id: str,
    breakpoints: Sequence[Breakpoint] | None = None,
    *,
    prompt_only: bool = False,
    locates_tokens: bool = False,
) -> ChatEvents:
    """Check a request, write its prompt and submit it.

    Args:
        request_id: unique among the unfinished requests; see `new_id`.
        breakpoints: the ends of what is to stay cached, in the order of the prompt; None: those in the body.
        prompt_only: see `Generation.start`.
        locates_tokens: give each piece of an answer with its tokens, which answers that may reason need in any case.

    Returns:
        The events to come. Iterate them once to the end, or collect them, or close them.

    Raises:
        ApiError: a value is impossible: 400, with the name of the field.
        RequestTimeoutError: it took longer than the first time limit.
        Exception: what `AsyncLLM.submit` raises.
    """
    deadlines = service.deadlines(body)
    with client_errors(body.request_field_names):
        if body.top_logprobs and not body.logprobs:
            raise ValueError("top_logprobs: only for logprobs=true")
        if body.prediction is not None:
            service.check_length("prediction", body.prediction.text)
        breakpoints = body.breakpoints if breakpoints is None else breakpoints
        async with deadlines.before_admission() as timers:
            prompt = service.with_cache_options(await chat_prompt(service, body, tenant), body, tenant)
            if body.prompt_cache_options is not None and not body.prompt_cache_options.allows(breakpoints):
                prompt = replace(prompt, read_cache=False, write_cache=False)
            defaults, max_model_len = service.llm.loaded.sampling_defaults, service.llm.loaded.max_model_len
            max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            if max_tokens is None:
                max_tokens = default_max_tokens(defaults.get("max_tokens"), body.min_tokens or 0, tenant)
            prompt = body.truncated(prompt, max_tokens, max_model_len)
            top_logprobs = body.top_logprobs or 0 if body.logprobs else None
            params = body.params(max_tokens, top_logprobs, body.prompt_logprobs, defaults)
            check_response_size(body, [prompt], params, max_model_len)
            generation = await Generation.start(
                service, tenant, [prompt], params, body, request_id, timers, deadlines, prompt_only=prompt_only
            )
        keeper = PrefixKeeper(service.llm, tenant.name, body, breakpoints, prompt)
        form = prompt.answer_form
        new_length = None
        if locates_tokens or (form is not None and form.may_reason):
            new_length = partial(
                TextLength,
                service.token_texts,
                prompt.token_ids,
                skip_special_tokens=body.skip_special_tokens is not False,
                shown_special_tokens=() if form is None else form.special_markers,
            )
        return ChatEvents(generation, form, keeper, deadlines, new_length)


async def chat_prompt(service: Service, body: ChatCompletionRequest, tenant: Tenant) -> Prompt:
    """The prompt of a request, as the chat template writes it.

    Raises:
        PromptTooLongError: its texts cannot fit into the model.
        TypeError, ValueError: what `chat_options` and `as_prompt` of `ChatCompletionRequest` raise.
    """
    options = body.chat_options
    service.check_chat_length(body.messages, options)
    write = partial(body.as_prompt, as_messages(body.messages), options)
    return await service.llm.run_tokenizer(write, tenant=tenant.name)


class ChatEvents:
    """The answers to one chat request. Iterate it once, to the end, or `collect` it, or call `close`.

    Attributes:
        generation: of the request's one prompt.

    Args:
        form: of the answers; None: they are text alone.
        new_length: makes the `TextLength` of an answer; None: the tokens of its pieces are not asked for.
    """

    def __init__(
        self,
        generation: Generation,
        form: AnswerForm | None,
        keeper: PrefixKeeper,
        deadlines: Deadlines,
        new_length: Callable[[], TextLength] | None,
    ) -> None:
        self.generation = generation
        self._form = form
        self._keeper = keeper
        self._deadlines = deadlines
        self._kept: Mapping[float, int] = {}
        self._new_length = new_length
        self._tokens: dict[int, AnswerTokens] = {}  # by choice

    @property
    def calls_required(self) -> bool:
        """Whether each answer, after its reasoning, is calls and no text."""
        return self._form is not None and self._form.calls_required

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        usage = self.generation.usage
        usage.completion_tokens_details.reasoning_tokens = sum(tokens.num_reasoning for tokens in self._tokens.values())
        if self._keeper.is_needed:
            usage.prompt_tokens_details.cache_write_tokens = sum(self.num_written.values())
        return usage

    @property
    def num_written(self) -> dict[float, int]:
        """Tokens that were computed now and are kept, by time to live; each token counts for the longest."""
        before = self.generation.usage.prompt_tokens_details.cached_tokens
        written = {}
        for ttl in sorted(self._kept, reverse=True):
            written[ttl] = max(0, self._kept[ttl] - before)
            before = max(before, self._kept[ttl])
        return written

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.generation.request_id

    @property
    def times(self) -> RequestMetrics | None:
        """When the prompt was admitted and had its first token; None before."""
        return self.generation.times

    @property
    def complete(self) -> bool:
        """Whether all choices have ended by themselves."""
        return self.generation.complete

    def close(self) -> None:
        """Abort what is unfinished."""
        self._keeper.close()
        self.generation.close()

    async def wait_until_kept(self) -> None:
        """Wait until what the request marked is kept, after the first event and before the client sees it.

        Raises:
            RequestTimeoutError: it took longer than a time limit.
        """
        async with self._deadlines.within_first_token_limit():
            self._kept = await self._keeper.kept()

    async def __aiter__(self) -> AsyncGenerator[ChatEvent, None]:
        """The events. What the request marked is kept as soon as the prompt is computed."""
        self._keeper.begin()
        reader = PieceReader(self._form)
        # By choice: the arguments of its last call so far.
        arguments: dict[int, list[str]] = {}
        async with aclosing(aiter(self.generation)) as deltas:
            async for delta in deltas:
                output = delta.output
                read = reader.read(delta.choice, output.text, output.finish_reason is not None)
                located = self._located(delta, read)
                for piece, _ in located:
                    if isinstance(piece, ToolCallBegin):
                        arguments[delta.choice] = []
                    elif isinstance(piece, ToolCallArguments):
                        arguments[delta.choice].append(piece.text)
                reason = _finish_reason(output, arguments.get(delta.choice, []))
                self._keeper.prompt_is_computed()
                yield ChatEvent(delta.choice, located, output, reason)
        async with self._deadlines.within_total_limit():
            self._kept = await self._keeper.kept()

    def _located(self, delta: ChoiceDelta, read: Sequence[ReadPiece]) -> list[LocatedPiece]:
        """New pieces with their tokens."""
        if self._new_length is None:
            return [LocatedPiece(piece, ()) for piece, _ in read]
        if delta.choice not in self._tokens:
            self._tokens[delta.choice] = AnswerTokens(self._new_length())
        return self._tokens[delta.choice].locate(delta.output, read)

    async def collect(self) -> list[ChatEvent]:
        """All choices, complete: one event for each, without the tokens of its pieces."""
        outputs: dict[int, CompletionOutput] = {}
        located: defaultdict[int, list[LocatedPiece]] = defaultdict(list)
        last: dict[int, ChatEvent] = {}
        async with aclosing(aiter(self)) as events:
            async for event in events:
                extend_choice(outputs, event.choice, event.output)
                located[event.choice] += [LocatedPiece(piece, ()) for piece in event.pieces]
                last[event.choice] = event
        return [replace(last[choice], located=located[choice], output=outputs[choice]) for choice in sorted(last)]


def _finish_reason(output: CompletionOutput, arguments: Sequence[str]) -> ChatFinishReason | None:
    """Why an answer ended; a call that a stop string has cut off does not count, because it cannot be executed.

    Args:
        arguments: the pieces of the last call's arguments; empty: there is no call.
    """
    reason = finish_reason(output)
    return "tool_calls" if reason == "stop" and _is_json("".join(arguments)) else reason


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
