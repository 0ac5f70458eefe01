"""Keys in a file: who may use the server, how much, and until when."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi.security import HTTPAuthorizationCredentials
from support.in_process_server import make_client
from typer.testing import CliRunner

from radixkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams, TenantShare
from radixkv.cli.main import app
from radixkv.prompts import Prompt
from radixkv.server.completions import CompletionRequest
from radixkv.server.errors import ApiError
from radixkv.server.generation import Generation
from radixkv.server.keys import Key, hash_of, new_key, read_keys_file
from radixkv.server.rate_limits import RateLimits, Reservation, TokenBucket
from radixkv.server.reload import KeysReload
from radixkv.server.tenants import Tenant, Tenants
from radixkv.server.time_limits import TimeLimits

BODY = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}


def entry(key: str, **fields: Any) -> Key:
    return Key(sha256=hash_of(key), **fields)


def keys_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_file_is_read_with_all_its_fields(tmp_path: Path) -> None:
    text = f"""
    [keys.ann]
    sha256 = "{hash_of("a")}"
    weight = 2.5
    expires = 2027-01-31T00:00:00Z
    requests_per_minute = 60
    tokens_per_minute = 100_000
    max_num_seqs = 4
    max_cached_share = 0.25
    max_tokens = 512
    [keys."bob at work"]
    sha256 = "{hash_of("b")}"
    """
    keys = read_keys_file(keys_file(tmp_path / "keys.toml", text))
    assert list(keys) == ["ann", "bob at work"]
    assert keys["ann"] == entry(
        "a",
        weight=2.5,
        expires=datetime(2027, 1, 31, tzinfo=UTC),
        requests_per_minute=60,
        tokens_per_minute=100_000,
        max_num_seqs=4,
        max_cached_share=0.25,
        max_tokens=512,
    )
    shares = Tenants(keys=keys).shares
    assert TenantShare(2.5, 4, 0.25) in shares.values()
    assert hash_of("a") not in repr(keys["ann"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys = 3", r"keys: expected a table \[keys.NAME\] per key, got 3"),
        ("[key.ann]", r"key: unknown; expected a table \[keys.NAME\] per key"),
        ("[keys.ann", "not TOML: "),
        ("[keys.ann]", "keys.ann.sha256: missing; `radixkv keys new ann` makes"),
        ("[keys]\nann = 3", "keys.ann: expected a table, got 3"),
        ('[keys.ann]\nsha256 = "x"', "keys.ann.sha256: expected 64 hexadecimal digits in lower case, got 1 characters"),
        ("[keys.ann]\nSHA\nwieght = 1.0", "keys.ann.wieght: unknown; did you mean weight\\?"),
        ("[keys.ann]\nSHA\nweight = 0.0", "keys.ann.weight: expected a number above 0 and up to 1000, got 0.0"),
        (
            "[keys.ann]\nSHA\nmax_tokens = 0",
            "keys.ann.max_tokens: expected a whole number of at least 1 or None, got 0",
        ),
        (
            "[keys.ann]\nSHA\nmax_cached_share = 25",
            "keys.ann.max_cached_share: expected a number from 0 to 1 or None, got 25",
        ),
        ("[keys.ann]\nSHA\nexpires = 'soon'", "keys.ann.expires: expected a date and time or None, got 'soon'"),
        ("[keys.ann]\nSHA\n[keys.bob]\nSHA", "keys.bob: the same key as keys.ann"),
        ('[keys."a\\nb"]\nSHA', "expected a name of up to 64 printable ASCII characters"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = keys_file(tmp_path / "keys.toml", text.replace("SHA", f'sha256 = "{hash_of("k")}"'))
    with pytest.raises(ValueError, match=message) as caught:
        read_keys_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_key_is_made_and_shown_once(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["keys", "new", "ann-2"])
    assert result.exit_code == 0
    key = result.stdout.splitlines()[0].split()[-1]
    assert read_keys_file(keys_file(tmp_path / "keys.toml", result.stdout)) == {"ann-2": entry(key)}
    assert len(new_key()) > 40
    assert new_key() != new_key()
    assert isinstance(CliRunner().invoke(app, ["keys", "new", "a b"]).exception, ValueError)


def test_who_is_let_in() -> None:
    now = [datetime(2027, 1, 30, tzinfo=UTC).timestamp()]
    ends = datetime(2027, 1, 31)
    keys = {"ann": entry("key-a", weight=3.0), "bob": entry("key-b", expires=ends, max_num_seqs=2)}
    tenants = Tenants(["key-c"], None, keys, clock=lambda: now[0], metrics_key="key-of-metrics")

    def sent(key: str) -> Tenant:
        return tenants.authenticate(HTTPAuthorizationCredentials(scheme="Bearer", credentials=key))

    ann, bob, other = (sent(f"key-{letter}") for letter in "abc")
    assert [tenant.label for tenant in (ann, bob)] == ["ann", "bob"]
    assert len({ann.namespace(), bob.namespace(), other.namespace(), ann.namespace("salt")}) == 4
    assert tenants.shares == {ann.name: TenantShare(3.0), bob.name: TenantShare(1.0, 2), other.name: TenantShare()}
    assert tenants.by_api_key("bob") == tenants.by_api_key("key-b") == bob
    for wrong in ("", "key", "ann", hash_of("key-a")):
        with pytest.raises(ApiError):
            sent(wrong)
    now[0] += 86_400
    with pytest.raises(ApiError):
        sent("key-b")
    # A new key under the same name finds what the old one cached; a removed one is not let in.
    tenants.replace_keys({"ann": entry("key-a2")})
    assert sent("key-a2").namespace() == ann.namespace()
    with pytest.raises(ApiError):
        sent("key-a")
    for other in ("key-c", "key-of-metrics"):
        with pytest.raises(ValueError, match=r"keys\.eve: given as an API, admin or metrics key, too"):
            tenants.replace_keys({"eve": entry(other)})
    assert sent("key-a2")
    assert not Tenants(keys={}).open_to_all


def test_a_reload_replaces_the_keys_and_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path / "keys.toml", f'[keys.ann]\nsha256 = "{hash_of("a")}"')
    tenants = Tenants(keys=read_keys_file(path))
    told: list[Mapping[str, TenantShare]] = []

    class Told:
        async def set_tenants(self, shares: Mapping[str, TenantShare]) -> None:
            told.append(shares)

    async def main() -> None:
        reload = KeysReload(path, tenants, Told())
        before = tenants.shares
        keys_file(path, "[keys.bob]\nsha = 1")
        reload()
        path.rename(tmp_path / "away.toml")
        reload()
        errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 2
        assert "keys.bob.sha: unknown; did you mean sha256?" in errors[0]
        assert tenants.shares == before
        keys_file(path, f'[keys.bob]\nsha256 = "{hash_of("b")}"\nweight = 4.0')
        reload()
        await asyncio.sleep(0)
        assert told == [tenants.shares]
        assert [share.weight for share in told[0].values()] == [4.0]

    asyncio.run(main())


def test_a_reload_does_not_wait_for_an_earlier_one(tmp_path: Path) -> None:
    """One replica that hung used to keep the next keys from all replicas, and from the queue, for two minutes."""
    path = tmp_path / "keys.toml"
    tenants = Tenants(keys={})
    told: list[list[float]] = []

    class Hanging:
        async def set_tenants(self, shares: Mapping[str, TenantShare]) -> None:
            told.append([share.weight for share in shares.values()])
            await asyncio.Event().wait()

    async def main() -> None:
        reload = KeysReload(path, tenants, Hanging())
        for weight in (2.0, 3.0):
            keys_file(path, f'[keys.bob]\nsha256 = "{hash_of("b")}"\nweight = {weight}')
            reload()
        await asyncio.sleep(0)
        assert told == [[2.0], [3.0]]

    asyncio.run(main())


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
        Generation(loaded, prompts, params, body, [Mock()], [Mock()], Mock(), reservation, "id").close()
        assert bucket.level == left


def test_a_search_that_does_not_say_how_long_it_may_be_stays_within_a_keys_limit(llm: LLM) -> None:
    """It was refused: it counted as asking for all that the model has room for."""

    async def main() -> None:
        tenants = Tenants(keys={"ann": entry("a", max_tokens=8)})
        async with AsyncLLM(llm, tenants=tenants.shares) as engine, make_client(engine, tenants=tenants) as client:
            messages = [{"role": "user", "content": "Count."}]
            body = {"messages": messages, "ignore_eos": True, "use_beam_search": True, "n": 2}
            answer = await client.post("/v1/chat/completions", json=body, headers=bearer("a"))
            assert answer.json()["usage"]["completion_tokens"] == 2 * 8, answer.text

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{}, {"use_beam_search": True, "n": 2}])
def test_what_ends_in_the_queue_is_charged_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """It was charged its prompt, and a beam search all that it might have taken, though nothing was computed."""
    monkeypatch.setattr(llm.engine.scheduler, "schedule", list)  # admits nobody

    async def main() -> None:
        tenants = Tenants(keys={"ann": entry("a", tokens_per_minute=5000)})
        limits = RateLimits(lambda: 0.0)
        async with (
            AsyncLLM(llm, tenants=tenants.shares) as engine,
            make_client(engine, tenants=tenants, rate_limits=limits, time_limits=TimeLimits(queue=0.05)) as client,
        ):
            answer = await client.post("/v1/completions", json=BODY | fields, headers=bearer("a"))
            assert answer.status_code == 504, answer.text
            after = await client.get("/v1/models", headers=bearer("a"))
            assert after.headers["x-ratelimit-remaining-tokens"] == "5000"

    asyncio.run(main())


def test_a_beam_search_that_finds_fewer_than_were_asked_for_is_complete(llm: LLM) -> None:
    """It counted as ended early: what it had reserved was not given back, and the next prompt's beams took its indexes."""
    lines: list[str] = []
    search = {"use_beam_search": True, "n": 4, "max_tokens": 50, "structured_outputs": {"choice": ["a", "b"]}}

    async def main() -> None:
        tenants = Tenants(keys={"ann": entry("a", tokens_per_minute=5000)})
        async with (
            AsyncLLM(llm, tenants=tenants.shares) as engine,
            make_client(
                engine,
                tenants=tenants,
                rate_limits=RateLimits(lambda: 0.0),
                write_log=lines.append,
            ) as client,
        ):
            body = {"prompt": ["The sky is", "One"], "echo": True, **search}
            answer = (await client.post("/v1/completions", json=body, headers=bearer("a"))).json()
            assert [(choice["index"], choice["text"][:-1]) for choice in answer["choices"]] == [
                *((0, "The sky is"), (1, "The sky is"), (4, "One"), (5, "One"))
            ]
            after = await client.get("/v1/models", headers=bearer("a"))
            left = int(after.headers["x-ratelimit-remaining-tokens"])
            assert left == 5000 - answer["usage"]["total_tokens"]

    asyncio.run(main())
    assert json.loads(lines[0])["complete"] is True


