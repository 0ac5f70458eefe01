"""A pool that is smaller than the model's length: sequences are as long as it has room for, and reach that length."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from support.drafters import Guesser
from support.in_process_server import make_client
from support.model_zoo import VOCAB_SIZE, build_supported
from support.replica_servers import tiny_llm

from radixkv import LLM, AsyncLLM, SamplingParams
from radixkv.errors import PromptTooLongError
from radixkv.outputs import CompletionOutput

BLOCK_SIZE, NUM_BLOCKS = 4, 10
LENGTH = BLOCK_SIZE * NUM_BLOCKS + 1
UNBOUNDED = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
PROMPTS = [[3, 5, 7], [3, 5, 7, 9, 11, 13], [3, 5, 8, 2, 2, 40, 41]]


def make(num_blocks: int = NUM_BLOCKS, **options: Any) -> LLM:
    return LLM(build_supported("llama"), block_size=BLOCK_SIZE, num_blocks=num_blocks, **options)


def answer(llm: LLM, prompt: list[int], params: SamplingParams = UNBOUNDED) -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def expected_tokens(prompt: list[int], **options: Any) -> list[int]:
    """What a pool with room for more answers up to `LENGTH`."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH - len(prompt), ignore_eos=True)
    return answer(make(num_blocks=400, **options), prompt, params).token_ids


def test_the_length_is_that_of_the_model_and_of_the_pool() -> None:
    assert make().engine.loaded.max_model_len == LENGTH
    assert make(max_model_len=LENGTH).engine.loaded.max_model_len == LENGTH
    assert make(max_model_len=LENGTH - 1).engine.loaded.max_model_len == LENGTH - 1
    assert make(num_blocks=200).engine.loaded.max_model_len == 512
    assert make(kv_cache_dtype="fp8").engine.loaded.max_model_len == LENGTH
    smallest = LLM(build_supported("llama"), block_size=1, num_blocks=1)
    assert smallest.engine.loaded.max_model_len == 2
    assert len(answer(smallest, [3]).token_ids) == 1


def test_a_longer_prompt_is_told_what_to_raise_where_the_model_would_take_it() -> None:
    sentence = f"a sequence has at most {LENGTH}, of which at least one is to be generated"
    with pytest.raises(
        PromptTooLongError, match=f"{sentence}; the model allows 512, .*: raise kv_cache_memory_bytes or"
    ):
        answer(make(), [3] * LENGTH)
    with pytest.raises(PromptTooLongError, match=f"{sentence}$"):
        answer(make(max_model_len=LENGTH), [3] * LENGTH)


def test_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    for options, level in (
        ({}, logging.INFO),
        ({"max_model_len": 100}, logging.WARNING),
        ({"max_model_len": 41}, None),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            make(**options)
        told = [record for record in caplog.records if "a sequence has at most 41 tokens" in record.getMessage()]
        assert [record.levelno for record in told] == ([] if level is None else [level])


def test_the_log_has_the_size_of_the_kv_cache(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pool = make().engine.pool
    size = f"{pool.nbytes / 2**30:.2f} GiB"
    assert f"KV cache: 10 blocks of 4 tokens ({size}), 40 tokens in all" in caplog.messages


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 3},
        {"enable_prefix_caching": False},
        {"kv_cache_dtype": "fp8"},
        {"speculative_config": {"method": "tree", "num_speculative_tokens": 8}},
    ],
)
def test_answers_go_on_to_the_length_as_in_a_large_pool(options: dict[str, Any]) -> None:
    expected = [expected_tokens(prompt, **options) for prompt in PROMPTS]
    llm = make(**options)
    for params in (UNBOUNDED, SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)):
        for _ in range(2):  # then the pool is full of what is cached
            outputs = [answer(llm, prompt, params) for prompt in PROMPTS]
            assert [output.token_ids for output in outputs] == expected
            assert {output.finish_reason for output in outputs} == {"length"}
    together = llm.generate(PROMPTS * 2, UNBOUNDED, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == expected * 2
    assert llm.engine.scheduler.num_preemptions > 0
    llm.engine.cache.check()


def test_wrong_drafts_take_no_room_beyond_the_length() -> None:
    drafters = [Guesser(2, VOCAB_SIZE, bad=False)]
    llm = make(speculative_config={"drafters": drafters, "num_speculative_tokens": 8})
    for prompt in PROMPTS * 2:
        assert answer(llm, prompt).token_ids == expected_tokens(prompt)


def test_several_samples_reach_the_length() -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=None, ignore_eos=True)
    outputs = make().generate(PROMPTS[0], params, use_tqdm=False)[0].outputs
    assert [len(output.token_ids) for output in outputs] == [LENGTH - len(PROMPTS[0])] * 3


def test_a_prompt_may_leave_room_for_one_token_and_not_for_none() -> None:
    llm = make()
    output = answer(llm, list(range(3, 3 + LENGTH - 1)))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    with pytest.raises(
        PromptTooLongError, match=f"{LENGTH} tokens > {LENGTH - 1} maximum; a sequence has at most {LENGTH}"
    ):
        answer(llm, list(range(3, 3 + LENGTH)))


async def test_a_server_reports_that_length_and_refuses_longer_prompts_by_their_code(default_tokenizer: Any) -> None:
    async with AsyncLLM(tiny_llm(default_tokenizer, num_blocks=4)) as engine, make_client(engine) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        tokenized = (await client.post("/tokenize", json={"prompt": "Hi."})).json()
        assert model["max_model_len"] == tokenized["max_model_len"] == 65
        for prompt in ([5] * 65, [5] * 66, "Hi. " * 40):
            response: httpx.Response = await client.post("/v1/completions", json={"prompt": prompt})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
        body = {"prompt": [5] * 64, "max_tokens": 9, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body)
        assert response.json()["usage"]["total_tokens"] == 65
