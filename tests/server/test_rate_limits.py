"""How much a key may use: what requests reserve of it, what they are charged, and how they are refused."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from support.in_process_server import make_client, served
from support.stalled_loop import stalling
from support.tenant_keys import bearer, entry, tokens_left

from radixkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from radixkv.outputs import RequestMetrics
from radixkv.prompts import Prompt
from radixkv.server.access.rate_limits import RateLimits, Reservation, TokenBucket
from radixkv.server.access.tenants import Tenant, Tenants
from radixkv.server.completions import CompletionRequest
from radixkv.server.config import ServerConfig
from radixkv.server.errors import ApiError
from radixkv.server.generation import Generation

BODY = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}


def test_a_bucket_holds_a_minute_and_refills_steadily() -> None:
    now = [100.0]
    bucket = TokenBucket(60, lambda: now[0])
    bucket.take(60)
    assert bucket.seconds_until(1) == 1
    now[0] += 30
    assert bucket.level == 30
    bucket.take(50)
    assert bucket.seconds_until(10) == 30
    bucket.take(-1000)
    assert bucket.level == 60
    now[0] += 1000
    assert bucket.level == 60


def test_no_minute_has_more_than_its_limit() -> None:
    """However requests are timed, any minute admits at most a full bucket and what flows in, twice the limit."""
    now = [0.0]
    limits = RateLimits(lambda: now[0])
    ann = Tenant("ann", b"", "ann", entry("a", requests_per_minute=30, tokens_per_minute=1000))
    admitted = []
    for _ in range(4000):
        now[0] += 0.25
        with suppress(ApiError):
            limits.admit(ann, SamplingParams(max_tokens=40), [10], 2048)
            admitted.append(now[0])
    for start in admitted:
        in_a_minute = sum(start <= moment < start + 60 for moment in admitted)
        assert in_a_minute * 50 <= 2000
    # Tokens are the scarcer limit here: 20 requests of 50 a minute.
    assert len(admitted) >= (now[0] // 60) * 19


def test_keys_that_are_read_anew_fill_no_bucket() -> None:
    """Requests from before the reload had the old limit, later ones the new one, and each change used to fill the bucket."""
    limits = RateLimits(lambda: 0.0)
    old, new = (
        Tenant("ann", b"", "ann", entry("a", requests_per_minute=requests, tokens_per_minute=1000))
        for requests in (4, 8)
    )
    unlimited = Tenant("ann", b"", "ann", entry("a"))
    for _ in range(3):
        limits.admit(old, SamplingParams(max_tokens=40), [10], 2048)
    reservation = limits.admit(new, SamplingParams(max_tokens=40), [10], 2048)
    for tenant in (old, unlimited, new):
        limits.headers(tenant)
    with pytest.raises(ApiError):
        limits.admit(old, SamplingParams(max_tokens=40), [10], 2048)
    assert limits.headers(new)["x-ratelimit-remaining-requests"] == "1"
    # What is returned goes back into the same bucket.
    reservation.cancel()
    assert limits.headers(new)["x-ratelimit-remaining-requests"] == "2"
    assert limits.headers(new)["x-ratelimit-remaining-tokens"] == "850"


def test_a_prompt_that_is_too_long_takes_no_more_than_it_has() -> None:
    """Each of its answers used to be charged a negative number of tokens, which the refusal then took from the key."""
    limits = RateLimits(lambda: 0.0)
    ann = Tenant("ann", b"", "ann", entry("a", tokens_per_minute=1000))
    limits.admit(ann, SamplingParams(n=4, max_tokens=40), [3001], 256).cancel()
    assert limits.headers(ann)["x-ratelimit-remaining-tokens"] == "1000"


def test_a_beam_search_that_is_ended_early_is_charged_what_it_might_have_taken(llm: LLM) -> None:
    """Its tokens count at its end, so searches that were ended just before it used to be charged their prompts alone."""
    prompts, loaded = [Prompt([5, 6, 7])], llm.engine.loaded
    for params, left in ((BeamSearchParams(beam_width=2, max_tokens=50), 0), (SamplingParams(max_tokens=100), 100)):
        bucket = TokenBucket(103, lambda: 0.0)
        bucket.take(103)
        body, reservation = CompletionRequest(prompt="x"), Reservation(None, bucket, 103)
        Generation(
            loaded, prompts, params, body, [Mock()], [Mock()], Mock(), reservation, "id", None, prompt_only=False
        ).close()
        assert bucket.level == left


async def test_a_search_that_does_not_say_how_long_it_may_be_stays_within_a_keys_limit(llm: LLM) -> None:
    """It was refused: it counted as asking for all that the model has room for."""

    tenants = Tenants(keys={"ann": entry("a", max_tokens=8)})
    async with served(llm, tenants=tenants) as client:
        messages = [{"role": "user", "content": "Count."}]
        body = {"messages": messages, "ignore_eos": True, "use_beam_search": True, "n": 2}
        answer = await client.post("/v1/chat/completions", json=body, headers=bearer("a"))
        assert answer.json()["usage"]["completion_tokens"] == 2 * 8, answer.text


@pytest.mark.parametrize("fields", [{}, {"use_beam_search": True, "n": 2}])
async def test_what_ends_in_the_queue_is_charged_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """It was charged its prompt, and a beam search all that it might have taken, though nothing was computed."""
    monkeypatch.setattr(llm.engine.scheduler, "schedule", list)  # admits none

    tenants = Tenants(keys={"ann": entry("a", tokens_per_minute=5000)})
    limits = RateLimits(lambda: 0.0)
    async with served(llm, tenants=tenants, rate_limits=limits, config=ServerConfig(queue_timeout=0.05)) as client:
        answer = await client.post("/v1/completions", json=BODY | fields, headers=bearer("a"))
        assert answer.status_code == 504, answer.text
        assert await tokens_left(client, "a") == 5000


@pytest.mark.parametrize(("fields", "charged"), [({}, 3), ({"use_beam_search": True, "n": 2}, 3 + 2 + 4 * 4)])
async def test_prompts_that_had_begun_when_others_were_not_accepted_yet_are_charged(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], charged: int
) -> None:
    """A request over replicas that was left then, or took too long, used to be refunded whole, whatever was computed."""

    async def begin_one(*arguments: Any, times: list[RequestMetrics], **options: Any) -> None:
        times[0].scheduled_time = times[0].arrival_time
        stalling(asyncio.get_running_loop())(1000.0)  # its time is over when it has begun, however late that is
        await asyncio.Event().wait()

    monkeypatch.setattr(AsyncLLM, "submit", begin_one)

    tenants = Tenants(keys={"ann": entry("a", requests_per_minute=9, tokens_per_minute=5000)})
    config = ServerConfig(queue_timeout=900)
    async with served(llm, tenants=tenants, rate_limits=RateLimits(lambda: 0.0), config=config) as client:
        body = BODY | {"prompt": [[5, 6, 7], [8, 9]]} | fields
        answer = await client.post("/v1/completions", json=body, headers=bearer("a"))
        assert answer.status_code == 504, answer.text
        assert answer.headers["x-ratelimit-remaining-requests"] == "8"
        assert await tokens_left(client, "a") == 5000 - charged


async def test_a_beam_search_that_finds_fewer_than_were_asked_for_is_complete(llm: LLM) -> None:
    """It counted as ended early: what it had reserved was not given back, and the next prompt's beams took its indexes."""
    lines: list[str] = []
    search = {"use_beam_search": True, "n": 4, "max_tokens": 50, "structured_outputs": {"choice": ["a", "b"]}}

    tenants = Tenants(keys={"ann": entry("a", tokens_per_minute=5000)})
    async with served(llm, tenants=tenants, rate_limits=RateLimits(lambda: 0.0), write_log=lines.append) as client:
        body = {"prompt": ["The sky is", "One"], "echo": True, **search}
        answer = (await client.post("/v1/completions", json=body, headers=bearer("a"))).json()
        assert [(choice["index"], choice["text"][:-1]) for choice in answer["choices"]] == [
            *((0, "The sky is"), (1, "The sky is"), (4, "One"), (5, "One"))
        ]
        assert await tokens_left(client, "a") == 5000 - answer["usage"]["total_tokens"]
    assert json.loads(lines[0])["complete"] is True