def test_limits_are_refused_with_what_a_client_needs_to_know(llm: LLM) -> None:
    now = [0.0]
    keys = {
        "ann": entry("a", requests_per_minute=3, tokens_per_minute=600, max_tokens=10, max_num_seqs=2),
        "bob": entry("b"),
    }

    async def ask(client: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
        return await client.post("/v1/completions", json=BODY | fields, headers=bearer(key))

    async def main() -> None:
        tenants = Tenants(keys=keys)
        async with (
            AsyncLLM(llm, tenants=tenants.shares) as engine,
            make_client(engine, tenants=tenants, rate_limits=RateLimits(lambda: now[0])) as client,
        ):
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

    asyncio.run(main())


def test_a_default_number_of_tokens_stays_within_a_keys_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a length used to be refused for the default length of the endpoint or the model."""
    loaded = replace(llm.engine.loaded, sampling_defaults={**llm.engine.loaded.sampling_defaults, "max_tokens": 64})
    monkeypatch.setattr(llm.engine, "loaded", loaded)

    async def main() -> None:
        tenants = Tenants(keys={"ann": entry("a", max_tokens=8), "bob": entry("b")})
        async with (
            AsyncLLM(llm, tenants=tenants.shares) as engine,
            make_client(engine, tenants=tenants) as client,
        ):
            chat = {"messages": [{"role": "user", "content": "Count."}], "ignore_eos": True}
            for path, body in (("completions", {"prompt": "x", "ignore_eos": True}), ("chat/completions", chat)):
                answer = await client.post(f"/v1/{path}", json=body, headers=bearer("a"))
                assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
            answer = await client.post("/v1/chat/completions", json=chat | {"min_tokens": 70}, headers=bearer("b"))
            assert answer.json()["usage"]["completion_tokens"] == 70, answer.text
            refused = await client.post("/v1/chat/completions", json=chat | {"min_tokens": 9}, headers=bearer("a"))
            assert refused.json()["error"]["param"] == "min_tokens"

    asyncio.run(main())


def test_what_a_removed_key_has_cached_is_cleared_by_its_name(llm: LLM) -> None:
    """It could only be cleared with everybody's, and was left to whoever got the name next."""

    async def main() -> None:
        tenants = Tenants(admin_key="admin", keys={"ann": entry("a"), "bob": entry("b")})
        prompt = {"prompt": "Of all that was said that day, nothing was remembered.", "max_tokens": 1}
        async with AsyncLLM(llm, tenants=tenants.shares) as engine, make_client(engine, tenants=tenants) as client:

            async def num_cached(key: str) -> int:
                answer = await client.post("/v1/completions", json=prompt, headers=bearer(key))
                return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            async def clear(**body: str) -> httpx.Response:
                return await client.post("/admin/clear_cache", json=body, headers=bearer("admin"))

            assert [await num_cached(key) > 0 for key in "aabb"] == [False, True, False, True]
            tenants.replace_keys({"bob": entry("b")})
            assert (await clear(api_key="ann")).status_code == 404
            assert (await clear(key_name="ann")).json()["namespaces"] == 1
            tenants.replace_keys({"ann": entry("c"), "bob": entry("b")})
            assert await num_cached("c") == 0
            assert await num_cached("b") > 0
            assert (await clear(key_name="ann", api_key="bob")).status_code == 400
        async with AsyncLLM(llm) as engine, make_client(engine, tenants=Tenants(["a"], "admin")) as client:
            assert (await clear(key_name="ann")).json()["error"]["param"] == "key_name"

    asyncio.run(main())


def test_explanations_are_bounded_and_cost_nobody_who_is_refused_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of prompts used to be looked up, while all streams waited, before the key's limits refused the request."""
    looked_up: list[object] = []
    explain = llm.engine.cache.explain

    def noting(*args: Any, **options: Any) -> Any:
        looked_up.append(args[0])
        return explain(*args, **options)

    monkeypatch.setattr(llm.engine.cache, "explain", noting)

    async def main() -> None:
        tenants = Tenants(keys={"ann": entry("a", requests_per_minute=1)})
        limits = RateLimits(lambda: 0.0)
        async with (
            AsyncLLM(llm, tenants=tenants.shares) as engine,
            make_client(engine, tenants=tenants, rate_limits=limits) as client,
        ):
            for prompts, status in ((17, 400), (2, 200), (1, 429)):
                body = BODY | {"prompt": [[5, 6, 7]] * prompts, "explain_cache": True}
                answer = await client.post("/v1/completions", json=body, headers=bearer("a"))
                assert answer.status_code == status, answer.text
                if status == 400:
                    assert answer.json()["error"]["param"] == "explain_cache"
                assert len(looked_up) == (0 if status == 400 else 2)

    asyncio.run(main())


def test_a_key_that_is_removed_while_its_request_is_prepared_keeps_its_limits(llm: LLM) -> None:
    tenants = Tenants(keys={"ann": entry("a", max_tokens=10)})

    async def main() -> None:
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

    asyncio.run(main())
