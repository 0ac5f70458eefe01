"""A real `radixkv serve` process, for tests.

It speaks plain HTTP, so that its clients load no certificates: that takes 50 ms each, and every test makes several.
"""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any

import httpx
import openai
from support.preloaded_process import COMMAND_LINE, PreloadedProcess

ADMIN_KEY = "the-admin-key"
TENANT_A, TENANT_B = "key-of-tenant-a", "key-of-tenant-b"
MODEL = "SmolLM2-135M-Instruct"


class ServerProcess:
    """Starts the server on a free port and waits until it listens; leaving the context terminates it.

    Args:
        options: as on the command line.
        prelude: Python statements that the process runs first.
    """

    def __init__(self, *options: str, prelude: str = "") -> None:
        # Tests compare with the library's answers in float32; "auto" depends on the processor.
        address = [] if "--uds" in options else ["--port", "0"]
        arguments = ["serve", *address, "--admin-key", ADMIN_KEY, "--dtype", "float32", *options]
        self.process = PreloadedProcess(f"{prelude}\n{COMMAND_LINE}", *arguments)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Serving "), f"the server did not start: {line!r}"
        self.url = line.split()[-1]

    def client(self, api_key: str | None = None) -> httpx.Client:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=600, verify=False)

    def openai(self, api_key: str) -> openai.OpenAI:
        plain = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=600, http_client=plain)

    def admin(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response to an administrator's POST request; asserts that it succeeds."""
        with self.client(ADMIN_KEY) as client:
            response = client.post(f"/admin/{path}", json=body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    def metrics(self) -> dict[str, float]:
        """Every sample by its name, labels included."""
        with self.client(ADMIN_KEY) as client:
            lines = client.get("/metrics").text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def terminate(self) -> int:
        """Send SIGTERM and wait for the end; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(600)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(600)
        assert self.process.stdout is not None
        self.process.stdout.close()
