"""Invalid requests are refused with the right status and field, and do not affect others."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from support.api_errors import assert_error
from support.server_process import ADMIN_KEY, ServerProcess

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TEXT = {"prompt": "Hi", "max_tokens": 1}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 33}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": ["", "x"]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"60000": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache": {"read": 1}}, "cache"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"max_token": 4}, "max_token"),
        ({"beam_width": 3}, "beam_width"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "n"),
        ({"use_beam_search": True, "top_k": 3}, "top_k"),
        ({"use_beam_search": True, "skip_special_tokens": False}, "skip_special_tokens"),
        ({"use_beam_search": True, "include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"use_beam_search": True, "length_penalty": 1e6}, "length_penalty"),
        ({"use_beam_search": True, "beam_width": 1000}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 33}, "beam_width"),
        ({"use_beam_search": True, "n": 1000}, "n"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stop": ["x", "y" * 1001]}, "stop"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"guided_regex": "("}, "guided_regex"),
    ],
)
def test_invalid_values_are_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        response = http.post(path, json={**body, **change})
        assert_error(response, 400, param=param)
        assert response.json()["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": "4"}, "max_tokens: expected a valid integer, got '4'"),
        ({"stop": [1]}, "stop.0: expected a valid string, got 1"),
        ({"stop": ["x"] * 33}, "stop: expected at most 32 entries, got 33"),
        ({"stop": "x" * 1001}, "stop: expected at most 1000 characters, got 1001"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name: required; response_format.json_schema.schema: required",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: required"),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": []}},
            "response_format.structures: expected at least 1 entries, got 0",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: expected one of 'text', 'json_object', "),
        ({"response_format": {}}, "response_format.type: required"),
        ({"List": 1}, "List: unknown or not supported"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: expected a valid string or a valid list, got 5",
        ),
        ({"stop": 5}, "stop: expected a valid string or a valid list, got 5"),
        ({"response_format": 5}, "response_format: expected an object, got 5"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name: expected a text like ^[a-zA-Z0-9_.:-]{1,128}$, got 'a b'",
        ),
        ({"messages": [{"content": "x"}]}, "messages.0.role: required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image_url"}]}]},
            "messages.0.content.1: parts of type 'image_url' are not supported, only text, refusal, thinking",
        ),
        ({"Stop": "x"}, "Stop: unknown or not supported; did you mean stop?"),
        ({"max_token": 5}, "max_token: unknown or not supported; did you mean max_tokens?"),
        ({"functions_of_mine": []}, "functions_of_mine: unknown or not supported"),
        ({"lora_request": []}, "lora_request: unknown or not supported"),
        ({"mm_processor_kwarg": 1}, "mm_processor_kwarg: unknown or not supported"),
        ({"x" * 500: 1}, "x" * 500 + ": unknown or not supported"),
        ({"user": ["x" * 1000] * 1000}, "user: expected a valid string, got ['xxx"),
    ],
)
def test_messages_have_the_field_what_it_takes_and_the_value(
    http: httpx.Client, change: dict[str, Any], message: str
) -> None:
    said = http.post("/v1/chat/completions", json={**CHAT, **change}).json()["error"]["message"]
    assert said.startswith(message)
    assert len(said) < 600
    assert message.endswith("?") or "did you mean" not in said


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": None}, "prompt: expected a valid string or a valid list, got None"),
        ("completions", {"prompt": [1, "a"]}, "prompt.1: expected a valid integer, got 'a'"),
        ("completions", {"prompt": ["a", 1]}, "prompt.1: expected a valid string, got 1"),
        ("completions", {"prompt": [[1], [2, "a"]]}, "prompt.1.1: expected a valid integer, got 'a'"),
        (
            "completions",
            {"prompt": [None]},
            "prompt.0: expected a valid integer, a valid string or a valid list, got None",
        ),
        (
            "completions",
            {"prompt": "a", "n": 2, "best_of": 1},
            "best_of: expected n=2, got 1: all that is generated is returned",
        ),
        ("responses", {"input": None}, "input: expected a valid string or a valid list, got None"),
        ("responses", {"input": [5]}, "input.0: expected an object, got 5"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.content.0.text: required",
        ),
        ("messages", {"system": 5}, "system: expected a valid string or a valid list, got 5"),
        (
            "messages",
            {"messages": [{"role": "user", "content": {}}]},
            "messages.0.content: expected a valid string or a ",
        ),
    ],
)
def test_an_error_about_a_value_s_type_names_all_accepted_types_once(
    http: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    """Either each was an error of its own, or only one was named."""
    needed = {"messages": {"model": "smollm2-135m-instruct", **CHAT}}.get(path, {})
    said = http.post(f"/v1/{path}", json={**needed, **body}).json()["error"]["message"]
    assert said.startswith(message)
    assert ";" not in said


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/chat/completions", 404, "there is no POST /chat/completions; did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/messages", 404, "there is no POST /v1/v1/messages; did you mean /v1/messages?"),
        ("POST", "/v1/embeddings", 404, "there is no POST /v1/embeddings; /openapi.json describes what there is"),
        ("GET", "/v1/chat/completions", 405, "/v1/chat/completions: expected POST, got GET"),
        (
            "POST",
            "/v1/responses/compact",
            404,
            "there is no POST /v1/responses/compact; /v1/responses/{name}: expected GET, got POST",
        ),
    ],
)
def test_a_wrong_address_gets_the_one_that_was_meant(
    http: httpx.Client, method: str, path: str, status: int, message: str
) -> None:
    response = http.request(method, path, json={} if method == "POST" else None)
    assert_error(response, status, message=message)


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0, "max_completion_tokens": None}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": -7, "max_completion_tokens": 2}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/completions", {"prompt": [49152]}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 1000}, "prompt"),
        ("/v1/completions", {"n": 2, "best_of": 3}, "best_of"),
        ("/v1/completions", {"n": 2, "best_of": 1}, "best_of"),
        (
            "/v1/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
            "response_format",
        ),
    ],
)
def test_errors_name_the_field_that_was_sent(http: httpx.Client, path: str, change: dict[str, Any], param: str) -> None:
    body = CHAT if "chat" in path else TEXT
    # As bytes: httpx does not encode half of a surrogate pair.
    content = json.dumps({**body, **change}).encode()
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert_error(response, 400, param=param, code=None)
    assert response.json()["error"]["message"].startswith(f"{param}:")


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/v1/completions", {"stop": "\ud800"}, "stop: expected Unicode text, got '\\ud800'"),
        ("/v1/completions", {"\ud800": 1}, "body: expected names of fields in Unicode, got '\\ud800'"),
        (
            "/v1/completions",
            {"stream_options": {"\ud800": 1}},
            "stream_options: expected names of fields in Unicode, got '\\ud800'",
        ),
        ("/v1/responses", {"metadata": {"a": "\ud800"}}, "metadata.a: expected Unicode text, got '\\ud800'"),
        (
            "/v1/responses",
            {"metadata": {"\ud800": "a"}},
            "metadata: expected names of fields in Unicode, got '\\ud800'",
        ),
    ],
)
def test_text_that_is_not_unicode_is_named(http: httpx.Client, path: str, change: dict[str, Any], message: str) -> None:
    """Of a field's name, only pydantic's words about raw data were said; one within an object was called a text."""
    content = json.dumps({**TEXT, **change}).encode()
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert_error(response, 400, message=message)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_parts_of_a_message_that_are_no_text_are_refused(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    known = "text, refusal, thinking, redacted_thinking"
    message = f"messages.0.content.0: parts of type 'image_url' are not supported, only {known}"
    assert_error(response, 400, param="messages", message=message)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [5] * 8192}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "word " * 1_000_000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 1_000_000}]}, "messages"),
        ("/tokenize", {"prompt": "word " * 1_000_000}, "prompt"),
        # Tokenizing 8 MB of these took 9 s, in which no other prompt was tokenized.
        (
            "/tokenize",
            {
                "messages": CHAT["messages"],
                "tools": [{"type": "function", "function": {"name": "f", "description": "word " * 1_000_000}}],
            },
            "tools",
        ),
        (
            "/tokenize",
            {"messages": CHAT["messages"], "chat_template_kwargs": {"x": "word " * 1_000_000}},
            "chat_template_kwargs",
        ),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"x": "word " * 1_000_000}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "name": "word " * 1_000_000}]}, "messages"),
        ("/detokenize", {"tokens": [5] * 8193}, "tokens"),
    ],
)
def test_a_prompt_that_is_too_long_has_openais_code(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert_error(http.post(path, json=body), 400, code="context_length_exceeded", param=param)


def test_only_what_is_alike_and_supported_is_taken_for_what_was_meant(http: httpx.Client) -> None:
    for name, hint in (("stop", ""), ("min_p", ""), ("promt", ""), ("max_tokens", "; did you mean max_output_tokens?")):
        response = http.post("/v1/responses", json={"input": "Hi", name: 1})
        assert_error(response, 400, message=f"{name}: unknown or not supported{hint}", param=name)


def test_the_largest_stop_strings_are_accepted(http: httpx.Client) -> None:
    for stop in (["x" * 1000] * 32, "x" * 1000):
        assert http.post("/v1/completions", json={**TEXT, "stop": stop}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [1, "two"]}),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1, "use_beam_search": True}),
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "narrator", "content": "x"}]}),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": CHAT["messages"]}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [60000]}),
    ],
)
def test_invalid_prompts_are_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert_error(http.post(path, json=body), 400)


def test_json_that_is_deeply_nested_is_refused(http: httpx.Client) -> None:
    """Python used to parse it, but what was done with it afterwards failed, and the request with it."""

    def nested(depth: int) -> str:
        return '{"a":' * depth + "1" + "}" * depth

    for depth, status in ((127, 200), (128, 400), (900, 400)):
        content = f'{{"prompt": "x", "max_tokens": 1, "metadata": {nested(depth)}}}'
        response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == status, response.text
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": nested(950)}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    response = http.post("/tokenize", json={"messages": messages})
    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:30]),
)
def test_malformed_bodies_are_refused(http: httpx.Client, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = http.post(path, content=content, headers={"content-type": "application/json"})
        assert_error(response, 400)
    as_text = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert_error(as_text, 400, message="body: expected a JSON object, sent with content-type: application/json")
    empty = http.post("/v1/completions")
    assert_error(empty, 400, message="body: expected a JSON object, sent with content-type: application/json")
    for content, message in (
        (b'{"prompt": "\xff"}', "body: expected JSON in UTF-8, got byte 0xff at 12"),
        (b"[" * 5000, "body: expected at most 128 lists and objects within each other"),
        (b'{"n": ' + b"9" * 5000 + b"}", "body: expected whole numbers of at most 4,300 digits"),
    ):
        unreadable = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert_error(unreadable, 400, message=message)
    cut = http.post("/v1/completions", content=b'{"prompt": ', headers={"content-type": "application/json"})
    assert_error(cut, 400, message="body: no JSON from character 11 on: Expecting value", param=None)


def test_unknown_models_paths_and_methods(http: httpx.Client, client: openai.OpenAI) -> None:
    assert_error(http.post("/v1/completions", json={**TEXT, "model": "x"}), 404, code="model_not_found", param="model")
    with pytest.raises(openai.NotFoundError, match="'x' is not served here"):
        client.chat.completions.create(model="x", messages=CHAT["messages"])  # type: ignore[arg-type]
    assert len(http.post("/v1/completions", json={**TEXT, "model": "m" * 500_000}).content) < 400
    assert_error(http.get("/nothing"), 404)
    assert_error(http.get("/v1/completions"), 405)


def test_keys_are_checked(server: ServerProcess) -> None:
    for key in (None, "wrong", ADMIN_KEY):
        with server.client(key) as client:
            assert_error(client.post("/v1/completions", json=TEXT), 401, code="invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        server.openai("wrong").models.list()
    with server.client("wrong") as client:
        for path in ("clear_cache", "check", "drain"):
            assert_error(client.post(f"/admin/{path}", json={}), 401)


def test_a_body_that_is_too_long_is_refused(http: httpx.Client) -> None:
    assert_error(http.post("/v1/completions", content=b" " * (9 << 20)), 413)
    chunks = (b" " * (1 << 20) for _ in range(9))
    assert_error(http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"}), 413)
