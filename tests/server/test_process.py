"""The process: full queues, SIGTERM, an engine that dies, options on the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.preloaded_process import COMMAND_LINE, run_preloaded
from support.server_process import ServerProcess

from radixkv.errors import ModelLoadError
from radixkv.server.access.keys import hash_of
from radixkv.server.config import ServerConfig
from radixkv.server.run import run_server

ENDLESS = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "stream": True, "temperature": 0}
# After its first step, an engine takes another only when there is a file; new requests are queued meanwhile.
HELD = """
import time
from pathlib import Path
from radixkv.scheduling.scheduler import Scheduler
schedule, first = Scheduler.schedule, iter([True])
def held(self):
    if next(first, False) or Path({path!r}).exists():
        return schedule(self)
    time.sleep(0.01)
    return []
Scheduler.schedule = held
"""


@pytest.fixture
def may_go_on(tmp_path: Path) -> Path:
    return tmp_path / "may-go-on"


@pytest.fixture
def small_server(tiny_model_folder: Path, may_go_on: Path) -> Iterator[ServerProcess]:
    options = ("--max-num-seqs", "1", "--max-queue", "1", "--served-model-name", "mine/own", "--grace-seconds", "1000")
    with ServerProcess(str(tiny_model_folder), *options, prelude=HELD.format(path=str(may_go_on))) as server:
        yield server


async def test_full_queue_and_drain(small_server: ServerProcess, may_go_on: Path) -> None:
    async with httpx.AsyncClient(base_url=small_server.url, timeout=600) as client:
        assert (await client.get("/v1/models/mine/own")).json()["id"] == "mine/own"
        async with (
            client.stream("POST", "/v1/completions", json=SHORT) as running,
            client.stream("POST", "/v1/completions", json=SHORT) as waiting,
        ):
            assert running.status_code == waiting.status_code == 200
            lines = running.aiter_lines()
            await anext(lines)
            refused = await client.post("/v1/completions", json={"prompt": "Once"})
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            too_many = await client.post("/v1/completions", json={"prompt": ["x"] * 3})
            assert too_many.status_code == 400

            small_server.process.send_signal(signal.SIGTERM)
            while (await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0)
            draining = await client.post("/v1/completions", json={"prompt": "Once"})
            assert draining.status_code == 503
            assert draining.json()["error"]["type"] == "server_error"
            assert "radixkv:draining 1.0" in (await client.get("/metrics")).text
            may_go_on.touch()
            # Both, the one that waits too, come to their own end.
            assert [line async for line in lines if line][-1] == "data: [DONE]"
            others = [line async for line in waiting.aiter_lines() if line]
            assert others[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in others[-2]
    assert small_server.process.wait(600) == 0


def test_a_signal_while_draining_gives_up_what_still_runs() -> None:
    with ServerProcess("--grace-seconds", "1000") as server:
        with server.client() as client, client.stream("POST", "/v1/completions", json=ENDLESS) as response:
            lines = response.iter_lines()
            next(lines)
            assert server.admin("drain")["unfinished_requests"] == 1
            while client.get("/ready").status_code == 200:
                pass
            server.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "shutting down" in rest[-2]
        assert server.process.wait(600) == 0


def test_a_dead_engine_ends_the_process_with_status_1(tiny_model_folder: Path) -> None:
    broken = "from radixkv.scheduling.scheduler import Scheduler\nScheduler.schedule = lambda self: 1 / 0"
    with ServerProcess(str(tiny_model_folder), prelude=broken) as server:
        with server.client() as client:
            assert client.post("/v1/completions", json={"prompt": "Once"}).status_code == 500
        assert server.process.wait(600) == 1


def test_a_stuck_engine_ends_the_process_with_status_1(tiny_model_folder: Path, tmp_path: Path) -> None:
    """And half a request, sent to the same server, is answered 408."""
    imports = "import time\nfrom radixkv.scheduling.scheduler import Scheduler"
    stuck = f"{imports}\nScheduler.schedule = lambda self: time.sleep(1e6)"
    path, log = str(tmp_path / "socket"), tmp_path / "access.log"
    # Long enough for the whole request to arrive in time, however busy the machine.
    options = ("--uds", path, "--step-timeout", "1", "--receive-timeout", "3", "--access-log", str(log))
    with ServerProcess(str(tiny_model_folder), *options, prelude=stuck) as server:
        assert server.url == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as half:
            half.connect(path)
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 40\r\n\r\n{")
            answer = b"".join(iter(lambda: half.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://server", timeout=600) as client:
            response = client.post("/v1/completions", json={"prompt": "Once"})
        assert response.status_code == 500
        assert server.process.wait(600) == 1
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert logged[-1]["request_id"] == response.headers["x-request-id"]


def test_a_server_logs_which_model_it_loads_before_it_does(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was printed for as long as a model took to load."""
    caplog.set_level(logging.INFO, "radixkv")
    with pytest.raises(ModelLoadError):
        run_server(ServerConfig(model="/no/such/model", port=0), {})
    assert caplog.messages == ["loading /no/such/model ..."]


@pytest.mark.parametrize("arguments", ["serve", f"warm {os.devnull} --disk-cache none"])
def test_what_is_not_installed_is_named(arguments: str) -> None:
    program = "import sys; sys.modules['uvicorn'] = None\nfrom radixkv.cli.main import main; main()"
    command = [sys.executable, "-c", program, *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "radixkv: uvicorn is not installed: pip install 'radixkv[server]'\n"


def test_a_port_in_use_is_one_line_on_standard_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"{taken.getsockname()[1]}"
        result = run_preloaded(COMMAND_LINE, "serve", "--port", port)
    assert result.returncode == 1
    assert result.stderr == f"radixkv: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_server_records_a_trace_without_text_and_reads_its_keys_again(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    trace, keys = tmp_path / "trace.jsonl", tmp_path / "keys.toml"
    keys.write_text(f'[keys.ann]\nsha256 = "{hash_of("key-of-ann")}"\n')
    options = (
        str(tiny_model_folder),
        *("--record-trace", f"{trace}", "--keys-file", f"{keys}"),
        *("--eviction-policy", "adaptive", "--num-blocks", "200"),
    )
    with ServerProcess(*options) as server:
        body = {"prompt": "A secret that nobody may read. " * 8, "max_tokens": 2, "temperature": 0}
        with server.client("key-of-ann") as ann, server.client("key-of-bob") as bob:
            assert ann.post("/v1/completions", json=body).status_code == 200
            assert bob.get("/v1/models").status_code == 401
            keys.write_text(f'[keys.bob]\nsha256 = "{hash_of("key-of-bob")}"\n')
            server.process.send_signal(signal.SIGHUP)
            while ann.get("/v1/models").status_code == 200:
                pass
            assert bob.post("/v1/completions", json=body).status_code == 200
        assert server.terminate() == 0
    head, *requests = [json.loads(line) for line in trace.read_text().splitlines()]
    assert head["block_size"] == 16
    assert len(requests) == 2
    assert "secret" not in trace.read_text()
