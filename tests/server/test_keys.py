"""Keys in a file: who may use the server, and until when."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.in_process_server import make_client
from support.tenant_keys import bearer, entry
from typer.testing import CliRunner

from radixkv import LLM, AsyncLLM, TenantShare
from radixkv.cli.main import app
from radixkv.errors import EngineDeadError
from radixkv.server.access.keys import hash_of, new_key, read_keys_file
from radixkv.server.access.tenants import Tenant, Tenants
from radixkv.server.errors import ApiError
from radixkv.server.reload import KeysReload


def keys_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


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
        (f"[keys.{'a' * 65}]\nSHA", "expected a name of up to 64 printable ASCII characters"),
        ('[keys.""]\nSHA', "expected a name of up to 64 printable ASCII characters"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = keys_file(tmp_path / "keys.toml", text.replace("SHA", f'sha256 = "{hash_of("k")}"'))
    with pytest.raises(ValueError, match=message) as caught:
        read_keys_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_key_is_made_and_shown_once(tmp_path: Path) -> None:
    for name in ("ann-2", "a" * 64):
        result = CliRunner().invoke(app, ["keys", "new", name])
        assert result.exit_code == 0
        key = result.stdout.splitlines()[0].split()[-1]
        assert read_keys_file(keys_file(tmp_path / "keys.toml", result.stdout)) == {name: entry(key)}
    assert len(new_key()) > 40
    assert new_key() != new_key()
    for name in ("a b", "a" * 65):
        assert isinstance(CliRunner().invoke(app, ["keys", "new", name]).exception, ValueError)


def test_keys_authenticate_their_tenants_until_they_expire_or_are_replaced() -> None:
    now = [datetime(2027, 1, 30, tzinfo=UTC).timestamp()]
    ends = datetime(2027, 1, 31)
    keys = {"ann": entry("key-a", weight=3.0), "bob": entry("key-b", expires=ends, max_num_seqs=2)}
    tenants = Tenants(["key-c"], None, keys, clock=lambda: now[0], metrics_key="key-of-metrics")

    def sent(key: str) -> Tenant:
        return tenants.authenticate(key.encode())

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


async def test_a_reload_replaces_the_keys_and_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path / "keys.toml", f'[keys.ann]\nsha256 = "{hash_of("a")}"')
    tenants = Tenants(keys=read_keys_file(path))
    applied: list[Mapping[str, TenantShare]] = []

    async def apply(shares: Mapping[str, TenantShare]) -> None:
        applied.append(shares)

    reload = KeysReload(path, tenants, apply)
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
    assert applied == [tenants.shares]
    assert [share.weight for share in applied[0].values()] == [4.0]


async def test_a_reload_does_not_wait_for_an_earlier_one(tmp_path: Path) -> None:
    """One replica that hung used to keep the next keys from all replicas, and from the queue, for two minutes."""
    path = tmp_path / "keys.toml"
    tenants = Tenants(keys={})
    applied: list[list[float]] = []

    async def hang(shares: Mapping[str, TenantShare]) -> None:
        applied.append([share.weight for share in shares.values()])
        await asyncio.Event().wait()

    reload = KeysReload(path, tenants, hang)
    for weight in (2.0, 3.0):
        keys_file(path, f'[keys.bob]\nsha256 = "{hash_of("b")}"\nweight = {weight}')
        reload()
    await asyncio.sleep(0)
    assert applied == [[2.0], [3.0]]


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (EngineDeadError("the engine was stopped"), []),
        (OSError("no way there"), ["the shares of keys are as they were: no way there"]),
    ],
)
def test_shares_that_cannot_be_sent_are_one_line_of_the_log(
    error: Exception, logged: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error was never retrieved, which asyncio reports with a traceback, whenever it collects the task."""
    path = keys_file(tmp_path / "keys.toml", f'[keys.bob]\nsha256 = "{hash_of("b")}"')
    unhandled: list[dict[str, Any]] = []

    async def fail(shares: Mapping[str, TenantShare]) -> None:
        raise error

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
        reload = KeysReload(path, Tenants(keys={}), fail)
        reload()
        await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == logged
    assert not unhandled


async def test_what_a_removed_key_has_cached_is_cleared_by_its_name(llm: LLM) -> None:
    """It could only be cleared with all others', and was left to the next key of that name."""
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
