"""What an ingress keeps of an answer: enough for another replica to go on with it, and nothing twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixkv import CompletionOutput, RequestOutput
from radixkv.cluster.received_answer import ReceivedAnswer
from radixkv.outputs import DraftCounts, Logprob, RequestMetrics


def test_a_replica_drained_before_the_first_token_reports_nothing_of_the_prompt() -> None:
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, RequestMetrics(0.0))
    received = ReceivedAnswer(1, (), 8, known.metrics)
    drained = replace(known, outputs=[CompletionOutput(0, "", [], 0.0, finish_reason="abort")], finished=True)
    returned = received.add(drained)
    assert (returned.finished, returned.num_cached_tokens) == (False, 0)
    begun = replace(
        known,
        outputs=[CompletionOutput(0, "a", [7], 0.0)],
        num_cached_tokens=1,
        prompt_logprobs=[None, {6: Logprob(-1.0, 1, None)}],
    )
    delta = received.add(begun)
    assert (delta.num_cached_tokens, delta.prompt_logprobs) == (1, begun.prompt_logprobs)
    later = received.add(replace(known, outputs=[CompletionOutput(0, "b", [8], 0.0)]))
    assert later.prompt_logprobs == begun.prompt_logprobs
    assert received.outputs[0].token_ids == [7, 8]


def test_an_answer_that_was_aborted_elsewhere_goes_on() -> None:
    """Its first new tokens used to be refused as those of a sample that has ended."""
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, RequestMetrics(0.0))
    received = ReceivedAnswer(1, (CompletionOutput(0, "a", [7], 0.0, finish_reason="abort"),), 8, known.metrics)
    received.add(replace(known, outputs=[CompletionOutput(0, "b", [8], 0.0)]))
    assert (received.outputs[0].token_ids, received.outputs[0].finish_reason) == ([7, 8], None)


def test_a_sample_that_has_ended_does_not_go_on() -> None:
    metrics = RequestMetrics(0.0)
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, metrics)
    received = ReceivedAnswer(2, (), 8, metrics)
    ended = CompletionOutput(0, "a", [7], 0.0, finish_reason="stop")
    received.add(replace(known, outputs=[ended]))
    for part in (replace(ended, token_ids=[8]), replace(ended, token_ids=[], finish_reason=None)):
        with pytest.raises(ValueError, match="nothing more of sample 0, which has ended"):
            received.add(replace(known, outputs=[CompletionOutput(1, "b", [9], 0.0), part]))
    assert [output.token_ids for output in received.outputs] == [[7], []]
    assert received.add(replace(known, outputs=[replace(ended, token_ids=[])])).outputs == []


def test_the_end_of_a_sample_that_came_with_the_request_is_returned_once() -> None:
    metrics = RequestMetrics(0.0)
    ended = CompletionOutput(0, "a", [7], 0.0, finish_reason="stop")
    received = ReceivedAnswer(2, (ended, CompletionOutput(1, "b", [8], 0.0)), 8, metrics)
    again = RequestOutput("one", None, [5, 6], None, [replace(ended, text="", token_ids=[])], False, 0, metrics)
    assert [received.add(again).outputs, received.add(again).outputs] == [again.outputs, []]


def test_what_replicas_count_for_one_request_is_added_up() -> None:
    metrics = RequestMetrics(0.0)
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, metrics)
    received = ReceivedAnswer(1, (), 8, metrics)
    for loaded, drafts in ((16, [(4, 2), (6, 3)]), (32, [(5, 5)])):
        received.begin_attempt()
        for drafted, accepted in drafts:
            counted = RequestMetrics(0.0, loaded_tokens={"disk": loaded}, load_seconds=0.5)
            counted.drafts["tree"] = DraftCounts(drafted, accepted)
            delta = replace(known, outputs=[CompletionOutput(0, "a", [7], 0.0)], metrics=counted)
            assert received.add(delta).metrics is metrics
    assert metrics.drafts == {"tree": DraftCounts(11, 8)}
    # As for cached tokens, the replica that had the prompt first counts.
    assert (metrics.loaded_tokens, metrics.load_seconds) == ({"disk": 16}, 0.5)


def test_resumed_samples_are_copies_with_all_that_continuing_needs() -> None:
    metrics = RequestMetrics(0.0)
    given = CompletionOutput(1, "b", [8], -1.0)
    received = ReceivedAnswer(2, (given,), None, metrics)
    begun = [(output.index, output.token_ids, output.cumulative_logprob) for output in received.outputs]
    assert begun == [(0, [], 0.0), (1, [8], -1.0)]
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, metrics)
    parts = [
        CompletionOutput(1, "c", [9], -3.5, finish_reason="stop", stop_reason=9),
        CompletionOutput(0, "", [], 0.0, finish_reason="stop", stop_reason="x"),
    ]
    delta = received.add(replace(known, outputs=parts, finished=True))
    assert delta.finished
    assert delta.outputs == parts
    first, second = received.outputs
    assert (first.token_ids, first.finish_reason, first.stop_reason) == ([], "stop", "x")
    assert (second.token_ids, second.cumulative_logprob) == ([8, 9], -3.5)
    assert (second.finish_reason, second.stop_reason) == ("stop", 9)
    assert given.token_ids == [8]


def test_samples_of_which_one_has_ended_without_a_token_do_not_begin_anew() -> None:
    received = ReceivedAnswer(2, (), 8, RequestMetrics(0.0))
    assert received.outputs == []  # so that they share the computation of their prompt
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, RequestMetrics(0.0))
    received.add(replace(known, outputs=[CompletionOutput(1, "", [], 0.0, finish_reason="stop")]))
    assert [output.finish_reason for output in received.outputs] == [None, "stop"]


def test_an_answer_of_which_a_sample_was_cut_short_has_not_ended() -> None:
    received = ReceivedAnswer(2, (), 8, RequestMetrics(0.0))
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, RequestMetrics(0.0))
    ends = [CompletionOutput(0, "a", [7], 0.0, finish_reason="stop"), CompletionOutput(1, "b", [8], 0.0, None, "abort")]
    delta = received.add(replace(known, outputs=ends, finished=True))
    assert not delta.finished
    assert [part.finish_reason for part in delta.outputs] == ["stop", None]


def test_an_answer_whose_samples_had_all_ended_goes_on_until_each_end_is_returned() -> None:
    metrics = RequestMetrics(0.0)
    ends = [CompletionOutput(index, "a", [7], 0.0, finish_reason="stop") for index in range(2)]
    received = ReceivedAnswer(2, ends, 8, metrics)
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, metrics)
    for end, finished in zip(ends, (False, True), strict=True):
        delta = received.add(replace(known, outputs=[replace(end, text="", token_ids=[])], finished=finished))
        assert (delta.finished, len(delta.outputs)) == (finished, 1)


def test_an_answer_that_ends_without_a_token_has_its_prompt_s_cached_tokens() -> None:
    received = ReceivedAnswer(1, (), 8, RequestMetrics(0.0))
    counted = RequestMetrics(0.0, loaded_tokens={"disk": 16}, load_seconds=0.5)
    outputs = [CompletionOutput(0, "", [], 0.0, finish_reason="stop")]
    delta = received.add(RequestOutput("one", None, [5, 6], None, outputs, True, 1, counted))
    assert (delta.finished, delta.num_cached_tokens) == (True, 1)
    assert (delta.metrics.loaded_tokens, delta.metrics.load_seconds) == ({"disk": 16}, 0.5)


def test_more_tokens_than_may_be_are_refused_whole() -> None:
    received = ReceivedAnswer(2, (CompletionOutput(0, "a", [7], 0.0),), 2, RequestMetrics(0.0))
    known = RequestOutput("one", None, [5, 6], None, [], False, 0, RequestMetrics(0.0))
    parts = [CompletionOutput(1, "", [4, 5], 0.0), CompletionOutput(0, "", [8, 9], 0.0)]
    with pytest.raises(ValueError, match=r"^expected at most 2 tokens of sample 0, got 3$"):
        received.add(replace(known, outputs=parts))
    assert [output.token_ids for output in received.outputs] == [[7], []]
    received.add(replace(known, outputs=[parts[0], CompletionOutput(0, "", [8], 0.0)]))
    assert [output.token_ids for output in received.outputs] == [[7, 8], [4, 5]]


def test_the_first_token_of_any_sample_brings_the_prompt_s_cached_tokens() -> None:
    received = ReceivedAnswer(2, (), 8, RequestMetrics(0.0))
    parts = [CompletionOutput(0, "", [], 0.0), CompletionOutput(1, "b", [8], 0.0)]
    first = RequestOutput("one", None, [5, 6], None, parts, False, 1, RequestMetrics(0.0))
    later = replace(first, outputs=[CompletionOutput(0, "a", [7], 0.0)], num_cached_tokens=0)
    assert [received.add(delta).num_cached_tokens for delta in (first, later)] == [1, 1]
