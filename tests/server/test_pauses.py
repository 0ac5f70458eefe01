"""What would keep everyone waiting is done before serving, once, or off the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import fastapi
import pytest
from support.in_process_server import served

from radixkv import LLM
from radixkv.sampling.grammar import compiler
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling_params import StructuredOutputsParams
from radixkv.server.pauses import avoid_pauses


async def test_the_description_of_the_api_is_written_once_and_elsewhere(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand requests for it, which need no key, used to block the event loop for 6 s."""
    describe = fastapi.FastAPI.openapi
    threads: list[threading.Thread] = []

    def openapi(app: fastapi.FastAPI) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return describe(app)

    monkeypatch.setattr(fastapi.FastAPI, "openapi", openapi)
    async with served(llm) as client:
        responses = await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))
        assert "/v1/completions" in responses[0].json()["paths"]
        assert len({response.content for response in responses}) == 1
        assert responses[0].headers["Content-Type"] == "application/json"
    (thread,) = threads
    assert thread is not threading.main_thread()


def test_the_first_grammar_finds_its_vocabulary_ready(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first request with a schema used to stop all threads for a second, and a garbage collection for a third of one."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    grammars = GrammarCompiler(llm.engine.loaded)
    avoid_pauses(grammars)
    assert frozen == [True]

    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(compiler, "grammar_tokenizer", fail)
    grammars.compile(StructuredOutputsParams(regex="a"))
    assert not caplog.records

    grammars._tokenizer = None
    avoid_pauses(grammars)
    assert "planted" in caplog.text
    assert frozen == [True, True]
