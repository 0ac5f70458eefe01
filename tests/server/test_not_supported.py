"""Fields of unsupported features, which clients send with values that ask for nothing."""

from __future__ import annotations

from typing import Any

import httpx
from support.api_errors import assert_error

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TEXT = {"prompt": "Hi", "max_tokens": 1}

NOT_SUPPORTED_IN_CHAT: list[tuple[str, list[Any], list[Any]]] = [
    ("functions", [], [[{"name": "f"}]]),
    ("function_call", ["none"], ["auto"]),
    ("modalities", [["text"]], [["text", "audio"], ["audio"], []]),
    ("audio", [], [{"voice": "alloy", "format": "wav"}]),
    ("web_search_options", [], [{}]),
    ("moderation", [], [{"model": "x"}]),
    ("prompt_cache_retention", ["24h"], ["48h"]),
    ("thinking_token_budget", [-1], [100]),
    ("spaces_between_special_tokens", [True], [False]),
    ("return_tokens_as_token_ids", [False], [True]),
    ("kv_transfer_params", [], [{"do_remote_decode": True}]),
    ("vllm_xargs", [], [{"key": 1}]),
    ("echo", [False], [True]),
    ("include_reasoning", [True], [False]),
    ("chat_template", [], ["{{ messages }}"]),
    ("documents", [], [[{"text": "x"}]]),
    ("mm_processor_kwargs", [], [{"num_crops": 4}]),
    ("media_io_kwargs", [], [{"video": {"num_frames": 4}}]),
    ("logits_processors", [[]], [["x.y"]]),
    ("guided_whitespace_pattern", [], ["[ ]?"]),
    ("structural_tag", [], ["{}"]),
    ("truncation_side", ["left"], ["right"]),
    ("logprob_token_ids", [], [[5]]),
    ("repetition_detection", [], [{"max_pattern_size": 4}]),
    ("stream_interval", [1], [2]),
    ("watermarking", [False], [True]),
    ("session_id", [], ["a"]),
    ("return_prompt_text", [False], [True]),
    ("return_token_offsets", [False], [True]),
    ("return_mm_kwargs", [False], [True]),
    ("mm_payload", ["tensors"], ["none"]),
    ("routed_experts_prompt_start", [0], [1]),
    ("ec_transfer_params", [], [{}]),
]


def test_unsupported_fields_are_accepted_only_with_values_that_request_nothing(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    nothing = {name: None for name, _, _ in NOT_SUPPORTED_IN_CHAT}
    defaults = {name: values[0] for name, values, _ in NOT_SUPPORTED_IN_CHAT if values}
    plain = {**CHAT, "temperature": 0}
    answers = []
    for change in ({}, nothing, defaults, {"verbosity": "low"}):
        response = http.post(path, json={**plain, **change})
        assert response.status_code == 200, response.text
        answers.append(response.json()["choices"])
    assert answers == answers[:1] * 4
    for name, _, refused in NOT_SUPPORTED_IN_CHAT:
        for value in refused:
            response = http.post(path, json={**plain, name: value})
            assert_error(response, 400, param=name, message=f"{name}: not supported")
    for change in ({"suffix": None, "best_of": None, "vllm_xargs": None}, {"best_of": 1}, {"best_of": 2, "n": 2}):
        response = http.post("/v1/completions", json={**TEXT, **change})
        assert response.status_code == 200, response.text
    assert_error(http.post("/v1/completions", json={**TEXT, "suffix": "x"}), 400, message="suffix: not supported")
    assert_error(http.post("/v1/completions", json={**TEXT, "tools": None}), 400, param="tools")
