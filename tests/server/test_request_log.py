"""Every request has a name, and a line in the access log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send
from support.in_process_server import served

from radixkv import LLM
from radixkv.server.access.rate_limits import RATE_LIMIT_HEADERS
from radixkv.server.access.tenants import Tenants
from radixkv.server.config import ServerConfig
from radixkv.server.middleware.request_log import RequestLog, _AccessLogFile, open_access_log

TEXT = {"prompt": "The quick brown fox " * 8, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


async def test_lines_of_the_access_log(llm: LLM) -> None:
    lines: list[str] = []

    config = ServerConfig(cors_origins=["https://app.example"])
    async with served(llm, tenants=Tenants(["key"]), config=config, write_log=lines.append) as client:
        client.headers["Authorization"] = "Bearer key"

        async def log_of(method: str, path: str, **request: Any) -> tuple[httpx.Response, dict[str, Any]]:
            lines.clear()
            response = await client.request(method, path, **request)
            (line,) = lines
            fields: dict[str, Any] = json.loads(line)
            assert fields["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
            assert (fields["method"], fields["path"], fields["status"]) == (method, path, response.status_code)
            assert fields["seconds"] >= 0
            return response, fields

        full, first = await log_of("POST", "/v1/completions", json=TEXT, headers={"x-request-id": "my-own.name:7"})
        assert first["request_id"] == "my-own.name:7"
        assert first["id"] == full.json()["id"]
        assert first["prompt_tokens"] == full.json()["usage"]["prompt_tokens"]
        assert (first["cached_tokens"], first["completion_tokens"], first["complete"]) == (0, 3, True)
        assert 0 <= first["queue_seconds"] < first["first_token_seconds"] <= first["seconds"]
        assert re.fullmatch("[0-9a-f]{8}", first["tenant"])
        assert "quick brown" not in str(first)
        assert "key" not in first["tenant"]

        _, second = await log_of("POST", "/v1/completions", json={**TEXT, "stream": True})
        assert re.fullmatch("[0-9a-f]{32}", second["request_id"])
        assert second["cached_tokens"] == first["prompt_tokens"] - 1
        assert (second["completion_tokens"], second["tenant"]) == (3, first["tenant"])

        _, refused = await log_of("POST", "/v1/completions", json=TEXT, headers={"Authorization": "Bearer wrong"})
        assert refused["tenant"] is None
        assert "prompt_tokens" not in refused
        # A client without a key may not fill the disk with the path that it asks for, nor write a line of its own.
        lines.clear()
        await client.get("/%0A" + "x" * 60_000, headers={"Authorization": ""})
        (line,) = lines
        assert json.loads(line)["path"].startswith("/\nxxx")
        assert len(line) < 1000
        assert "\n" not in line
        for name in ('"quoted"', "two words", "x" * 129, "caf\xe9", ""):
            response, _ = await log_of("GET", "/health", headers={b"x-request-id": name.encode("latin-1")})
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])

        # A page of this origin may call the server with a key; its browser asks first, without one.
        for method, path in (("POST", "/v1/completions"), ("HEAD", "/v1/models")):
            asked = {"Origin": "https://app.example", "Access-Control-Request-Method": method}
            asked |= {"Access-Control-Request-Headers": "authorization", "Authorization": ""}
            preflight, _ = await log_of("OPTIONS", path, headers=asked)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        failed, _ = await log_of("POST", "/v1/completions", json={}, headers={"Origin": "https://app.example"})
        assert failed.status_code == 400
        assert failed.headers["access-control-allow-origin"] == "https://app.example"
        exposed = failed.headers["access-control-expose-headers"].lower().split(", ")
        assert exposed == ["x-request-id", "request-id", *RATE_LIMIT_HEADERS, "retry-after", "x-should-retry"]
        other, _ = await log_of("POST", "/v1/completions", json={}, headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_who_disconnects_before_an_answer_has_no_status_in_the_log() -> None:
    """The status of the answer that was never sent used to be logged: 400, as if the client had sent something wrong."""
    lines: list[str] = []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}

    async def answer_too_late(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 400, "headers": []})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    asyncio.run(RequestLog(answer_too_late, lines.append)(scope, receive, send))
    (line,) = lines
    assert json.loads(line)["status"] is None


async def test_without_an_option_no_origin_is_allowed(llm: LLM) -> None:
    async with served(llm) as client:
        response = await client.get("/version", headers={"Origin": "https://app.example"})
        assert "access-control-allow-origin" not in response.headers
        assert "x-request-id" in response.headers
        # What browsers send for any page without asking first is not read as JSON: visitors cannot be used as clients.
        for headers in ({"content-type": "text/plain"}, {}):
            refused = await client.post("/v1/completions", content=json.dumps(TEXT), headers=headers)
            assert (refused.status_code, "application/json" in refused.text) == (400, True), refused.text


def test_a_log_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    write = open_access_log(str(tmp_path / "access.log"))
    write("one")
    (tmp_path / "access.log").rename(tmp_path / "access.log.1")
    write("two")
    assert (tmp_path / "access.log.1").read_text() == "one\n"
    assert (tmp_path / "access.log").read_text() == "two\n"
    with pytest.raises(OSError, match=r"access_log: cannot write .*none"):
        open_access_log(str(tmp_path / "none" / "access.log"))


def test_a_log_that_cannot_be_written_is_one_line_and_no_request_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request used to raise after its answer, and its traceback was written."""
    folder, path = tmp_path / "logs", tmp_path / "logs" / "access.log"
    folder.mkdir()
    write = open_access_log(str(path))
    with caplog.at_level(logging.INFO, "radixkv"):
        for _ in range(2):
            write("one")
            path.unlink()
            folder.rmdir()
            write("two")
            write("three")
            folder.mkdir()
    write("four")
    assert path.read_text() == "four\n"
    lost = f"access_log: {path} cannot be written (No such file or directory); lines are lost until it can"
    assert caplog.messages == [lost, f"access_log: {path} is written again", lost]


def test_a_log_that_is_removed_to_make_room_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removed file used to stay open and keep its space, and the line that did not fit was tried again for ever."""
    path = tmp_path / "access.log"
    handler = _AccessLogFile(path)
    record = logging.makeLogRecord({"msg": "a line"})
    full = open("/dev/full", "w")  # noqa: SIM115 (closed by the handler)
    monkeypatch.setattr(handler, "stream", full)
    handler.emit(record)
    assert full.closed
    path.unlink()
    handler.emit(record)
    assert path.read_text() == "a line\n"


def test_a_full_disk_is_logged_once(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    write = open_access_log("/dev/full")
    for _ in range(2):
        write("a line")
    assert caplog.messages == [
        "access_log: /dev/full cannot be written (No space left on device); lines are lost until it can"
    ]
    assert capsys.readouterr().err == ""
