"""What a server that shuts down answers to the requests that it aborts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.held_steps import HeldSteps
from support.in_process_server import make_client

from radixkv import LLM, AsyncLLM

BODY = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("options", [{}, {"use_beam_search": True, "n": 3}], ids=["sample", "beams"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_is_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], stream: bool
) -> None:
    """An aborted beam search used to be answered as one that had found nothing."""
    monkeypatch.setattr(llm.engine, "step", llm.engine.step)  # so that it is held during this test only

    async def main() -> None:
        async with AsyncLLM(llm) as engine, make_client(engine) as client:
            steps = await engine.call(HeldSteps)
            answer = asyncio.ensure_future(client.post("/v1/completions", json={**BODY, **options, "stream": stream}))
            steps.allow(2)
            while not steps.is_holding:
                await asyncio.sleep(0)
            shutdown = asyncio.ensure_future(engine.shutdown())
            while not engine._engine_thread._calls.qsize():
                await asyncio.sleep(0)
            steps.allow_all()
            response = await answer
            assert not await shutdown
            assert response.status_code == (200 if stream else 503)
            assert "the server is shutting down; the answer is incomplete" in response.text
            assert '"finish_reason":"' not in response.text

    asyncio.run(main())
