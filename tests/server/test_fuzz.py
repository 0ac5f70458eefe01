"""Requests that schemathesis generates from the OpenAPI description: none is answered 500, none hangs.

`make fuzz-server` sends twelve times as many, and watches what the server computes while a client waits for /health.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from support.server_process import ADMIN_KEY, MODEL, TENANT_A, ServerProcess

from radixkv.bench.common.process import processor_seconds

# By endpoint: the number of cases that violate the description, and of those that follow it; 520 in all.
# Most of the time goes into generating cases; a few tens were enough to find whatever was found.
CASES = {
    "/v1/chat/completions": (60, 60),
    "/v1/completions": (60, 30),
    "/v1/responses": (30, 20),
    "/v1/responses/input_tokens": (10, 10),
    "/v1/messages": (30, 20),
    "/v1/messages/count_tokens": (10, 10),
    "/tokenize": (30, 30),
    "/detokenize": (30, 30),
    "/admin/clear_cache": (15, 15),
    "/admin/pins": (10, 10),
}
# A request that each of them answers.
_MESSAGES = [{"role": "user", "content": "Hello"}]
ANSWERED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/messages": {"model": MODEL, "messages": _MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": _MESSAGES},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6]},
    "/admin/clear_cache": {},
    "/admin/pins": {"api_key": TENANT_A, "prompt": "Hello"},
}
# Endpoints without a body: those with a name in their path, with a name that is answered or None, and the others.
NAMED = {
    ("GET", "/v1/models/{name}"): MODEL,
    ("GET", "/v1/responses/{name}"): None,
    ("GET", "/v1/responses/{name}/input_items"): None,
    ("DELETE", "/v1/responses/{name}"): None,
    ("DELETE", "/admin/pins/{name}"): None,
}
PLAIN = {
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/live"),
    ("GET", "/load"),
    ("GET", "/tokenizer_info"),
    ("GET", "/admin/snapshot"),
    ("GET", "/admin/pins"),
    ("POST", "/admin/check"),
}
_NO_KEY = {"/version", "/health", "/ready"}
_NUM_NAMES = 10


@pytest.fixture(scope="module")
def schema(shared_server: ServerProcess) -> Any:
    """The description of all endpoints, read once: that takes as long as generating the requests to one of them."""
    return schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json", timeout=600)


@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE, GenerationMode.POSITIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", CASES)
def test_no_request_breaks_the_server(
    server: ServerProcess, schema: Any, path: str, mode: GenerationMode, request: pytest.FixtureRequest
) -> None:
    factor: int = request.config.getoption("--fuzz-factor")
    num_cases = factor * CASES[path][mode is GenerationMode.POSITIVE]
    statuses: Counter[int] = Counter()
    session = session_for(path)

    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    @many(num_cases)
    def fuzz(case: Any) -> None:
        _make_answerable(path, case.body)
        if statuses.total() % 10 == 9:
            unauthorised = case.call(timeout=600)
            statuses[unauthorised.status_code] += 1
            assert unauthorised.status_code == 401, unauthorised.text
            return
        response = case.call(session=session, timeout=600)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            names = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
            assert set(response.json()["error"]) - {"details"} == names
        statuses[response.status_code] += 1

    with health_watched(server) as stalls:
        fuzz()
    assert stalls
    if factor > 1:
        print(
            f"{path} {mode.value}: {dict(statuses)}; /health {max(stalls):.2f} s of the server's processor time at most"
        )
        assert max(stalls) <= 1.0
    assert statuses.total() == num_cases
    assert statuses[400] or mode is GenerationMode.POSITIVE
    answer = session.post(server.url + path, json=ANSWERED[path], timeout=600)
    assert answer.status_code == 200, answer.text
    server.admin("clear_cache", {})  # what valid messages have pinned


def test_every_endpoint_has_random_requests(server: ServerProcess) -> None:
    paths = requests.get(f"{server.url}/openapi.json", timeout=600).json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    # Draining ends the server.
    assert described - {("POST", "/admin/drain")} == {("POST", path) for path in CASES} | NAMED.keys() | PLAIN


@pytest.mark.parametrize(("method", "path"), NAMED)
def test_no_name_breaks_the_server(
    server: ServerProcess, schema: Any, method: str, path: str, request: pytest.FixtureRequest
) -> None:
    factor: int = request.config.getoption("--fuzz-factor")
    session, known = session_for(path), NAMED[method, path]

    @given(case=schema[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE))
    @many(factor * _NUM_NAMES)
    def fuzz(case: Any) -> None:
        assert 400 <= case.call(session=session, timeout=600).status_code < 500
        assert case.call(timeout=600).status_code == 401

    fuzz()
    if known is not None:
        answer = session.request(method, server.url + path.replace("{name}", known), timeout=600)
        assert answer.status_code == 200, answer.text


def test_endpoints_without_arguments_need_a_key_unless_public(server: ServerProcess) -> None:
    for method, path in sorted(PLAIN):
        with_key = session_for(path).request(method, server.url + path, timeout=600)
        assert with_key.status_code == 200, (path, with_key.text)
        without = requests.request(method, server.url + path, timeout=600)
        assert without.status_code == (200 if path in _NO_KEY else 401), (path, without.text)


def session_for(path: str) -> requests.Session:
    """A session with the key that an endpoint needs."""
    session = requests.Session()
    is_admin = path.startswith("/admin") or path == "/metrics"
    session.headers["Authorization"] = f"Bearer {ADMIN_KEY if is_admin else TENANT_A}"
    return session


def many(num_cases: int) -> settings:
    """Settings for that many cases, the same ones each time."""
    return settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def health_watched(server: ServerProcess) -> Iterator[list[float]]:
    """Ask for /health all the while; yields what each answer took, in seconds that the server computed meanwhile."""
    done = threading.Event()
    stalls: list[float] = []

    def watch() -> None:
        pid = server.process.pid
        with requests.Session() as session:
            while not (stalls and done.wait(0.1)):
                before = processor_seconds(pid)
                assert session.get(f"{server.url}/health", timeout=600).status_code == 200
                stalls.append(processor_seconds(pid) - before)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield stalls
        finally:
            done.set()
        watching.result()


def _make_answerable(path: str, body: Any) -> None:
    """Shorten a valid request for the longest answers, which take too long for a test; give one for no time enough."""
    if isinstance(body, dict):
        timeout = body.get("timeout")
        if isinstance(timeout, (int, float)) and timeout > 0:
            body["timeout"] = 600
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), (int, float)):  # 739.0 is an integer, too
                body[name] = min(body[name], 2)
        if path == "/v1/chat/completions" and body.get("max_completion_tokens") is None:
            body["max_completion_tokens"] = 2
        if path.startswith("/v1/messages") and isinstance(body.get("model"), str):
            body["model"] = MODEL  # it is required there
        if path in ("/tokenize", "/admin/pins") and body.get("prompt") is None and body.get("messages") is None:
            body["prompt"] = "text"  # one of them is required
        if path == "/v1/responses" and body.get("max_output_tokens") is None:
            body["max_output_tokens"] = 2
        if path == "/v1/completions" and body.get("max_tokens") is None:
            body["max_tokens"] = 2
        if isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 3)
        if path == "/admin/pins" and isinstance(body.get("api_key"), str | None):
            body["api_key"] = TENANT_A  # there are several tenants
