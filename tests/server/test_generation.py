"""What a response is made of: texts of beams, tokens of several prompts, and the times of the one that came first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from support.chat_templates import text_interface

from radixkv import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from radixkv.outputs import BeamSearchOutput, BeamSearchSequence, DraftCounts, RequestMetrics
from radixkv.prompts import Prompt
from radixkv.server.access.rate_limits import Reservation
from radixkv.server.completions import CompletionRequest
from radixkv.server.generation import Generation
from radixkv.serving.request_stream import OutputDelta, RequestStream

LOADED = text_interface("")
A, B, C = LOADED.require_tokenizer().convert_tokens_to_ids(["a", "b", "c"])
PROMPT = Prompt([A, A])


def generation_of(
    outputs: Sequence[OutputDelta], params: SamplingParams | BeamSearchParams, **fields: Any
) -> Generation:
    """The answers to a prompt each, which are there already; the token C ends them."""
    streams = [RequestStream("one", Mock(), output.metrics) for output in outputs]
    for stream, output in zip(streams, outputs, strict=True):
        stream.put(output)
    return Generation(
        loaded=replace(LOADED, eos_token_ids=frozenset({C})),
        prompts=[PROMPT] * len(outputs),
        params=params,
        body=CompletionRequest(prompt="x", **fields),
        streams=streams,
        timers=[Mock() for _ in outputs],
        deadlines=Mock(),
        reservation=Reservation(None, None, 0),
        request_id="one",
        explanations=None,
        prompt_only=False,
    )


@pytest.mark.parametrize(
    ("token_ids", "finish_reason", "stop_reason", "expected"),
    [
        ([A, C], "stop", None, "a"),
        ([A, B], "stop", None, "ab"),  # its grammar allows nothing more
        ([A, C], "length", None, "ac"),  # with ``ignore_eos``
        ([A, B], "stop", "b", "a"),
        ([A, C], "stop", "c", "a"),  # with ``ignore_eos``
    ],
)
async def test_what_ends_a_beam_is_not_in_its_text(
    token_ids: list[int], finish_reason: Any, stop_reason: str | None, expected: str
) -> None:
    beam = BeamSearchSequence([*PROMPT.token_ids, *token_ids], [], -1.0, None, finish_reason, stop_reason)
    result = BeamSearchOutput([beam], 2, 0, RequestMetrics(0.0))
    (answer,) = (await generation_of([result], BeamSearchParams(2, 4), use_beam_search=True).collect()).values()
    assert (answer.text, answer.token_ids) == (expected, token_ids)
    assert (answer.finish_reason, answer.stop_reason) == (finish_reason, stop_reason)


async def test_a_search_that_found_nothing_is_not_complete() -> None:
    """None of a model's logits is a number: what was reserved for its beams was computed."""
    nothing = BeamSearchOutput([], 2, 0, RequestMetrics(0.0))
    generation = generation_of([nothing], BeamSearchParams(2, 4), use_beam_search=True)
    assert await generation.collect() == {}
    assert not generation.complete


async def test_who_leaves_early_ends_every_prompt_and_its_time_limits() -> None:
    begun = [
        RequestOutput(
            "one", None, PROMPT.token_ids, None, [CompletionOutput(0, "b", [B])], False, 0, RequestMetrics(0.0)
        )
        for _ in range(2)
    ]
    generation = generation_of(begun, SamplingParams())
    async with aclosing(aiter(generation)) as deltas:
        await anext(deltas)
    assert all(stream.closed for stream in generation.streams)
    for part in (generation.deadlines.close, *(timer.end for timer in generation.timers)):
        assert isinstance(part, Mock)
        part.assert_called_once_with()


async def test_usage_adds_up_all_prompts_and_times_are_those_of_the_first() -> None:
    answers = [
        RequestOutput(
            "one",
            None,
            PROMPT.token_ids,
            None,
            [CompletionOutput(0, "b", [B] * length, finish_reason="length")],
            True,
            1,
            RequestMetrics(0.0, loaded_tokens={"disk": 1}, drafts={"prompt": DraftCounts(9, 4), "radix": drafted}),
        )
        for length, drafted in ((3, DraftCounts(5, 5)), (4, DraftCounts(1, 0)))
    ]
    generation = generation_of(answers, SamplingParams())
    order = [delta.prompt async for delta in generation]
    assert sorted(order) == [0, 1]
    assert generation.complete
    assert generation.times is answers[order[0]].metrics
    assert generation.usage.model_dump() == {
        "prompt_tokens": 4,
        "completion_tokens": 7,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2, "loaded_tokens": {"disk": 2}},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 13,
            "rejected_prediction_tokens": 11,
        },
    }
