"""Models, tokens, health, version, the description of the API."""

from __future__ import annotations

import httpx
import openai
from support.server_process import MODEL

import radixkv


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
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


def test_what_there_is_to_do(http: httpx.Client) -> None:
    assert http.get("/load").json() == {"server_load": 0}


def test_endpoints_without_a_key(server: object, http: httpx.Client) -> None:
    with httpx.Client(base_url=http.base_url, timeout=600, verify=False) as anonymous:
        assert [anonymous.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
        assert anonymous.get("/version").json() == {"version": radixkv.__version__}
        assert "/v1/chat/completions" in anonymous.get("/openapi.json").json()["paths"]
