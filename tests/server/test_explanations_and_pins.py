"""Snapshots, pins and explanations over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.in_process_server import served
from support.preloaded_process import COMMAND_LINE, run_preloaded
from support.server_process import ADMIN_KEY, TENANT_A, TENANT_B, ServerProcess

from radixkv import LLM
from radixkv.server.config import ServerConfig

PROMPT = "You are the assistant of a small public library. Answer in one sentence. " * 4
ONE_TOKEN = {"max_tokens": 1, "temperature": 0}


def complete(client: httpx.Client, prompt: str, **options: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": prompt, **ONE_TOKEN, **options})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_response_explains_why_no_more_was_reused(server: ServerProcess) -> None:
    with server.client(TENANT_A) as a:
        complete(a, PROMPT + "Today is 2026-11-20.")
        answer = complete(a, PROMPT + "Today is 2026-11-21.", explain_cache=True)
        (explanation,) = answer["cache_explanations"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert explanation["num_reused_tokens"] == cached > 50
        assert cached + sum(part["num_tokens"] for part in explanation["computed"]) == explanation["num_prompt_tokens"]
        assert "differs at token" in explanation["text"]
        assert explanation["difference"]["cached"][0] != explanation["difference"]["prompt"][0]
        assert complete(a, PROMPT)["cache_explanations"] is None
        messages = [{"role": "user", "content": "Hello"}]
        chat = a.post("/v1/chat/completions", json={"messages": messages, "explain_cache": True, **ONE_TOKEN}).json()
        assert chat["cache_explanation"]["num_prompt_tokens"] == chat["usage"]["prompt_tokens"]
        streamed = {"prompt": PROMPT, "stream": True, "explain_cache": True}
        assert a.post("/v1/completions", json=streamed).json()["error"]["param"] == "explain_cache"


async def test_token_ids_that_cannot_be_explained_are_refused_by_the_name_of_their_field(llm: LLM) -> None:
    """The cache's own error named an argument of the cache."""
    async with served(llm) as client:
        for token_id in (10**6, 2**31, 10**25):
            sent = {"prompt": [5, token_id], "explain_cache": True, **ONE_TOKEN}
            answer = await client.post("/v1/completions", json=sent)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
            assert f"prompt: {token_id} is outside the vocabulary" in answer.json()["error"]["message"]


async def test_where_log_probabilities_of_the_prompt_are_wanted_nothing_is_explained_as_reused(llm: LLM) -> None:
    async with served(llm) as client:
        completion = {"prompt": PROMPT}
        chat = {"messages": [{"role": "user", "content": PROMPT}]}
        for path, body in (
            ("completions", completion | {"prompt_logprobs": 1}),
            ("completions", completion | {"echo": True, "logprobs": 0}),
            ("chat/completions", chat | {"prompt_logprobs": 1}),
        ):
            for _ in range(2):  # the second time, all of it is cached
                sent = {**body, "explain_cache": True, **ONE_TOKEN}
                answer = (await client.post(f"/v1/{path}", json=sent)).json()
            explanation = answer.get("cache_explanation") or answer["cache_explanations"][0]
            reused = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert explanation["num_reused_tokens"] == reused == 0
            assert "log-probabilities of the prompt are wanted" in explanation["text"]


def test_an_explanation_does_not_reveal_another_tenants_prompt(server: ServerProcess) -> None:
    with server.client(TENANT_A) as a, server.client(TENANT_B) as b:
        before = complete(b, PROMPT, explain_cache=True, cache={"read": True, "write": False})["cache_explanations"]
        complete(a, PROMPT)
        after = complete(b, PROMPT, explain_cache=True, cache={"read": True, "write": False})["cache_explanations"]
        assert before == after


@pytest.mark.parametrize("shows", [True, False])
async def test_an_explanation_shows_no_prompts_of_other_users_of_a_shared_tenant(llm: LLM, shows: bool) -> None:
    """Where all clients share one tenant, sixteen tokens at a time of what another had sent could be read from it."""
    async with served(llm, config=ServerConfig(allow_unauthenticated=not shows)) as client:
        body = {"prompt": PROMPT, **ONE_TOKEN}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        probe = {
            "prompt": "You are zzz",
            "explain_cache": True,
            "cache": {"read": False, "write": False},
            **ONE_TOKEN,
        }
        (explanation,) = (await client.post("/v1/completions", json=probe)).json()["cache_explanations"]
        assert (explanation["difference"] is not None) == shows
        assert ("library" in explanation["text"]) == shows


def test_a_pinned_prompt_is_kept_until_it_is_released(server: ServerProcess) -> None:
    with server.client(ADMIN_KEY) as admin, server.client(TENANT_A) as a:
        pin = admin.post("/admin/pins", json={"prompt": PROMPT, "api_key": TENANT_A, "ttl": 3600}).json()
        assert pin["tokens"] % 16 == 0
        assert pin["active"]
        assert 0 < pin["expires_in"] <= 3600
        assert [listed["id"] for listed in admin.get("/admin/pins").json()["pins"]] == [pin["id"]]
        assert complete(a, PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"] >= pin["tokens"]
        assert admin.delete(f"/admin/pins/{pin['id']}").json() == {"pins": []}
        assert admin.delete(f"/admin/pins/{pin['id']}").status_code == 404
        assert admin.post("/admin/pins", json={"prompt": PROMPT}).json()["error"]["param"] == "api_key"
        assert a.get("/admin/pins").status_code == 401
        # A pinned beginning stays cached for every conversation that starts with it.
        system = {"role": "system", "content": PROMPT}
        pin = admin.post("/admin/pins", json={"messages": [system], "api_key": TENANT_A}).json()
        chat = {"messages": [system, {"role": "user", "content": "Hello"}], "max_tokens": 1}
        usage = a.post("/v1/chat/completions", json=chat).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= pin["tokens"] > 0
        admin.delete(f"/admin/pins/{pin['id']}")
        for wrong, param in (
            ({}, "prompt"),
            ({"prompt": "x", "messages": [system]}, "messages"),
            ({"messages": []}, "messages"),
        ):
            refusal = admin.post("/admin/pins", json={**wrong, "api_key": TENANT_A})
            assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, param)
        # Clearing the cache removes pins.
        admin.post("/admin/pins", json={"prompt": PROMPT, "api_key": TENANT_A})
        server.admin("clear_cache", {})
        assert admin.get("/admin/pins").json() == {"pins": []}


def test_a_server_is_inspected_from_the_command_line(server: ServerProcess) -> None:
    with server.client(TENANT_A) as a:
        complete(a, PROMPT + "Where is it?")
        complete(a, PROMPT + "When is it?")
        assert a.get("/admin/snapshot").status_code == 401
    command = ("inspect", f"{server.url}/admin/snapshot")
    inspected = run_preloaded(COMMAND_LINE, *command, "--admin-key", ADMIN_KEY)
    assert inspected.returncode == 0, inspected.stderr
    assert "You are the assistant" in inspected.stdout
    refused = run_preloaded(COMMAND_LINE, *command)
    assert f"{server.url}/admin/snapshot: HTTP Error 401" in refused.stderr
    assert "it needs the server's admin key: --admin-key, or RADIXKV_ADMIN_KEY" in refused.stderr
