"""Numbers at the ends of what JSON can say are refused or served; a step that crashes takes other requests with it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from support.in_process_server import served

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


WHOLE = {
    "/v1/completions": {
        "n": 1,
        "top_k": 3,
        "seed": 7,
        "logprobs": 2,
        "max_tokens": 3,
        "stop_token_ids": [5],
        "prompt": [9, 8],
    },
    "/v1/chat/completions": {"max_completion_tokens": 3, "seed": 7, "top_logprobs": 2, "logprobs": True},
    "/v1/responses": {"max_output_tokens": 20},
    "/v1/messages": {"max_tokens": 3, "top_k": 3, "temperature": 1},
}


def _with_fractions(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_fractions(each) for each in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("path", BODIES)
async def test_whole_numbers_may_be_written_with_a_fraction_of_zero(llm: LLM, path: str) -> None:
    """As OpenAI and vLLM take them: some languages write no others."""
    whole = {**BODIES[path], **WHOLE[path]}
    fractions = {name: _with_fractions(value) for name, value in whole.items()}
    broken = [
        ({**whole, name: value + 0.5}, f"{name}: expected a valid integer", name)
        for name, value in WHOLE[path].items()
        if type(value) is int and name != "temperature"
    ]
    for name in ("n", "max_tokens"):  # neither text nor truth values are numbers
        broken += [({**whole, name: value}, "", name) for value in ("5", True, [1.0], 1e400)]
    async with served(llm) as client:
        for body in (whole, fractions):
            response = await client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
            assert response.status_code == 200, response.text
        for body, message, name in broken:
            response = await client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
            assert response.status_code == 400
            assert message in response.text
            assert name in response.text


@pytest.mark.parametrize("path", BODIES)
async def test_no_number_is_a_server_error(llm: LLM, path: str) -> None:
    """A ``top_k`` of 2 ** 63 used to crash the step that it was in, with all requests of that step."""
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
    async with served(llm) as client:
        for body in sent:
            response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code in (200, 400, 504), f"{response.status_code} for {body}"


def _of_chat(schema: str) -> str:
    return f'{{"messages": {json.dumps(MESSAGES)}, "max_tokens": 1, {schema}}}'


# Each with a place for a schema, and what an error calls the place.
WITH_SCHEMAS: dict[str, tuple[str, str, str]] = {
    "response_format": (
        "/v1/chat/completions",
        _of_chat('"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}'),
        "response_format: json cannot be read: ",
    ),
    "strict": (
        "/v1/chat/completions",
        _of_chat(
            '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": SCHEMA}}'
        ),
        "response_format: json cannot be read: ",
    ),
    "structural_tag": (
        "/v1/chat/completions",
        _of_chat(
            '"response_format": {"type": "structural_tag", "triggers": ["<"], '
            '"structures": [{"begin": "<", "schema": SCHEMA, "end": ">"}]}'
        ),
        "response_format: structural_tag cannot be read: ",
    ),
    "tools": (
        "/v1/chat/completions",
        _of_chat('"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]'),
        "tools: the parameters of 'f' cannot be read: ",
    ),
    "guided_json": ("/v1/completions", '{"prompt": "Hi", "guided_json": SCHEMA}', "guided_json: json cannot be read: "),
    "beams": (
        "/v1/completions",
        '{"prompt": "Hi", "use_beam_search": true, "structured_outputs": {"json": SCHEMA}}',
        "structured_outputs: json cannot be read: ",
    ),
    "text.format": (
        "/v1/responses",
        '{"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}',
        "text.format: json cannot be read: ",
    ),
    "tools of responses": (
        "/v1/responses",
        '{"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}',
        "tools: the parameters of 'f' cannot be read: ",
    ),
    "output_config.format": (
        "/v1/messages",
        _of_chat('"model": "model", "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}'),
        "output_config.format: json cannot be read: ",
    ),
    "tools of messages": (
        "/v1/messages",
        _of_chat('"model": "model", "tools": [{"name": "f", "input_schema": SCHEMA}]'),
        "tools: the parameters of 'f' cannot be read: ",
    ),
}
PLACES = {
    "const": '{"const": NUMBER}',
    "enum/1": '{"enum": [1, NUMBER]}',
    "minimum": '{"minimum": NUMBER}',
    "multipleOf": '{"multipleOf": NUMBER}',
    "maxLength": '{"maxLength": NUMBER}',
    "default/x": '{"default": {"x": NUMBER}}',
}


@pytest.mark.parametrize("where", WITH_SCHEMAS)
async def test_a_schema_with_a_number_that_is_not_finite_is_refused_by_its_place(llm: LLM, where: str) -> None:
    """Some of them were read as largest bounds, or left to the model, or what was said of them were Python's words."""
    path, template, opening = WITH_SCHEMAS[where]
    async with served(llm) as client:
        numbers = ("1e999", "NaN", "-Infinity", "1" + "0" * 400)
        for number, (place, part) in itertools.product(numbers, PLACES.items()):
            schema = f'{{"type": "object", "properties": {{"a/b": {part.replace("NUMBER", number)}}}}}'
            body = template.replace("SCHEMA", schema)
            response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400, response.text
            said = response.json()["error"]["message"]
            assert said.startswith(f"{opening}#/properties/a~1b/{place}: expected a finite number, of double precision")
