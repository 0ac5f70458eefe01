"""Over HTTP: what a tenant computed is there after a restart, for it alone, counted, and cleared by an administrator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.in_process_server import make_client
from support.model_zoo import build
from support.tenant_keys import bearer
from typer.testing import CliRunner

from radixkv import LLM, AsyncLLM
from radixkv.cli.main import app
from radixkv.cli.warm import count_stored, read_prompts, tenant_of, warm_prompts
from radixkv.engine import kv_tiers
from radixkv.llm_options import LLMOptions
from radixkv.model.tokenizer import load_tokenizer
from radixkv.prompts import Prompt
from radixkv.server.access.keys import hash_of, read_keys_file
from radixkv.server.access.tenants import Tenants
from radixkv.server.config import ServerConfig
from radixkv.server.run import namespaces_secret

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")

PROMPT = "The patient's name is John Smith, and the diagnosis, which is strictly confidential, reads as follows: "
ADMIN = bearer("admin")
Ask = Callable[..., Awaitable[tuple[int, dict[str, int] | None]]]


def make(folder: Path) -> LLM:
    tokenizer = load_tokenizer()
    model = build("llama", {"vocab_size": len(tokenizer)})
    sizes: LLMOptions = {"block_size": 4, "num_blocks": 100, "disk_cache_size": "16MiB"}
    return LLM(model, tokenizer=tokenizer, disk_cache=folder, **sizes)


def serve(folder: Path, scenario: Callable[[httpx.AsyncClient, Ask], Awaitable[None]]) -> None:
    """A server over the folder, from its start to its shutdown."""
    tenants = Tenants(["a", "b"], "admin", secret=namespaces_secret({"disk_cache": folder}))

    async def main() -> None:
        engine = AsyncLLM(make(folder))
        async with make_client(engine, tenants=tenants, config=ServerConfig(metrics_key="m")) as client:

            async def ask(key: str, **fields: str) -> tuple[int, dict[str, int] | None]:
                body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
                answer = await client.post("/v1/completions", json=body, headers=bearer(key))
                assert answer.status_code == 200, answer.text
                details = answer.json()["usage"]["prompt_tokens_details"]
                return details["cached_tokens"], details.get("loaded_tokens")

            await scenario(client, ask)
        await engine.shutdown(30.0)

    asyncio.run(main())


def test_tenants_find_their_own_after_a_restart_until_they_are_cleared(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient, ask: Ask) -> None:
        assert await ask("a") == (0, None)
        assert await ask("a", cache_salt="x") == (0, None)
        assert await ask("b") == (0, None)
        pinned = await client.post("/admin/pins", json={"api_key": "b", "prompt": PROMPT}, headers=ADMIN)
        assert pinned.json()["active"]

    async def second(client: httpx.AsyncClient, ask: Ask) -> None:
        (pin,) = (await client.get("/admin/pins", headers=ADMIN)).json()["pins"]
        assert not pin["active"]
        cached, loaded = await ask("a")
        assert loaded == {"disk": cached}
        assert cached > 16
        text = (await client.get("/metrics", headers=bearer("m"))).text
        # Of the last block, whose last token is computed all the same, too.
        assert f'radixkv:tier_hit_blocks_total{{medium="disk"}} {cached // 4 + 1}.0' in text
        assert "radixkv:tier_loads_total 1.0" in text
        cleared = await client.post("/admin/clear_cache", json={"api_key": "a"}, headers=ADMIN)
        assert cleared.status_code == 200
        assert await ask("a") == (0, None)
        assert await ask("a", cache_salt="x") == (0, None)  # it was below, and nowhere else
        assert await ask("b") == (cached, {"disk": cached})
        assert (await client.get("/admin/pins", headers=ADMIN)).json() == {"pins": [{**pin, "active": True}]}

    serve(tmp_path, first)
    serve(tmp_path, second)


def test_prompts_are_warmed_for_a_key_of_the_servers_file(tmp_path: Path) -> None:
    """They used to be stored for a tenant of another name, which no server with such a file has."""
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(f'[keys.ann]\nsha256 = "{hash_of("a")}"\n')
    secret = bytes(range(32))
    served = Tenants(keys=read_keys_file(keys_file), secret=secret).by_api_key("a")
    assert tenant_of("a", keys_file, secret).name == tenant_of("ann", keys_file, secret).name == served.name
    assert tenant_of("a", None, secret).name == Tenants(["a"], secret=secret).by_api_key("a").name != served.name
    assert tenant_of(None, None, secret).name == Tenants(secret=secret).anonymous_tenant().name
    for api_key, message in (("b", "api_key: no such key is configured"), (None, "api_key: expected a configured key")):
        with pytest.raises(ValueError, match=rf"^{message}.* \(keys_file: {keys_file}\)$"):
            tenant_of(api_key, keys_file, secret)


def test_what_was_warmed_is_there_for_its_tenant_and_explained(tmp_path: Path) -> None:
    tenant = Tenants(["a"], secret=namespaces_secret({"disk_cache": tmp_path})).by_api_key("a")
    with make(tmp_path) as llm:
        file = tmp_path / "prompts.jsonl"
        for line, message in (
            (b"17", "expected a text, {"),
            (b"{}", "expected a text, {"),
            (b"hello", r"expected JSON \(a text in quotes\), got hello: "),
            (b'["a"]', "expected a text, {"),
            (b'"\xff"', r'expected JSON \(a text in quotes\), got "\\xff": '),
            (b'{"prompt": 5}', "prompts: 'prompt' must be a string, got 5"),
        ):
            file.write_bytes(b'"this is the first"\n\n' + line)
            with pytest.raises(ValueError, match=rf"^{file}, line 3: {message}"):
                read_prompts(llm, file, tenant)
        file.write_text(json.dumps({"prompt": PROMPT}) + "\n")
        (prompt,) = read_prompts(llm, file, tenant)
        warm_prompts(llm, [prompt])
        assert count_stored(llm, [prompt, replace(prompt, namespace="another")]) == (len(prompt.token_ids) - 1, 1)
    with make(tmp_path) as llm:
        explanation = llm.explain({"prompt": PROMPT, "cache_salt": tenant.namespace()})
        (below,) = explanation.below
        assert (below.medium, below.start, below.num_tokens) == ("disk", 0, len(prompt.token_ids) - 1)
        assert f"{below.num_tokens} tokens from 0 on: in the tier 'disk'" in str(explanation)
        assert not llm.explain(PROMPT).below

    async def scenario(client: httpx.AsyncClient, ask: Ask) -> None:
        assert await ask("b") == (0, None)
        assert await ask("a") == (below.num_tokens, {"disk": below.num_tokens})

    serve(tmp_path, scenario)


def test_a_file_of_prompts_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """Unknown keys were ignored, and a long prompt was refused once those before it were computed, without its line."""
    tenant = Tenants(secret=bytes(32)).anonymous_tenant()
    file = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "Hello"}
    with make(tmp_path) as llm:
        for content, complaint in (
            ({"prompt": PROMPT, "cache_sald": "s"}, "cache_sald: unknown; expected prompt or messages, and cache_salt"),
            ({"messages": [message], "tools": []}, "tools: unknown; expected "),
            ({"prompt": PROMPT, "messages": [message]}, "expected a text, {"),
            ({"messages": [[message], [message]]}, "messages: expected one conversation, got 2$"),
            ({"prompt": PROMPT, "cache_salt": 5}, "cache_salt: expected a text that is not empty, got 5$"),
            ({"prompt": PROMPT, "cache_salt": ""}, "cache_salt: expected a text that is not empty, got ''$"),
            ("word " * 600, "prompt_token_ids: 601 tokens > 400 maximum; a sequence has at most 401, "),
            ("A", "prompt_token_ids: a prompt of length 1 is shorter than a block of 4 tokens, and cannot be stored$"),
        ):
            file.write_text(f'{json.dumps(PROMPT)}\n{json.dumps(content)}\n"last"\n')
            with pytest.raises(ValueError, match=rf"^{file}, line 2: {complaint}"):
                read_prompts(llm, file, tenant)
        for blank in ("", " \n\n"):
            file.write_text(blank)
            with pytest.raises(
                ValueError, match=f"^file: expected prompts, one line of JSON each, got none in {file}$"
            ):
                read_prompts(llm, file, tenant)
        file.write_text(json.dumps({"prompt": PROMPT, "cache_salt": "s"}))
        assert read_prompts(llm, file, tenant)[0].namespace == tenant.namespace("s")


def test_blocks_that_could_not_be_stored_do_not_count_as_stored(tmp_path: Path, tiny_model_folder: Path) -> None:
    """Blocks for which there was no room, or no server, used to count as stored."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(f"{number} " * 300) + "\n" for number in range(8)))
    command = ["warm", str(file), "--model", str(tiny_model_folder), "--disk-cache", str(tmp_path / "store")]
    for options, said in (
        (["--disk-cache-size", "64KiB"], "of 8 prompts are not stored, or not whole: "),
        (["--disk-cache-read-only"], "disk_cache_read_only: expected false"),
    ):
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 1
        assert said in str(result.exception)
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.output.startswith("prompts stored: 8; tokens of them that requests find: ")) == (
        0,
        True,
    )


