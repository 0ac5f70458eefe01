"""`/v1/completions` through the `openai` client and raw HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from support.in_process_server import served
from support.replica_servers import tiny_model
from support.server_process import MODEL

from radixkv import LLM

LONG = "The library opens at nine and closes at six. " * 20


def complete(client: openai.OpenAI, prompt: Any = "One, two, three,", **options: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, **options})


def test_streamed_and_full_answers_are_equal(default_client: openai.OpenAI) -> None:
    full = complete(default_client)
    assert full.object == "text_completion"
    assert full.choices[0].text == " four, five, six,"
    assert full.choices[0].finish_reason == "length"
    chunks = list(complete(default_client, stream=True))
    assert len(chunks) == 6
    assert "".join(chunk.choices[0].text for chunk in chunks) == full.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 5 + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_is_exact(client: openai.OpenAI, http: httpx.Client) -> None:
    num_prompt = http.post("/tokenize", json={"prompt": LONG}).json()["count"]
    first, again, longer = complete(client, LONG), complete(client, LONG), complete(client, LONG + "Its name is")
    assert first.usage.prompt_tokens == num_prompt
    assert first.usage.completion_tokens == 6
    assert first.usage.total_tokens == num_prompt + 6
    # All but the last token, whose logits are needed; the longer prompt's text may merge the shorter one's last token.
    assert [u.usage.prompt_tokens_details.cached_tokens for u in (first, again)] == [0, num_prompt - 1]
    assert longer.usage.prompt_tokens_details.cached_tokens >= num_prompt - 1
    *_, last = complete(client, LONG, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.prompt_tokens_details.cached_tokens == num_prompt - 1
    assert last.usage.completion_tokens == 6


def test_several_prompts_and_samples(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "One, two, three,"}).json()["tokens"]
    answer = complete(client).choices[0].text
    assert complete(client, ids).choices[0].text == answer
    texts = complete(client, ["Red, green,", "One, two, three,"])
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert texts.choices[1].text == answer
    assert [choice.text for choice in complete(client, [ids, ids]).choices] == [answer, answer]

    sampled = {"n": 3, "temperature": 1.0, "seed": 7}
    first = complete(client, ["Red, green,", "One, two,"], **sampled)
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3, 4, 5]
    assert len({choice.text for choice in first.choices}) > 1
    again = complete(client, ["Red, green,", "One, two,"], **sampled, stream=True)
    streamed = [""] * 6
    for chunk in again:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in first.choices]
    assert first.usage.completion_tokens == 36


def test_stop_strings_and_tokens(default_client: openai.OpenAI, http: httpx.Client) -> None:
    stopped = complete(default_client, stop=[" six", ", fi"]).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (" four", "stop", ", fi")
    streamed = complete(default_client, stop=", fi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == " four"
    kept = complete(default_client, stop=", fi", extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == " four, fi"
    (comma,) = http.post("/tokenize", json={"prompt": ","}).json()["tokens"]
    by_token = complete(default_client, extra_body={"stop_token_ids": [comma]}).choices[0]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", comma)
    assert by_token.text.startswith(" four")
    assert len(complete(default_client, extra_body={"stop_token_ids": [comma], "min_tokens": 5}).choices[0].text) > 6


def test_logprobs_and_echo(default_client: openai.OpenAI) -> None:
    choice = complete(default_client, logprobs=2, echo=True).choices[0]
    assert choice.text == "One, two, three, four, five, six,"
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert all(
        choice.text[offset:].startswith(token)
        for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    )
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    for token, logprob, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert len(top) in (2, 3)
        assert logprob <= max(top.values()) <= 0
        assert top[token] == logprob
    chunks = list(complete(default_client, logprobs=2, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens] == logprobs.tokens
    assert [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset] == logprobs.text_offset
    # Tokens that are parts of one character all begin where the character does.
    parts = complete(default_client, prompt="é🎉b", logprobs=0, echo=True, max_tokens=0).choices[0].logprobs
    assert [token.startswith("bytes:") for token in parts.tokens] == [False, True, True, True, False]
    assert parts.text_offset == [0, 1, 1, 1, 2]
    scoring = complete(default_client, logprobs=0, echo=True, max_tokens=0)
    assert scoring.usage.completion_tokens == 0
    scored = scoring.choices[0]
    assert scored.text == "One, two, three,"
    assert scored.logprobs.token_logprobs == pytest.approx(
        logprobs.token_logprobs[: len(scored.logprobs.tokens)], abs=1e-4
    )


def test_a_token_that_is_part_of_a_character_is_shown_by_its_bytes(client: openai.OpenAI) -> None:
    choice = complete(client, "I love \N{SLICE OF PIZZA}", logprobs=0, echo=True, max_tokens=0).choices[0]
    shown = [token.removeprefix("bytes:") for token in choice.logprobs.tokens if token.startswith("bytes:")]
    assert shown
    assert "".join(shown).replace("\\x", "") in "20" + "\N{SLICE OF PIZZA}".encode().hex()


def test_the_seed_minus_one_is_another_one_each_time(client: openai.OpenAI) -> None:
    """It was a seed like any other, unlike in vLLM and in `SamplingParams`."""
    assert len({complete(client, seed=-1, temperature=1.5, max_tokens=12).choices[0].text for _ in range(4)}) > 1
    again = {complete(client, seed=-2, temperature=1.5, max_tokens=12).choices[0].text for _ in range(2)}
    assert len(again) == 1


def test_logit_bias_and_penalties(default_client: openai.OpenAI, http: httpx.Client) -> None:
    (seven,) = http.post("/tokenize", json={"prompt": " seven"}).json()["tokens"]
    assert complete(default_client, logit_bias={str(seven): 100}).choices[0].text == " seven" * 6
    few = complete(
        default_client, logit_bias={str(seven): 15}, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=12
    )
    assert 1 < few.choices[0].text.count(" seven") < 12


def test_vllms_sampling_parameters_take_effect(default_client: openai.OpenAI) -> None:
    greedy = complete(default_client).choices[0].text
    for options in ({"top_k": 1}, {"min_p": 1.0}):
        assert complete(default_client, temperature=1.0, extra_body=options).choices[0].text == greedy
    assert complete(default_client, temperature=1.0, top_p=1e-6).choices[0].text == greedy
    assert complete(default_client, extra_body={"priority": 3}).choices[0].text == greedy
    assert complete(default_client, extra_body={"repetition_penalty": 1.5}, user="user-1").choices[0].text != greedy
    endless = complete(default_client, max_tokens=40, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert endless.usage.completion_tokens == 40


def test_beam_search(client: openai.OpenAI) -> None:
    beams = {"use_beam_search": True, "length_penalty": 0.5}
    beams |= {"skip_special_tokens": True, "include_stop_str_in_output": False}  # what beams do in any case
    wide = complete(client, n=3, logprobs=1, extra_body=beams)
    assert len({choice.text for choice in wide.choices}) == 3
    assert [choice.index for choice in wide.choices] == [0, 1, 2]
    assert all(len(choice.logprobs.tokens) == 6 for choice in wide.choices)
    best = complete(client, extra_body={**beams, "beam_width": 3})
    assert [choice.text for choice in best.choices] == [wide.choices[0].text]
    streamed = [""] * 3
    for chunk in complete(client, n=3, stream=True, extra_body=beams):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in wide.choices]


async def test_the_token_that_ends_a_beam_is_not_in_its_text(default_tokenizer: Any) -> None:
    """Special tokens are left out in any case; a model's end token need not be one."""
    model = tiny_model(len(default_tokenizer))
    model.generation_config.eos_token_id = list(range(2, 30000))
    llm = LLM(model, tokenizer=default_tokenizer, num_blocks=100)
    async with served(llm) as client:
        body = {"prompt": "The sea is", "max_tokens": 60, "temperature": 0, "return_token_ids": True}
        for search in ({}, {"use_beam_search": True, "n": 1}, {"use_beam_search": True, "n": 3}):
            for choice in (await client.post("/v1/completions", json={**body, **search})).json()["choices"]:
                assert choice["finish_reason"] == "stop"
                assert choice["token_ids"][-1] in llm.engine.loaded.eos_token_ids
                assert choice["text"] == default_tokenizer.decode(choice["token_ids"][:-1])


def test_null_max_tokens_is_the_default(client: openai.OpenAI) -> None:
    for max_tokens in (None, openai.omit):
        answer = complete(client, max_tokens=max_tokens, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 16


def test_cache_control(client: openai.OpenAI) -> None:
    def cached(**extra: Any) -> Any:
        return complete(client, LONG, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    assert cached(cache={"write": False}) == 0
    assert cached() == 0
    assert cached(cache={"read": False}) == 0
    full = cached()
    assert full > 150
    assert cached(cache_salt="pepper") == 0
    assert cached(cache_salt="pepper") == full
    assert cached(cache_salt="salt") == 0
    assert cached(cache={"read": True, "write": True}) == full


def test_a_client_may_lower_its_priority_and_not_raise_it(client: openai.OpenAI, http: httpx.Client) -> None:
    assert complete(client, "One, two,", extra_body={"priority": 3}).choices[0].text
    response = http.post("/v1/completions", json={"prompt": "One, two,", "priority": -1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
