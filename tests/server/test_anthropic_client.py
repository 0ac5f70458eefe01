"""Anthropic's own client, against the server's application.

Its package takes seven seconds to import, so only the process that runs these tests does so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
from support.in_process_server import make_service

from radixkv import LLM, AsyncLLM
from radixkv.server.access.tenants import Tenants
from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig

QUESTION = {"role": "user", "content": "Name three colours."}


def with_anthropic_s_client(llm: LLM, scenario: Callable[[Any], Awaitable[None]], **options: Any) -> None:
    """Run a scenario with Anthropic's own client of a server over this engine."""
    import anthropic

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            service = make_service(engine, tenants=Tenants(["ann"]), **options)
            transport = httpx2.ASGITransport(create_app(service))
            http_client = anthropic.DefaultAsyncHttpxClient(transport=transport)
            async with anthropic.AsyncAnthropic(
                base_url="http://localhost", api_key="ann", max_retries=0, http_client=http_client
            ) as client:
                await scenario(client)

    asyncio.run(main())


def test_anthropic_s_own_client(llm: LLM) -> None:
    import anthropic

    async def scenario(client: Any) -> None:
        options: Any = {"model": "model", "max_tokens": 12, "messages": [QUESTION]}
        options["extra_body"] = {"temperature": 0}
        whole = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            final = await stream.get_final_message()
        assert [block.text for block in final.content] == [block.text for block in whole.content]
        assert final.usage.cache_read_input_tokens > 0
        count = await client.messages.count_tokens(model="model", messages=options["messages"])
        assert count.input_tokens == final.usage.cache_read_input_tokens + final.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            await client.messages.create(**{**options, "model": "claude"})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="bob").messages.create(**options)

    with_anthropic_s_client(llm, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_s_tool_runner_goes_on_without_the_thread_that_is_refused(default_llm: LLM, stream: bool) -> None:
    """It asks the server to hold the conversation; the refusal used to lack what makes it hold the conversation itself."""
    from anthropic import beta_async_tool

    asked: list[str] = []

    @beta_async_tool
    async def weather(city: str) -> str:
        """Tells the weather."""
        asked.append(city)
        return "It rains."

    async def scenario(client: Any) -> None:
        runner = client.beta.messages.tool_runner(
            model="model",
            max_tokens=80,
            messages=[{"role": "user", "content": "What is the weather in Rome?"}],
            tools=[weather],
            tool_choice={"type": "tool", "name": "weather"},
            stream=stream,
            max_iterations=2,
            extra_body={"temperature": 0},
        )
        messages = [await each.get_final_message() if stream else each async for each in runner]
        assert [message.stop_reason for message in messages] == ["tool_use"] * 2
        assert asked[0] == messages[0].content[0].input["city"]
        assert messages[1].usage.input_tokens + messages[1].usage.cache_read_input_tokens > (
            messages[0].usage.input_tokens + messages[0].usage.cache_read_input_tokens
        )

    with_anthropic_s_client(default_llm, scenario)


def test_anthropic_s_client_reads_names_of_requests_and_of_models(llm: LLM) -> None:
    """It reads another header than OpenAI's client does, and other fields."""
    import anthropic

    async def scenario(client: Any) -> None:
        page = await client.models.list()
        first, second = page.data
        assert (page.has_more, page.first_id, page.last_id) == (False, "model", "other")
        assert (first.id, first.type, first.display_name, first.lifecycle) == ("model", "model", "model", "active")
        assert first.created_at == datetime.fromtimestamp(1_700_000_000, UTC)
        assert first.max_input_tokens == llm.engine.loaded.max_model_len
        assert await client.models.retrieve("other") == second
        message = await client.messages.create(model="model", max_tokens=1, messages=[QUESTION])
        assert message._request_id
        with pytest.raises(anthropic.NotFoundError, match="not served here") as unknown:
            await client.models.retrieve("claude")
        assert unknown.value.type == "not_found_error"
        assert unknown.value.request_id

    with_anthropic_s_client(
        llm, scenario, config=ServerConfig(served_model_name=("model", "other")), started=1_700_000_000
    )


def test_without_tokens_to_generate_only_the_prompt_is_cached(llm: LLM) -> None:
    """``max_tokens`` 0, which the client documents for that, was refused."""

    async def scenario(client: Any) -> None:
        text = {"type": "text", "text": "Be brief. " * 40, "cache_control": {"type": "ephemeral"}}
        options: Any = {"model": "model", "messages": [QUESTION], "max_tokens": 0}
        whole = await client.messages.create(**options, system=[text])
        assert whole.usage.cache_creation_input_tokens > 0
        async with client.messages.stream(**options, system=[text]) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert kinds == ["message_start", "message_delta", "message_stop"]
        assert streamed.usage.input_tokens == 1  # all but the last is cached
        for message in (whole, streamed):
            assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)

    with_anthropic_s_client(llm, scenario)


def test_a_request_that_took_longer_than_it_may_is_not_sent_again(llm: LLM) -> None:
    """Clients retry a 504 twice by themselves, and each retry used to take as long."""
    import anthropic

    async def scenario(client: Any) -> None:
        patient = client.with_options(max_retries=2)
        with pytest.raises(anthropic.APIStatusError) as ended:
            await patient.messages.create(model="model", max_tokens=3000, messages=[QUESTION])
        assert ended.value.status_code == 504
        assert ended.value.response.request.headers["x-stainless-retry-count"] == "0"

    with_anthropic_s_client(llm, scenario, config=ServerConfig(request_timeout=1e-9))
