"""Structured output through every request field for it."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from support.in_process_server import served
from support.server_process import MODEL

from radixkv import LLM
from radixkv.sampling.grammar.budget import GrammarBudget

QUESTION: Any = [{"role": "user", "content": "Describe a person called Ann, who is 30."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

OPEN = {name: part for name, part in SCHEMA.items() if name != "additionalProperties"}


def is_person(text: str) -> bool:
    person = json.loads(text)
    return set(person) == {"name", "age"} and 0 <= person["age"] <= 99


def is_date(text: str) -> bool:
    return re.fullmatch("[0-9]{4}-[0-9]{2}", text) is not None


def is_answer(text: str) -> bool:
    return text in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}, is_person),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": OPEN}}},
            is_person,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, is_person),
        ({"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}, is_date),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, is_answer),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"\n'}}, is_answer),
        ({"guided_json": json.dumps(SCHEMA)}, is_person),
        ({"guided_regex": "[0-9]{4}-[0-9]{2}"}, is_date),
        ({"guided_choice": ["yes", "no"]}, is_answer),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, is_answer),
    ],
)
def test_answers_satisfy_the_requested_structure(client: openai.OpenAI, fields: dict[str, Any], holds: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 80, "seed": 1, "extra_body": fields}
    samples: dict[str, Any] = {"n": 2, "temperature": 1.3}
    beams = {"extra_body": {**fields, "use_beam_search": True, "beam_width": 2}}
    # From here on, a structure is the same in whatever fields it came.
    for more in (samples, beams) if "structured_outputs" in fields else (samples,):
        full = client.chat.completions.create(**{**options, **more})
        assert [choice.finish_reason for choice in full.choices] == ["stop"] * len(full.choices)
        assert all(holds(choice.message.content) for choice in full.choices)
    stream = client.chat.completions.create(**options, stream=True)
    assert holds("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    text = client.completions.create(model=MODEL, prompt="Ann:", max_tokens=80, seed=1, extra_body=fields)
    assert holds(text.choices[0].text)


def test_response_formats_of_text_and_of_any_object(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**options).choices[0].message.content
    assert (
        client.chat.completions.create(**options, response_format={"type": "text"}).choices[0].message.content == plain
    )
    some_object = client.chat.completions.create(**options, response_format={"type": "json_object"})
    assert (some_object.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "yaml"}},
        {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 1}}},
        {"structured_outputs": {"json": {"type": "array", "items": {"not": {}}, "minItems": 1}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "nonsense"}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]},
        {"guided_json": "{"},
        {"guided_regex": "a" * 10_000},
    ],
)
def test_invalid_specifications_are_a_400(http: httpx.Client, fields: dict[str, Any]) -> None:
    for path, body in (("/v1/chat/completions", {"messages": QUESTION}), ("/v1/completions", {"prompt": "x"})):
        for beams in (False, True):
            response = http.post(path, json={**body, **fields, "max_tokens": 5, "use_beam_search": beams})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] in fields


def test_deep_and_hostile_schemas_do_not_harm_the_server(http: httpx.Client) -> None:
    deep = '{"type":"array","items":' * 400 + "{}" + "}" * 400
    for schema in (deep, json.dumps({"anyOf": [{"type": "string", "pattern": "(a|b)*a(a|b){200}"}] * 50})):
        body = '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "guided_json": ' + schema + "}"
        response = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text
    assert http.get("/health").status_code == 200


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
TEXT_FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
JSON_OUTPUT = {"type": "json_schema", "schema": SCHEMA}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGES: dict[str, Any] = {**CHAT, "model": "model", "max_tokens": 9}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "Hi", "guided_json": SCHEMA}, "guided_json"),
        ("completions", {"prompt": "Hi", "structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ("chat/completions", {**CHAT, "response_format": JSON_SCHEMA}, "response_format"),
        ("chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}, "tools"),
        ("responses", {"input": "Hi", "text": {"format": TEXT_FORMAT}}, "text.format"),
        (
            "responses",
            {"input": "Hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
            "tools",
        ),
        ("messages", {**MESSAGES, "output_config": {"format": JSON_OUTPUT}}, "output_config.format"),
        ("messages", {**MESSAGES, "output_format": JSON_OUTPUT}, "output_format"),
    ],
)
async def test_a_grammar_that_fails_in_mid_answer_is_named_as_it_was_sent(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    """It was always called structured_outputs."""
    monkeypatch.setattr(GrammarBudget, "_settle", lambda budget, share: False)  # it takes too long in its first step
    async with served(llm) as client:
        response = await client.post(f"/v1/{path}", json={**body, "stream": stream})
        assert response.status_code == (200 if stream else 400), response.text
        assert f'"message":"{param}: following it took' in response.text
        if path.endswith("completions"):
            assert f'"param":"{param}"' in response.text
