"""OpenAI's `prompt_cache_breakpoint` and `prompt_cache_options`: prefixes that stay cached, in chats and in responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from support.cache_driver import leave
from support.chat_templates import text_interface
from support.in_process_server import make_client
from support.time_limit import HANGING

from radixkv import LLM, AsyncLLM
from radixkv.server.chat.messages import as_messages
from radixkv.server.chat.prefix_keeper import marked_prefixes
from radixkv.server.chat.request import ChatCompletionRequest
from radixkv.server.responses.objects import ResponseObject
from radixkv.server.responses.request import ResponseRequest
from radixkv.server.responses.store import StoredResponse
from radixkv.server.responses.translation import conversation_breakpoints

SYSTEM = "You answer questions about the colours of things, briefly, and never speak of anything else. " * 8
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
LONG_MARK = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}


def chat(text: str, *, mark: dict[str, Any] = MARK, **fields: Any) -> dict[str, Any]:
    system = {"role": "system", "content": [{"type": "text", "text": SYSTEM, **mark}]}
    return {"model": "model", "max_tokens": 1, "messages": [system, {"role": "user", "content": text}], **fields}


def response(text: str, *, mark: dict[str, Any] = MARK, **fields: Any) -> dict[str, Any]:
    system = {"role": "system", "content": [{"type": "input_text", "text": SYSTEM, **mark}]}
    question = {"role": "user", "content": text}
    return {"model": "model", "max_output_tokens": 16, "store": False, "input": [system, question], **fields}


def usage_of(result: Any) -> tuple[int, int, int]:
    """Prompt tokens, those reused, and those computed and kept."""
    usage = result.usage
    if hasattr(usage, "prompt_tokens"):
        details = usage.prompt_tokens_details
        return usage.prompt_tokens, details.cached_tokens, details.cache_write_tokens
    return usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.input_tokens_details.cache_write_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("body", [chat, response])
async def test_a_marked_prefix_survives_what_evicts_everything_else(
    llm: LLM, body: Callable[..., dict[str, Any]], stream: bool
) -> None:
    async with AsyncLLM(llm) as engine, make_client(engine) as http:
        client = openai.AsyncOpenAI(api_key="x", base_url="http://localhost/v1", http_client=http)

        async def ask(fields: dict[str, Any]) -> tuple[int, int, int]:
            create: Any = client.chat.completions.create if body is chat else client.responses.create
            if not stream:
                return usage_of(await create(**fields))
            options = {"stream_options": {"include_usage": True}} if body is chat else {}
            async for event in await create(**fields, **options, stream=True):
                last = event
            return usage_of(last if body is chat else last.response)

        total, cached, written = await ask(body("What colour is grass?"))
        assert cached == 0
        # All whole blocks of the system prompt: it ends a few tokens before the question.
        assert total - 48 < written < total
        assert written % 16 == 0
        await engine.call(lambda engine: leave(engine.cache, [7] * 16 * engine.cache.num_available_blocks))
        assert await ask(body("And of snow?")) == (pytest.approx(total, abs=8), written, 0)
        pins, now = await engine.call(lambda engine: (engine.cache.pins(), engine.cache.now()))
        assert [pin.num_tokens for pin in pins] == [written]
        assert 1700 < pins[0].expires_at - now <= 1800


def test_a_mark_s_time_to_live_takes_precedence_over_the_request_s() -> None:
    parts = [{"type": "text", "text": "a", **LONG_MARK}, {"type": "text", "text": "b"}]
    later = [
        {"type": "text", "text": "c", **MARK},
        {"type": "text", "text": "d", **MARK},
        {"type": "text", "text": "e"},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": later, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]
    request = ChatCompletionRequest.model_validate({"messages": messages})
    first, second = request.breakpoints
    assert (first.ttl, second.ttl) == (43200.0, 1800.0)
    texts = [[part["text"] for part in message["content"]] for message in first.messages]
    assert texts == [["a"]]
    texts = [[part["text"] for part in message["content"]] for message in second.messages]
    # Calls come after the text, so they are not before the mark.
    assert texts == [["a", "b"], ["c", "d"]]
    assert "tool_calls" not in second.messages[-1]
    assert second.messages[-1]["reasoning_content"] == "Hm."
    longer = {"messages": messages, "prompt_cache_options": {"ttl": "12h"}}
    (only,) = ChatCompletionRequest.model_validate(longer).breakpoints
    assert (only.ttl, len(only.messages)) == (43200.0, 2)


def test_marks_in_a_response_are_where_its_messages_are() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b", **MARK}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "x", **LONG_MARK}, {"type": "input_text", "text": "y"}],
        },
        {"role": "user", "content": "c"},
    ]
    body = ResponseRequest.model_validate({"input": items})
    before = [{"role": "assistant", "content": "before"}]
    earlier = StoredResponse(ResponseObject.model_construct(id="r"), before, [], 0, frozenset(), frozenset())
    short, long = conversation_breakpoints(body, earlier)
    assert (short.ttl, long.ttl) == (1800.0, 43200.0)
    assert [message["content"] for message in short.messages] == ["before", "a\nb"]
    assert [message["content"] for message in long.messages] == ["before", "a\nb", None, "x"]
    # What continues the conversation has these marks, too, unless it has later ones.
    earlier = StoredResponse(earlier.response, before, [short, long], 0, frozenset(), frozenset())
    assert conversation_breakpoints(ResponseRequest.model_validate({"input": "a"}), earlier) == [short, long]
    marked = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "d", **MARK}]}]}
    first, second = conversation_breakpoints(ResponseRequest.model_validate(marked), earlier)
    assert (first, second.ttl, second.messages[-1]["content"]) == (long, 1800.0, "d")
    assert conversation_breakpoints(ResponseRequest.model_validate({"input": "a"}), None) == []


async def test_a_conversation_that_goes_on_keeps_what_it_has_marked(llm: LLM) -> None:
    """Only the first request has the mark: its prefix used to be evicted half an hour later, however often it was used."""
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    async with AsyncLLM(llm) as engine, make_client(engine) as http:

        async def ask(**fields: Any) -> dict[str, Any]:
            answer = await http.post("/v1/responses", json={"model": "model", "max_output_tokens": 2, **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()  # type: ignore[no-any-return]

        async def expires_at() -> float:
            (pin,) = await engine.call(lambda engine: engine.cache.pins())
            assert pin.expires_at is not None
            return pin.expires_at

        first = await ask(**{**response("Why?", **explicit), "store": True, "instructions": "Be kind."})
        expires_first = await expires_at()
        kept = first["usage"]["input_tokens_details"]["cache_write_tokens"]
        assert kept > 100
        second = await ask(input="And?", previous_response_id=first["id"], instructions="Be kind.", **explicit)
        assert second["usage"]["input_tokens_details"]["cached_tokens"] >= kept
        assert await expires_at() > expires_first


ENDS_WITH_USER = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}"
    "{% if messages[-1].role not in ('user', 'tool') %}{{ raise_exception('last must be user') }}{% endif %}"
)
THINKS_AT_THE_END = (
    "{% for m in messages %}{{ m.role + ':' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}{{ m.content + '|' }}{% endfor %}"
)
FAILS_AT_THE_END = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ messages[-1].content + 1 }}{% endif %}"
)


@pytest.mark.parametrize("template", [ENDS_WITH_USER, THINKS_AT_THE_END, FAILS_AT_THE_END])
def test_a_mark_keeps_all_before_it_whatever_the_template_does_at_the_end(template: str) -> None:
    loaded = text_interface(template)
    marked = [{"type": "text", "text": "Well.", **MARK}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": marked}]
    body = ChatCompletionRequest.model_validate({"messages": [*messages, {"role": "user", "content": "So?"}]})
    prompt = body.as_prompt(as_messages(body.messages), body.chat_options, loaded).token_ids
    (prefix,) = marked_prefixes(body, body.breakpoints, prompt, loaded).values()
    assert loaded.require_tokenizer().decode(prefix) == "user:Hi|assistant:Well.|user:"


@pytest.mark.parametrize("body", [chat, response])
async def test_without_a_mark_an_explicit_request_uses_no_cache(llm: LLM, body: Callable[..., dict[str, Any]]) -> None:
    path = "/v1/chat/completions" if body is chat else "/v1/responses"
    async with AsyncLLM(llm) as engine, make_client(engine) as http:

        async def num_cached(**fields: Any) -> int:
            answer = await http.post(path, json=body("Why?", **fields))
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            details: dict[str, int] = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            assert details.get("cache_write_tokens", 0) == 0
            return details["cached_tokens"]

        explicit = {"prompt_cache_options": {"mode": "explicit"}}
        assert await num_cached(**explicit, mark={}) == 0
        assert await num_cached(mark={}) == 0  # nothing was written
        assert await num_cached(mark={}) > 100
        assert await num_cached(**explicit, mark={}) == 0
        implicit = {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}
        assert await num_cached(**implicit, mark={}) > 100
        assert await engine.call(lambda engine: engine.cache.pins()) == []


async def test_nothing_counts_as_kept_where_there_is_no_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(llm) as engine, make_client(engine) as http:

        async def no_room(*arguments: Any) -> int:
            return 0

        monkeypatch.setattr(engine, "keep", no_room)
        answer = await http.post("/v1/chat/completions", json=chat("Why?"))
        assert answer.json()["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 0


async def test_pinning_ends_with_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(llm) as engine, make_client(engine) as http:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def never(*arguments: Any) -> int:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        monkeypatch.setattr(engine, "keep", never)
        request = asyncio.ensure_future(http.post("/v1/chat/completions", json=chat("Why?")))
        async with asyncio.timeout(HANGING):
            await begun.wait()
            request.cancel()
            await cancelled.wait()


@pytest.mark.parametrize(
    ("mark", "options", "param"),
    [
        ({"prompt_cache_breakpoint": {"mode": "implicit"}}, {}, "prompt_cache_breakpoint"),
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "5m"}}, {}, "prompt_cache_breakpoint"),
        ({"prompt_cache_breakpoint": {}}, {}, "prompt_cache_breakpoint"),
        ({}, {"prompt_cache_options": {"mode": "off"}}, "prompt_cache_options"),
        ({}, {"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options"),
    ],
)
async def test_impossible_values_are_refused(
    llm: LLM, mark: dict[str, Any], options: dict[str, Any], param: str
) -> None:
    async with AsyncLLM(llm) as engine, make_client(engine) as http:
        for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
            answer = await http.post(path, json=body("Why?", mark=mark, **options))
            assert answer.status_code == 400, answer.text
            assert param in answer.json()["error"]["message"]
