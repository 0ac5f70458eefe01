"""`cache_control`: prefixes that stay cached for a time, within bounds for each tenant."""

from __future__ import annotations

from typing import Any

import pytest
from support.cache_driver import leave
from support.in_process_server import make_client, served

from radixkv import LLM, AsyncLLM
from radixkv.server.access.tenants import Tenants
from radixkv.server.chat.prefix_keeper import PrefixKeeper


async def test_a_prompt_that_is_cleared_while_it_is_pinned_is_a_conflict(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncLLM(llm) as engine, make_client(engine, tenants=Tenants([], "admin")) as client:
        client.headers["Authorization"] = "Bearer admin"
        pin_prompt = engine.pin_prompt

        async def pin_and_clear(*arguments: Any) -> Any:
            made = await pin_prompt(*arguments)
            await engine.reset_prefix_cache()
            return made

        for num_tokens in (15, 16):
            uncleared = await client.post("/admin/pins", json={"prompt": " a" * num_tokens})
            assert (uncleared.status_code, uncleared.json()["active"]) == (200, num_tokens == 16)
        monkeypatch.setattr(engine, "pin_prompt", pin_and_clear)
        cleared = await client.post("/admin/pins", json={"prompt": SYSTEM})
        assert (cleared.status_code, cleared.json()["error"]["param"]) == (409, "prompt")


SYSTEM = "You answer questions about the colours of things, briefly, and never speak of anything else. " * 8


async def test_a_marked_prefix_survives_what_evicts_everything_else(llm: LLM) -> None:
    def body(system: Any, text: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": "model", "max_tokens": 1, "temperature": 0, "system": system, "messages": messages}

    async with AsyncLLM(llm) as engine, make_client(engine) as client:

        async def usage(**fields: Any) -> dict[str, Any]:
            response = await client.post("/v1/messages", json=fields)
            assert response.status_code == 200, response.text
            result: dict[str, Any] = response.json()["usage"]
            return result

        async def fill_cache() -> None:
            await engine.call(lambda engine: leave(engine.cache, [7] * 16 * engine.cache.num_available_blocks))

        marked = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        first = await usage(**body(marked, "What colour is grass?"))
        total = first["input_tokens"] + first["cache_creation_input_tokens"] + first["cache_read_input_tokens"]
        assert first["cache_read_input_tokens"] == 0
        # All whole blocks of the system prompt: it ends a few tokens before the question.
        assert total - 48 < first["cache_creation_input_tokens"] < total
        assert first["cache_creation"]["ephemeral_1h_input_tokens"] == first["cache_creation_input_tokens"]
        both = body(marked, "What colour is grass?") | {"cache_salt": "x", "cache_control": {"type": "ephemeral"}}
        of_both = await usage(**both)
        hour = of_both["cache_creation"]["ephemeral_1h_input_tokens"]
        assert hour == first["cache_creation_input_tokens"]
        # What is kept for an hour does not count as kept for five minutes, too.
        assert 0 < of_both["cache_creation"]["ephemeral_5m_input_tokens"] <= 32
        assert of_both["input_tokens"] + of_both["cache_creation_input_tokens"] == total
        await usage(**body(SYSTEM.upper()[:200], "What colour is grass?"))
        await fill_cache()
        again = await usage(**body(marked, "And what colour is snow?"))
        assert again["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
        assert again["cache_creation_input_tokens"] == 0
        unmarked = await usage(**body(SYSTEM.upper()[:200], "What colour is grass?"))
        assert unmarked["cache_read_input_tokens"] < 32


async def test_marks_within_a_result_and_a_search_result_keep_what_is_before_them(llm: LLM) -> None:
    marked = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
    end = {"type": "text", "text": "What colour is grass?"}
    found = {"type": "search_result", "source": "https://example.org", "title": "Colours", "content": [marked, end]}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "one", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "one", "content": [marked, end]}
    async with served(llm) as client:
        for salt, messages in (
            ("a", [{"role": "user", "content": [found]}]),
            ("b", [{"role": "user", "content": "Hi"}, use, {"role": "user", "content": [result]}]),
        ):
            fields = {"model": "model", "max_tokens": 1, "temperature": 0, "messages": messages, "cache_salt": salt}
            response = await client.post("/v1/messages", json=fields)
            assert response.status_code == 200, response.text
            usage = response.json()["usage"]
            # All whole blocks of the text, which the question and the beginning of the answer follow.
            assert usage["input_tokens"] < 48 < usage["cache_creation_input_tokens"]


async def test_a_request_in_the_queue_is_not_refused_while_its_prefixes_are_found(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = PrefixKeeper.begin
    async with AsyncLLM(llm) as engine, make_client(engine) as client:

        def drain_first(keeper: PrefixKeeper) -> None:
            engine.start_draining()
            begin(keeper)

        monkeypatch.setattr(PrefixKeeper, "begin", drain_first)
        block = {"type": "text", "text": "Hello. " * 30, "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [block]}]
        response = await client.post("/v1/messages", json={"model": "model", "max_tokens": 1, "messages": messages})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["cache_creation_input_tokens"] > 0


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([{"type": "ephemeral"}] * 5, "at most 4"),
        ([{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}], "'1h' must not follow"),
        ([{"type": "persistent"}], "ephemeral"),
        ([{"type": "ephemeral", "ttl": "2h"}], "'5m' or '1h'"),
    ],
)
async def test_impossible_marks_are_refused(llm: LLM, marks: list[dict[str, Any]], message: str) -> None:
    async with served(llm) as client:
        blocks = [{"type": "text", "text": "Hello.", "cache_control": mark} for mark in marks]
        messages = [{"role": "user", "content": blocks}]
        response = await client.post("/v1/messages", json={"model": "model", "max_tokens": 1, "messages": messages})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert message in response.json()["error"]["message"]