async def test_a_beam_search_is_charged_for_the_beams_that_it_does_not_return_too(llm: LLM) -> None:
    """With n=1, a wide search used to be charged no more than one answer."""

    tenants = Tenants(keys={"ann": entry("a", tokens_per_minute=5000)})
    limits = RateLimits(lambda: 0.0)
    async with served(llm, tenants=tenants, rate_limits=limits) as client:
        body = {"prompt": ["One,", "Two,"], "use_beam_search": True, "beam_width": 6, "max_tokens": 8}
        answer = await client.post("/v1/completions", json=body | {"ignore_eos": True}, headers=bearer("a"))
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == 2 * 8
        assert await tokens_left(client, "a") == 5000 - usage["prompt_tokens"] - 2 * 6 * 8


async def test_a_page_of_an_allowed_origin_can_read_what_is_left(llm: LLM) -> None:
    tenants = Tenants(keys={"ann": entry("a", requests_per_minute=1, tokens_per_minute=600)})
    headers = {**bearer("a"), "Origin": "https://app.example"}

    config = ServerConfig(cors_origins=["https://app.example"])
    async with served(llm, tenants=tenants, config=config) as client:
        for status in (200, 429):
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == status
            sent = {name for name in answer.headers if name.startswith("x-ratelimit")}
            assert len(sent) == 6
            assert sent <= set(answer.headers["access-control-expose-headers"].split(", "))


