"""Requests streamed answers from an OpenAI-compatible server, and records when their pieces arrive."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import httpx

Messages = list[dict[str, str]]
# A request fails after this long without a byte.
_SECONDS_OF_SILENCE = 600.0
# Fields of a delta that hold generated tokens; servers differ in what they call thinking.
_GENERATED = ("content", "reasoning", "reasoning_content", "tool_calls")


@dataclass(slots=True)
class Answer:
    """The outcome of one request. Times are in seconds of the client's clock.

    Attributes:
        due: when the request was scheduled to be sent. Latencies are measured from here, so that a late load generator
            does not hide them.
        arrivals: when each piece arrived: of the text, of what the model thinks before it, or of a tool call.
        finished: when the answer, or the refusal, was complete.
        prompt_tokens, cached_tokens, output_tokens: as the server reports them; ``cached_tokens`` is None where it does not,
            and without any usage each piece counts as a token.
        error: why the request failed; None where it succeeded.
    """

    due: float
    arrivals: list[float] = field(default_factory=list)
    finished: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None


class Client(Protocol):
    """Sends conversations to something that answers them."""

    async def answer(self, messages: Messages, max_tokens: int, due: float) -> Answer:
        """Send ``messages`` now and read the answer to its end. Errors are recorded in the answer, not raised."""


def open_http(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """Connections to a server, unlimited: a wait for a free one would be measured as the server's latency.

    Raises:
        httpx.InvalidURL: the URL is invalid.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=_SECONDS_OF_SILENCE, limits=limits)


class HttpClient:
    """Requests chat completions from a server, within its context.

    Args:
        url: of the server, with or without ``/v1``.
        model: the model to request; None: the first that the server lists.
        api_key: sent as a bearer token.
        ignore_eos: request answers of full length; vLLM, SGLang and RadixKV support the field, other servers may refuse it.
        clock: by which answers are timed; seconds.

    Attributes:
        model: the requested model; None: it is not known yet.

    Raises:
        ValueError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        ignore_eos: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        try:
            self._client = open_http(url.rstrip("/").removesuffix("/v1"), api_key)
        except httpx.InvalidURL as error:
            raise ValueError(
                f"--url: expected an address such as http://localhost:8000, got {url!r} ({error})"
            ) from error
        self.model = model
        self._options: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}

    async def __aenter__(self) -> HttpClient:
        """Learn which model is requested, before any answer is timed.

        Raises:
            ValueError: the server cannot be reached, or lists no model.
        """
        if self.model is None:
            try:
                response = await self._client.get("/v1/models")
                response.raise_for_status()
                self.model = str(response.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError) as error:
                await self._client.aclose()
                raise ValueError(f"--url: {self._client.base_url} does not list its models: {error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def answer(self, messages: Messages, max_tokens: int, due: float) -> Answer:
        answer = Answer(due)
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code == httpx.codes.OK:
                    async for event in stream_events(response):
                        _record_event(event, answer, self._clock())
                else:
                    answer.error = (
                        f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                    )
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.finished = self._clock()
        answer.output_tokens = answer.output_tokens or len(answer.arrivals)
        return answer


async def stream_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The data of a stream's server-sent events."""
    rest = b""
    # httpx's own iterator over lines also splits at characters that JSON strings may contain.
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data" and value.strip() != b"[DONE]":
                yield json.loads(value)


def _record_event(event: dict[str, Any], answer: Answer, now: float) -> None:
    if event.get("error"):
        answer.error = f"in the stream: {str(event['error'])[:200]}"
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if any(delta.get(kind) for kind in _GENERATED):
            answer.arrivals.append(now)
            answer.text += delta.get("content") or ""
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
