"""`/v1/chat/completions` through the `openai` client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from support.server_process import MODEL

from radixkv import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def chat(client: openai.OpenAI, messages: Any = QUESTION, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_completion_tokens": 8, "temperature": 0, **options}
    )


def test_answers_are_those_of_the_library(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0].outputs[0].text
    full = chat(client)
    assert full.object == "chat.completion"
    assert full.choices[0].message.role == "assistant"
    assert full.choices[0].message.content == expected
    chunks = list(chat(client, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == full.choices[0].finish_reason


def test_a_conversation_reuses_what_came_before(client: openai.OpenAI) -> None:
    first = chat(client)
    longer = [*QUESTION, {"role": "assistant", "content": first.choices[0].message.content}, *QUESTION]
    usage = chat(client, longer).usage
    # The question and, where its text is tokenized as it was generated, the answer.
    assert usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    *_, last = chat(client, longer, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_an_answer_may_be_sent_back_as_the_client_dumps_it(client: openai.OpenAI) -> None:
    answer = chat(client).choices[0].message
    texts = {
        chat(client, [*QUESTION, as_sent, *QUESTION]).choices[0].message.content
        for as_sent in (answer, answer.model_dump(), {"role": "assistant", "content": answer.content})
    }
    assert len(texts) == 1
    with pytest.raises(openai.BadRequestError, match="tool_calls"):
        chat(client, [*QUESTION, {**answer.model_dump(), "tool_calls": [{"id": "1"}]}, *QUESTION])


def test_messages_may_come_in_parts_and_from_developers(client: openai.OpenAI) -> None:
    plain = [{"role": "system", "content": "Be brief.\nBe kind."}, *QUESTION]
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert chat(client, plain).choices[0].message.content == (
        chat(client, [{"role": "developer", "content": parts}, *QUESTION]).choices[0].message.content
    )


def test_the_last_message_may_be_continued(default_client: openai.OpenAI, http: httpx.Client) -> None:
    unfinished = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "The capital of France"}]}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    tokens = http.post("/tokenize", json={"messages": unfinished, **options}).json()["tokens"]
    rendered = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert rendered.endswith("<|im_start|>assistant\nThe capital of France")
    answer = chat(default_client, unfinished, extra_body=options)
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.choices[0].message.content.startswith(" is Paris")
    # Where the last message is complete, the answer is a new message.
    assert not chat(default_client, unfinished).choices[0].message.content.startswith(" is")
    bare = chat(default_client, extra_body={"add_generation_prompt": False})
    assert (
        bare.usage.prompt_tokens < chat(default_client, extra_body={"add_generation_prompt": True}).usage.prompt_tokens
    )


@pytest.mark.parametrize(
    ("last", "options", "param"),
    [
        ("assistant", {"continue_final_message": True}, "continue_final_message"),
        ("assistant", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("user", {"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ("assistant", {"continue_final_message": 1, "add_generation_prompt": False}, "continue_final_message"),
        ("assistant", {"add_generation_prompt": "no"}, "add_generation_prompt"),
    ],
)
def test_contradictory_options_for_the_last_message_are_refused(
    http: httpx.Client, last: str, options: dict[str, Any], param: str
) -> None:
    messages = [*QUESTION, {"role": last, "content": "The"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        response = http.post(path, json={"messages": messages, **options})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_samples_and_stop(default_client: openai.OpenAI) -> None:
    sampled = chat(default_client, n=4, temperature=1.2, seed=-3, max_completion_tokens=12)
    assert [choice.index for choice in sampled.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in sampled.choices}) > 1
    again = chat(default_client, n=4, temperature=1.2, seed=-3, max_completion_tokens=12)
    assert [c.message.content for c in again.choices] == [c.message.content for c in sampled.choices]
    stopped = chat(default_client, stop=" of").choices[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " of")
    assert " of" not in stopped.message.content


def test_logprobs(default_client: openai.OpenAI) -> None:
    assert chat(default_client, logprobs=False, top_logprobs=0).choices[0].logprobs is None
    choice = chat(default_client, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content + "<|im_end|>"
    assert bytes(byte for entry in entries[:-1] for byte in entry.bytes).decode() == choice.message.content
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token  # greedily chosen
    streamed = [e for chunk in chat(default_client, logprobs=True, stream=True) for e in _entries(chunk)]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    assert all(entry.top_logprobs == [] for entry in streamed)


def _entries(chunk: Any) -> list[Any]:
    logprobs = chunk.choices[0].logprobs
    return [] if logprobs is None else logprobs.content


def test_an_answer_has_all_fields_that_the_api_requires(http: httpx.Client) -> None:
    """Some clients are generated from OpenAI's description, and take no answer without them."""
    body = {"messages": QUESTION, "max_tokens": 1, "logprobs": True}
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"]["refusal"] is None


def test_max_tokens_by_either_name_and_by_default(default_client: openai.OpenAI) -> None:
    assert chat(default_client, max_tokens=3, max_completion_tokens=None).usage.completion_tokens == 3
    assert chat(default_client, max_tokens=5, max_completion_tokens=2).usage.completion_tokens == 2
    natural = chat(default_client, max_completion_tokens=None)
    assert natural.choices[0].finish_reason == "stop"


def test_beam_search(client: openai.OpenAI) -> None:
    beams = chat(client, n=2, extra_body={"use_beam_search": True})
    assert len({choice.message.content for choice in beams.choices}) == 2
    best = chat(client, extra_body={"use_beam_search": True, "beam_width": 2})
    assert best.choices[0].message.content == beams.choices[0].message.content
    assert best.usage.prompt_tokens_details.cached_tokens == best.usage.prompt_tokens - 1


def test_null_is_the_default(http: httpx.Client) -> None:
    names = [
        "n",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "logit_bias",
        "stream",
        "stream_options",
        "user",
        "cache",
        "logprobs",
        "add_generation_prompt",
        "continue_final_message",
    ]
    body = {"messages": QUESTION, "max_tokens": 1, **dict.fromkeys(names)}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 1