def test_options_that_change_nothing_that_is_stored_are_none_of_the_command_s(tmp_path: Path) -> None:
    """They used to be taken and ignored."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('"Hello"\n')
    for option in ("--reasoning-parser", "--generation-config", "--seed", "--speculative-config", "--host-cache-size"):
        result = CliRunner().invoke(app, ["warm", str(file), option, "1"])
        assert result.exit_code == 2
        assert "No such option" in result.output


def test_more_is_warmed_than_the_pool_and_the_queue_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one prompt evicted of another was dropped where the queue had no room for it."""
    monkeypatch.setattr(kv_tiers, "_MAX_QUEUED_BYTES", 20_000)
    namespace = Tenants(secret=bytes(32)).anonymous_tenant().namespace()
    with make(tmp_path) as llm:
        num_tokens = llm.engine.cache.num_blocks * llm.engine.cache.block_size // 3
        prompts = [Prompt([first, *range(10, 10 + num_tokens)], namespace=namespace) for first in range(3, 10)]
        warm_prompts(llm, prompts)
        assert count_stored(llm, prompts) == (7 * num_tokens, 0)


def test_a_prompt_of_one_block_lacks_it_until_it_is_stored(tmp_path: Path) -> None:
    """The block counted as stored: all but a prompt's last token is found at most, which was rounded down to whole blocks."""
    namespace = Tenants(secret=bytes(32)).anonymous_tenant().namespace()
    with make(tmp_path) as llm:
        prompts = [Prompt([5, 6, 7, 8], namespace=namespace), Prompt([*range(10, 17)], namespace=namespace)]
        assert count_stored(llm, prompts) == (0, 2)
        warm_prompts(llm, prompts)
        assert count_stored(llm, prompts) == (3 + 6, 0)


def test_a_shared_server_needs_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_secret_file: expected a file where shared_cache is a server"):
        namespaces_secret({"shared_cache": "redis://localhost/0"})
    with pytest.raises(ValueError, match=r"shared_cache: expected redis://, .* got foo://"):
        namespaces_secret({"shared_cache": "foo://bar"})
    file = tmp_path / "secret"
    file.write_text("ab" * 31)
    with pytest.raises(ValueError, match=f"cache_secret_file {file}: expected 64 hexadecimal digits"):
        namespaces_secret({"shared_cache": "redis://localhost/0", "cache_secret_file": file})
    file.write_text("ab" * 32 + "\n")
    assert namespaces_secret({"shared_cache": "redis://localhost/0", "cache_secret_file": file}) == b"\xab" * 32
    assert namespaces_secret({"disk_cache": tmp_path}) == namespaces_secret({"disk_cache": tmp_path})
