"""Numbers at the ends of what JSON can say are refused or served; a step that crashes takes other requests with it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.in_process_server import serve

from radixkv import LLM

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"model": "model", "messages": MESSAGES, "max_tokens": 1},
}
SHARED = ("temperature", "top_p", "top_k")
NUMBERS: dict[str, tuple[str, ...]] = {
    "/v1/completions": (
        *SHARED,
        "n",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "timeout",
        "priority",
        "beam_width",
        "length_penalty",
    ),
    "/v1/chat/completions": ("top_logprobs",),
    "/v1/responses": (*SHARED, "seed", "max_tool_calls", "top_logprobs"),
    "/v1/messages": SHARED,
}
EXTREMES = (
    *("-1", f"{-(2**63) - 1}", f"{2**63}", f"{2**64}", "1" + "0" * 400),
    *("1e39", "1e308", "5e-324", "NaN", "Infinity", "-Infinity"),
)


@pytest.mark.parametrize("path", BODIES)
def test_no_number_is_a_server_error(llm: LLM, path: str) -> None:
    """A ``top_k`` of 2 ** 63 crashed the step that it was in, with all requests of that step."""
    head = json.dumps(BODIES[path])[:-1]
    sent = [f'{head}, "{name}": {value}}}' for name in NUMBERS[path] for value in EXTREMES]
    if path == "/v1/completions":
        sent += [
            f'{{"prompt": "Hi", "max_tokens": 1, "use_beam_search": true, "beam_width": 2, "{name}": {value}}}'
            for name in ("temperature", "length_penalty")
            for value in EXTREMES
        ]
        for value in EXTREMES:
            sent += [f'{{"prompt": [5, {value}]}}', f'{{"prompt": [[5], [{value}]]}}']
            sent += [f'{head}, "{name}": [{value}]}}' for name in ("stop_token_ids", "allowed_token_ids")]
            sent += [f'{head}, "logit_bias": {{"5": {value}}}}}', f'{head}, "logit_bias": {{"{value}": 1}}}}']

    async def scenario(client: httpx.AsyncClient) -> None:
        for body in sent:
            response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code in (200, 400, 504), f"{response.status_code} for {body}"

    serve(llm, scenario)
