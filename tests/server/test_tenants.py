"""Each API key's prompts are cached in a namespace of their own, which the server derives."""

from __future__ import annotations

import httpx
from support.server_process import ADMIN_KEY, TENANT_A, TENANT_B, ServerProcess

PROMPT = "The patient's name is John Smith, and the diagnosis, which is strictly confidential, reads as follows: " * 4


def ask(client: httpx.Client, **options: object) -> tuple[int, int]:
    """Prompt tokens, and how many of them were reused."""
    response = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **options})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_tenant_gets_no_hit_on_anothers_prompt(server: ServerProcess) -> None:
    def computed() -> float:
        return server.metrics()["radixkv:prompt_tokens_computed_total"]

    def blocks() -> float:
        return 2000 - server.metrics()['radixkv:kv_cache_blocks{state="free"}']

    with server.client(TENANT_A) as a, server.client(TENANT_B) as b:
        num_prompt, cached = ask(a)
        assert cached == 0
        assert ask(a) == (num_prompt, num_prompt - 1)
        one_copy, before = blocks(), computed()
        # Neither with the same prompt, nor with any salt that B could choose.
        for salt in (None, "", TENANT_A, "a"):
            options = {"cache_salt": salt} if salt else {}
            assert ask(b, **options) == (num_prompt, 0 if salt != "" else num_prompt - 1)
        assert computed() - before == 3 * num_prompt + 1
        assert blocks() == 4 * one_copy
        assert ask(a, cache_salt="a") == (num_prompt, 0)
        assert ask(a) == (num_prompt, num_prompt - 1)


def test_an_administrator_clears_all_one_tenant_or_one_salt(server: ServerProcess) -> None:
    with server.client(TENANT_A) as a, server.client(TENANT_B) as b:
        num_prompt, _ = ask(a)
        ask(a, cache_salt="x")
        ask(b)
        num_blocks = -(-num_prompt // 16)
        salt = server.admin("clear_cache", {"api_key": TENANT_A, "cache_salt": "x"})
        assert salt == {
            "namespaces": 1,
            "freed_blocks": num_blocks,
            "blocks_in_use": 0,
            "cached_blocks": 2 * num_blocks,
        }
        assert server.admin("clear_cache", {"api_key": TENANT_A, "cache_salt": "x"})["namespaces"] == 0
        assert ask(a)[1] == num_prompt - 1
        ask(a, cache_salt="x")
        assert server.admin("clear_cache", {"api_key": TENANT_A})["namespaces"] == 2
        assert ask(a)[1] == 0
        assert ask(b)[1] == num_prompt - 1
        assert server.admin("clear_cache", {})["cached_blocks"] == 0
        assert ask(b)[1] == 0
        assert ask(a)[1] == 0


def test_clearing_needs_a_known_tenant(server: ServerProcess) -> None:
    with server.client(ADMIN_KEY) as admin:
        assert admin.post("/admin/clear_cache", json={"api_key": "unknown"}).status_code == 404
        assert admin.post("/admin/clear_cache", json={"cache_salt": "x"}).status_code == 400
        assert admin.post("/admin/clear_cache", json={"namespace": "x"}).status_code == 400


def test_clearing_while_a_request_runs_reports_the_blocks_in_use(default_server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True, "ignore_eos": True}
    with default_server.client(TENANT_A) as a:
        with a.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines)
            cleared = default_server.admin("clear_cache", {})
            assert cleared["blocks_in_use"] > 0
            assert cleared["cached_blocks"] == 0
        assert ask(a)[1] == 0
