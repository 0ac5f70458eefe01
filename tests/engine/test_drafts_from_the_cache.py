"""Drafts from what the cache has of other requests: their answers are drafted again, and only for who may read them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.drafters import draft_from
from support.drafting_engines import drafting, plain_llm
from support.tiny_engine import add

from radixkv import SamplingParams
from radixkv.drafting import Draft, DraftContext, Drafter
from radixkv.drafting.sources import AnswerDrafter


def test_what_was_said_before_is_drafted_from_the_tree() -> None:
    """The same question again takes a fraction of the steps; another tenant's answer is never a draft."""
    llm = drafting(num_blocks=200)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=48, ignore_eos=True)

    def steps(namespace: str) -> tuple[int, Any]:
        before = llm.engine.num_steps
        (output,) = llm.generate({"prompt_token_ids": [4, 5, 6], "cache_salt": namespace}, params, use_tqdm=False)
        return llm.engine.num_steps - before, output

    first, output = steps("ann")
    again, repeated = steps("ann")
    elsewhere, stranger = steps("ben")
    assert output.outputs[0].token_ids == repeated.outputs[0].token_ids == stranger.outputs[0].token_ids
    assert again <= 48 // 7 + 2
    assert elsewhere == first
    assert repeated.metrics.drafts["prefix"].accepted >= 40
    assert "prefix" not in stranger.metrics.drafts


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that were drafted from other answers to the same prompt."""
    token_ids: list[int] = []
    draft = AnswerDrafter.draft

    def noting(drafter: AnswerDrafter, context: DraftContext, max_tokens: int) -> Draft:
        found = draft(drafter, context, max_tokens)
        token_ids.extend(found.token_ids)
        return found

    monkeypatch.setattr(AnswerDrafter, "draft", noting)
    return token_ids


def test_samples_get_drafts_from_an_earlier_answer_to_their_prompt(drafted: list[int]) -> None:
    """Only a sequence without any token was given one, and a sample has its first token from the beginning."""
    llm = drafting(num_blocks=200)
    prompt = {"prompt_token_ids": [4, 5, 6]}
    one, two = (SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=24, ignore_eos=True) for n in (1, 2))
    expected = [sample.token_ids for sample in plain_llm().generate(prompt, two)[0].outputs]
    (earlier,) = llm.generate(prompt, one)
    assert not drafted
    (output,) = llm.generate(prompt, two)
    assert [sample.token_ids for sample in output.outputs] == expected
    assert expected[0] == earlier.outputs[0].token_ids
    assert drafted
    assert {*drafted} <= {*expected[0]}


def test_a_cleared_answer_is_drafted_from_no_more(drafted: list[int]) -> None:
    """A sequence kept the earlier answer to its prompt, and the next tokens showed what it said."""
    llm = drafting(num_blocks=200)
    prompt = list(range(10, 60))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    engine = llm.engine
    request = add(engine, "again", prompt, params)
    while not drafted:
        engine.step()
    llm.reset_prefix_cache()
    drafted.clear()
    while not request.finished:
        engine.step()
    assert not drafted


def test_a_request_that_does_not_read_the_cache_gets_no_drafts_from_it() -> None:
    """It used to, and so showed by its time what is cached."""
    llm = drafting(num_blocks=200)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=48, ignore_eos=True)

    def sources(cache: dict[str, bool]) -> set[str]:
        (output,) = llm.generate({"prompt_token_ids": [4, 5, 6], "cache": cache}, params, use_tqdm=False)
        return {"prefix", "answer", "tree"} & set(output.metrics.drafts)

    assert not sources({})
    assert not sources({"read": False})
    assert sources({})


@pytest.mark.parametrize("switches", list(itertools.product([True, False], repeat=2)))
def test_drafters_learn_whether_a_request_reads_and_writes_the_cache(switches: tuple[bool, bool]) -> None:
    class Noting(Drafter):
        source = "noting"

        def draft(self, context: DraftContext, max_tokens: int) -> Draft:
            assert (context.read_cache, context.write_cache) == switches
            return Draft([3])

    llm = drafting()
    draft_from(llm, Noting())
    cache = dict(zip(("read", "write"), switches, strict=True))
    (output,) = llm.generate({"prompt_token_ids": [4, 5, 6], "cache": cache}, use_tqdm=False)
    assert "noting" in output.metrics.drafts
