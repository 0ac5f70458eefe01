"""What `/live` reports to the page at `/`, and what it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
from support.in_process_server import make_client
from support.server_process import TENANT_A, TENANT_B, ServerProcess
from support.tenant_keys import bearer
from support.time_limit import HANGING

from radixkv import LLM, AsyncLLM, SamplingParams
from radixkv.prompts import Prompt
from radixkv.server.access.tenants import Tenants
from radixkv.server.config import ServerConfig


def complete(http: httpx.Client, prompt: str | list[int], **options: Any) -> None:
    response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0, **options})
    assert response.status_code == 200, response.text


def live(http: httpx.Client, until: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A state for which ``until`` is true: for half a second, the server may repeat an earlier one."""
    deadline = time.monotonic() + HANGING
    while True:
        response = http.get("/live")
        assert response.status_code == 200, response.text
        state: dict[str, Any] = response.json()
        if until(state):
            return state
        assert time.monotonic() < deadline, state


def nodes_of(children: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [node for child in children for node in (child, *nodes_of(child["children"]))]


def test_the_tree_of_the_tenants_own_prompts_with_their_texts(http: httpx.Client) -> None:
    for question in ("Where are books about ships?", "When are you open on Sundays?"):
        complete(http, "You are the assistant of a small public library. " * 4 + question)
    complete(http, "Another one altogether, with a salt", cache_salt="pepper")
    state = live(http, lambda state: len(state["trees"]) == 2)
    tree, salted = sorted(state["trees"], key=lambda tree: tree["namespace"])
    (shared,) = tree["children"]
    assert shared["text"].startswith("You are the assistant of a small public library.")
    assert shared["tokens"] == shared["blocks"] * state["blocks"]["block_size"]
    assert len(shared["children"]) == 2
    assert salted["namespace"].startswith("salt ")
    assert "pepper" not in str(state)
    blocks = state["blocks"]
    assert blocks["in_use"] + blocks["cached"] + blocks["free"] == blocks["total"] == 2000
    assert blocks["cached"] == sum(node["blocks"] for node in nodes_of([*tree["children"], *salted["children"]]))
    assert state["tokens"]["reused"] >= shared["tokens"]


def test_live_shows_nothing_of_other_tenants(server: ServerProcess) -> None:
    with server.client(TENANT_A) as a, server.client(TENANT_B) as b:
        complete(a, "The patient's name is John Smith, and the diagnosis reads as follows: " * 4)
        live(a, lambda state: "John Smith" in str(state))
        state = live(b, lambda state: state["blocks"]["cached"])
        assert state["trees"] == []
        assert state["requests"] == []
        assert "Smith" not in str(state)


def test_a_wide_tree_is_truncated_and_counts_the_hidden_nodes(http: httpx.Client) -> None:
    complete(http, [[1000 + number] * 2 for number in range(60)], max_tokens=1)
    complete(http, [[2000 + number] * 2 for number in range(100)], max_tokens=1)
    state = live(http, lambda state: state["trees"] and state["trees"][0]["hidden"])
    (tree,) = state["trees"]
    assert len(nodes_of(tree["children"])) == 120
    assert tree["hidden"] == 40


def test_a_running_request_is_listed(default_http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with default_http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        state = live(default_http, lambda state: state["requests"])
        (request,) = state["requests"]
        assert request["state"] == "running"
        assert request["prompt_tokens"] == 4
        assert state["running"] == 1
        assert state["blocks"]["in_use"] > 0


def test_a_key_is_needed_for_the_state_and_not_for_the_page(server: ServerProcess) -> None:
    with server.client() as http:
        assert http.get("/live").status_code == 401
        page = http.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for path, kind in (("page.js", "text/javascript"), ("page.css", "text/css"), ("favicon.svg", "image/svg+xml")):
            response = http.get(path)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(kind)
        # It was refused in plain text.
        assert http.get("page.js", headers={"Range": "malformed"}).status_code == 200


def seen_without_keys(llm: LLM, config: ServerConfig | None = None) -> str:
    """`/live` as clients without keys see it, while a request with a salt runs and after several without."""

    tenants = Tenants()

    async def main() -> str:
        async with AsyncLLM(llm) as engine, make_client(engine, tenants=tenants, config=config) as client:
            for prompt, options in (("A plain prompt", {}), ("A salted secret", {"cache_salt": "pepper"})):
                body = {"prompt": prompt * 4, "max_tokens": 2, "temperature": 0, **options}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            salted = Prompt([7] * 40, namespace=tenants.anonymous_tenant().namespace("other"))
            (stream,) = await engine.submit(
                [salted], SamplingParams(max_tokens=4000, ignore_eos=True), "of-another-user"
            )
            await anext(stream)
            text = (await client.get("/live")).text
            stream.close()
            return text

    return asyncio.run(main())


def test_without_keys_no_client_sees_what_was_sent_with_a_salt(default_llm: LLM) -> None:
    text = seen_without_keys(default_llm)
    assert "A plain prompt" in text
    for hidden in ("secret", "salt ", "of-another-user"):
        assert hidden not in text


def test_without_keys_clients_of_other_machines_see_no_prompts(default_llm: LLM) -> None:
    text = seen_without_keys(default_llm, ServerConfig(allow_unauthenticated=True))
    assert "plain" not in text
    assert '"trees":[]' in text


async def test_a_tenant_s_state_does_not_wait_for_the_tokenizing_of_others(llm: LLM) -> None:
    """One lock of all tenants used to be held while one of them waited behind a hundred long texts of its own."""
    tenants, may_go_on = Tenants(["ann", "bob"]), asyncio.Event()
    ann = tenants.by_api_key("ann").name
    async with AsyncLLM(llm) as engine, make_client(engine, tenants=tenants) as client:
        run_tokenizer = engine.run_tokenizer

        async def held_up(function: Any, *, tenant: str = "", num_slots: int = 1) -> Any:
            if tenant == ann:
                waiting.set()
                await may_go_on.wait()
            return await run_tokenizer(function, tenant=tenant, num_slots=num_slots)

        def get(key: str) -> asyncio.Future[httpx.Response]:
            return asyncio.ensure_future(client.get("/live", headers=bearer(key)))

        waiting = asyncio.Event()
        engine.run_tokenizer = held_up  # type: ignore[method-assign]
        first = get("ann")
        await waiting.wait()
        async with asyncio.timeout(HANGING):
            assert (await get("bob")).status_code == 200
        assert not first.done()
        may_go_on.set()
        assert (await first).status_code == 200
