"""Each reader of a replica's events gets the requests that others have sent, and the end of each of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.pretended_replicas import GREEDY

from radixkv import CompletionOutput, SamplingParams
from radixkv.cache import InvalidArgumentError
from radixkv.cluster.announced_requests import AnnouncedRequests, PendingRequest
from radixkv.cluster.feed import RecordFeed
from radixkv.cluster.records import Kind, RecordReader, decode_arrived, decode_number
from radixkv.prompts import Prompt

BLOCK = 4
OTHER = 9  # an ingress that reads nothing, or no longer


class Reader:
    """One reader, and the numbers of the requests that are unfinished, and prefilled, as far as it knows."""

    def __init__(self, sender: int = 0) -> None:
        self.sender = sender
        self.feed = RecordFeed(BLOCK, lambda: None)
        self.known: set[int] = set()
        self.prefilled: set[int] = set()
        self.num_records = 0

    def read(self, data: bytes) -> None:
        for kind, payload in RecordReader().read(data):
            self.num_records += 1
            if kind is Kind.ARRIVED:
                number = decode_arrived(payload, BLOCK).number
                assert number not in self.known
                self.known.add(number)
                continue
            assert decode_number(payload) in self.known
            if kind is Kind.PREFILLED:
                self.prefilled.add(decode_number(payload))
            else:
                self.known.discard(decode_number(payload))
                self.prefilled.discard(decode_number(payload))


class Unfinished(RuleBasedStateMachine):
    """Requests come and end, readers come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = AnnouncedRequests()
        self.present: dict[int, PendingRequest] = {}
        self.prefilled: set[int] = set()
        self.readers: list[Reader] = []

    @rule(length=st.integers(1, 10), sender=st.sampled_from([1, 2, OTHER]))
    def take(self, length: int, sender: int) -> None:
        request = self.requests.add(Prompt(list(range(length))), GREEDY, sender)
        self.present[request.number] = request

    @precondition(lambda self: self.present)
    @rule(which=st.integers(0, 100))
    def prefill(self, which: int) -> None:
        number = sorted(self.present)[which % len(self.present)]
        self.prefilled.add(number)
        for _ in range(2):
            self.present[number].prefilled()

    @precondition(lambda self: self.present)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        request = self.present.pop(sorted(self.present)[which % len(self.present)])
        self.prefilled.discard(request.number)
        for _ in range(2):
            request.end()
        request.prefilled()  # an answer may end before it is known that its prompt is computed

    @rule(sender=st.integers(1, 3), prefilled=st.integers(0, 2), ended=st.integers(0, 3))
    def join(self, sender: int, prefilled: int, ended: int) -> None:
        """Some requests are prefilled, or end, while the reader gets the first records."""
        reader = Reader(sender)
        records = self.requests.join(reader.feed, sender)
        for which in range(min(prefilled, len(self.present))):
            self.prefill(which)
        for _ in range(min(ended, len(self.present))):
            self.end(0)
        self.readers.append(reader)
        reader.read(b"".join(records))

    @rule(num_read=st.integers(0, 2))
    def join_and_leave(self, num_read: int) -> None:
        """A reader leaves while it gets the first records."""
        feed = RecordFeed(BLOCK, lambda: None)
        list(islice(self.requests.join(feed, 1), num_read))
        self.requests.leave(feed)

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        reader = self.readers.pop(which % len(self.readers))
        self.requests.leave(reader.feed)
        self.requests.leave(reader.feed)
        reader.feed.take()
        self.take(3, OTHER)
        assert reader.feed.take() == b""

    @invariant()
    def each_reader_knows_what_is_unfinished_of_others(self) -> None:
        for reader in self.readers:
            reader.read(reader.feed.take())
            assert reader.known == {number for number, each in self.present.items() if each.sender != reader.sender}
            assert reader.prefilled == reader.known & self.prefilled

    def teardown(self) -> None:
        for request in self.present.values():
            request.end()
        assert not self.requests._requests
        for reader in self.readers:
            reader.read(reader.feed.take())
            assert not reader.known