async def test_a_refusal_by_a_limit_names_the_parameter_or_the_time_to_wait(llm: LLM) -> None:
    now = [0.0]
    keys = {
        "ann": entry("a", requests_per_minute=3, tokens_per_minute=600, max_tokens=10, max_num_seqs=2),
        "bob": entry("b"),
    }

    async def ask(client: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
        return await client.post("/v1/completions", json=BODY | fields, headers=bearer(key))

    tenants = Tenants(keys=keys)
    async with served(llm, tenants=tenants, rate_limits=RateLimits(lambda: now[0])) as client:
        for fields, param in (
            ({"max_tokens": 11}, "max_tokens"),
            ({"n": 3, "temperature": 1}, "n"),
        ):
            refused = await ask(client, "a", **fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        answer = await ask(client, "a")
        assert answer.status_code == 200
        used = answer.json()["usage"]["total_tokens"]
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert answer.headers["x-ratelimit-reset-requests"] == "20s"
        assert answer.headers["x-ratelimit-limit-tokens"] == "600"
        assert (await ask(client, "a")).headers["x-ratelimit-remaining-tokens"] == f"{600 - 2 * used}"
        assert (await ask(client, "a", stream=True)).status_code == 200
        refused = await ask(client, "a")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "20"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "3 requests a minute" in refused.json()["error"]["message"]
        # A key without limits is unaffected, and has no such headers.
        other = await ask(client, "b")
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        now[0] += 20
        # A request that does not say how much it wants gets what it may have.
        chat = {"messages": [{"role": "user", "content": "Count."}], "ignore_eos": True}
        answer = await client.post("/v1/chat/completions", json=chat, headers=bearer("a"))
        assert answer.json()["usage"]["completion_tokens"] == 10


async def test_a_default_number_of_tokens_stays_within_a_keys_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a length used to be refused for the default length of the endpoint or the model."""
    loaded = replace(llm.engine.loaded, sampling_defaults={**llm.engine.loaded.sampling_defaults, "max_tokens": 64})
    monkeypatch.setattr(llm.engine, "loaded", loaded)

    tenants = Tenants(keys={"ann": entry("a", max_tokens=8), "bob": entry("b")})
    async with served(llm, tenants=tenants) as client:
        chat = {"messages": [{"role": "user", "content": "Count."}], "ignore_eos": True}
        for path, body in (("completions", {"prompt": "x", "ignore_eos": True}), ("chat/completions", chat)):
            answer = await client.post(f"/v1/{path}", json=body, headers=bearer("a"))
            assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
        answer = await client.post("/v1/chat/completions", json=chat | {"min_tokens": 70}, headers=bearer("b"))
        assert answer.json()["usage"]["completion_tokens"] == 70, answer.text
        refused = await client.post("/v1/chat/completions", json=chat | {"min_tokens": 9}, headers=bearer("a"))
        assert refused.json()["error"]["param"] == "min_tokens"


async def test_explanations_are_bounded_and_not_made_for_refused_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of prompts used to be looked up, while all streams waited, before the key's limits refused the request."""
    looked_up: list[object] = []
    explain = llm.engine.cache.explain

    def noting(*args: Any, **options: Any) -> Any:
        looked_up.append(args[0])
        return explain(*args, **options)

    monkeypatch.setattr(llm.engine.cache, "explain", noting)

    tenants = Tenants(keys={"ann": entry("a", requests_per_minute=1)})
    limits = RateLimits(lambda: 0.0)
    async with served(llm, tenants=tenants, rate_limits=limits) as client:
        for prompts, status in ((17, 400), (2, 200), (1, 429)):
            body = BODY | {"prompt": [[5, 6, 7]] * prompts, "explain_cache": True}
            answer = await client.post("/v1/completions", json=body, headers=bearer("a"))
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["param"] == "explain_cache"
            assert len(looked_up) == (0 if status == 400 else 2)


async def test_a_key_that_is_removed_while_its_request_is_prepared_keeps_its_limits(llm: LLM) -> None:
    tenants = Tenants(keys={"ann": entry("a", max_tokens=10)})
    async with AsyncLLM(llm, tenants=tenants.shares) as engine, make_client(engine, tenants=tenants) as client:
        run_tokenizer = engine.run_tokenizer

        async def remove_key_and_tokenize(*arguments: Any, **options: Any) -> Any:
            tenants.replace_keys({})
            return await run_tokenizer(*arguments, **options)

        engine.run_tokenizer = remove_key_and_tokenize  # type: ignore[method-assign]
        for path, prompt in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            tenants.replace_keys({"ann": entry("a", max_tokens=10)})
            refused = await client.post(path, json=prompt | {"max_tokens": 11}, headers=bearer("a"))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens"), refused.text
