"""Models, tokens, health, version, the description of the API."""

from __future__ import annotations

import httpx
import openai
from support.server_process import ADMIN_KEY, MODEL, ServerProcess

import radixkv


def test_models_are_listed_and_retrieved(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "radixkv")
    assert client.models.retrieve(MODEL).id == MODEL
    assert http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 8192
    assert http.get("/v1/models/another/model").json()["error"]["code"] == "model_not_found"


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    text = "Grüße an alle, \N{SLICE OF PIZZA}!"
    response = http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert response["count"] == len(response["tokens"]) == len(response["token_strs"])
    assert response["max_model_len"] == 8192
    assert http.post("/detokenize", json={"tokens": response["tokens"]}).json() == {"prompt": text}

    messages = [{"role": "user", "content": "Hi"}]
    chat = http.post("/tokenize", json={"messages": messages}).json()
    rendered = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    shorter = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["tokens"] == chat["tokens"][: shorter["count"]]
    assert shorter["count"] < chat["count"]
    assert http.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"] == []


def test_the_load_of_an_idle_server_is_zero(http: httpx.Client) -> None:
    assert http.get("/load").json() == {"server_load": 0}


def test_version_ping_and_schema_need_no_key(server: object, http: httpx.Client) -> None:
    with httpx.Client(base_url=http.base_url, timeout=600, verify=False) as anonymous:
        assert [anonymous.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
        assert anonymous.get("/version").json() == {"version": radixkv.__version__}
        assert "/v1/chat/completions" in anonymous.get("/openapi.json").json()["paths"]


def test_head_is_answered_as_get_is_without_a_body(server: ServerProcess, http: httpx.Client) -> None:
    """Everything but /health and /ready refused it."""
    paths = http.get("/openapi.json").json()["paths"]
    assert not [path for path, operations in paths.items() if "head" in operations]
    listed = {path for path, operations in paths.items() if "get" in operations and "{" not in path}
    assert {"/v1/models", "/health", "/ready", "/live", "/load", "/metrics", "/version", "/admin/pins"} <= listed
    with server.client(ADMIN_KEY) as administrator:
        for path in (*listed, f"/v1/models/{MODEL}", "/", "/ping", "/openapi.json", "/v1/models/x", "/v1/responses/x"):
            client = administrator if path.startswith(("/admin", "/metrics")) else http
            got, head = (client.request(method, path) for method in ("GET", "HEAD"))
            assert (head.status_code, head.content) == (got.status_code, b"")
            varying = {"date", "content-length", *(name for name in got.headers if name.endswith("request-id"))}
            assert head.headers.keys() == got.headers.keys(), path
            assert [(name, head.headers[name]) for name in got.headers if name not in varying] == [
                (name, value) for name, value in got.headers.items() if name not in varying
            ]
    refused = http.head("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert http.head("/admin/pins").status_code == 401
    assert http.head("/v2/models").status_code == 404