TestUnfinished = Unfinished.TestCase
TestUnfinished.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_requests_of_an_ingress_that_reads_no_longer_are_announced_to_a_sole_reader() -> None:
    """With one reader nothing was announced: what another ingress still ran there did not count as work of the replica."""
    requests, reader = AnnouncedRequests(), Reader(1)
    assert not list(requests.join(reader.feed, 1))
    for sender, num_records in ((1, 0), (OTHER, 3)):
        request = requests.add(Prompt([1, 2, 3]), GREEDY, sender)
        request.prefilled()
        request.end()
        reader.num_records = 0
        reader.read(reader.feed.take())
        assert reader.num_records == num_records


def test_a_request_is_hashed_when_it_is_first_announced(monkeypatch: Any) -> None:
    hashed: list[int] = []

    def prompt_hashes(token_ids: list[int], namespace: str, block_size: int) -> list[int]:
        hashed.append(len(token_ids))
        return []

    monkeypatch.setattr("radixkv.cluster.announced_requests.prompt_hashes", prompt_hashes)
    requests, readers = AnnouncedRequests(), [Reader() for _ in range(3)]
    requests.join(readers[0].feed, 1)
    requests.add(Prompt([1, 2, 3]), GREEDY, 1)
    ended = requests.add(Prompt([1, 2]), GREEDY, 1)
    assert not hashed
    records = requests.join(readers[1].feed, 2)
    ended.end()
    assert len(list(records)) == 1
    assert len(list(requests.join(readers[2].feed, 3))) == 1
    assert hashed == [3]


@pytest.mark.parametrize("prompt", [Prompt([-1]), Prompt([]), Prompt(["a"]), Prompt([1], namespace=1)])  # type: ignore[list-item, arg-type]
def test_a_request_that_the_engine_will_refuse_is_not_announced(prompt: Prompt) -> None:
    requests, readers = AnnouncedRequests(), [Reader() for _ in range(2)]
    requests.join(readers[0].feed, 1)
    request = requests.add(prompt, GREEDY, 1)
    assert not list(requests.join(readers[1].feed, 2))
    request.end()
    with pytest.raises(InvalidArgumentError):
        requests.add(prompt, GREEDY, 1)
    assert not requests._requests


# The second one has ended: nothing of it has to be computed.
BEGUN = [CompletionOutput(0, "x", [2], 0.0), CompletionOutput(1, "xx", [2, 3], 0.0, finish_reason="stop")]


@pytest.mark.parametrize(
    ("prompt", "params", "expected"),
    [
        (Prompt([1] * 9), GREEDY, (9, 2)),
        (Prompt([1] * 9, read_cache=False), GREEDY, (9, 0)),
        (Prompt([1] * 9, write_cache=False), GREEDY, (9, 0)),
        # The log-probabilities of a prompt have to be computed, and are complete when its answer begins.
        (Prompt([1] * 9), replace(GREEDY, prompt_logprobs=0), (9, 0)),
        (Prompt([1] * 9, resume=BEGUN), replace(GREEDY, prompt_logprobs=0), (10, 2)),
    ],
)
def test_of_what_is_not_shared_by_the_cache_only_its_length_is_announced(
    prompt: Prompt, params: SamplingParams, expected: tuple[int, int]
) -> None:
    """With prompt_logprobs, what a replica held of a prompt did not count as work for it."""
    requests, feed = AnnouncedRequests(), RecordFeed(BLOCK, lambda: None)
    requests.add(prompt, params, 1)
    (record,) = requests.join(feed, OTHER)
    ((_, payload),) = RecordReader().read(record)
    arrived = decode_arrived(payload, BLOCK)
    assert (arrived.num_tokens, len(arrived.block_hashes)) == expected
