"""Routers over the same replicas to which each other's requests are announced decide alike, and count nothing twice."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixkv.routing import Placement, Router

BLOCK = 16
NAMES = ("a", "b", "c")


def hashes_of(stem: int, fork: int, length: int) -> list[int]:
    """Hashes of a prompt: prompts of one stem have the blocks before the fork in common."""
    return [1000 * stem + (at if at < fork else 100 * fork + at) for at in range(1, length + 1)]


@dataclass(eq=False)
class Sent:
    """A request, as its replica sees it."""

    number: int
    by: int
    placement: Placement
    num_prompt_tokens: int


class Routers(RuleBasedStateMachine):
    """Two routers, and replicas that compute what they are sent; all that a replica reports arrives at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.routers = [
            Router(BLOCK, decode_weight=10.0, seconds_per_token=0.001, clock=lambda: self.now) for _ in range(2)
        ]
        for each in self.routers:
            for name in NAMES:
                each.add(name)
        self.held: dict[str, set[int]] = {name: set() for name in NAMES}
        self.waiting: list[Sent] = []
        self.decoding: list[Sent] = []
        self.numbers = itertools.count()
        self.read_anew = False  # then it is not known any more in which order requests of different routers came

    def report(self, name: str) -> None:
        for each in self.routers:
            each.report(name, 0.001)

    @rule(
        by=st.integers(0, 1),
        stem=st.integers(0, 2),
        fork=st.integers(0, 6),
        length=st.integers(0, 6),
        rest=st.integers(1, BLOCK - 1),
    )
    def send(self, by: int, stem: int, fork: int, length: int, rest: int) -> None:
        hashes, num_tokens = hashes_of(stem, fork, length), length * BLOCK + rest
        other = copy.deepcopy(self.routers[1 - by]).choose(hashes, num_tokens)
        placement = self.routers[by].choose(hashes, num_tokens)
        assert placement is not None
        assert other is not None
        if not self.read_anew:
            assert (placement.replica, placement.num_tokens) == (other.replica, other.num_tokens)
        sent = Sent(next(self.numbers), by, placement, num_tokens)
        for _ in range(2):  # a record that comes again changes nothing
            self.routers[1 - by].expect(placement.replica, sent.number, hashes, num_tokens)
        self.waiting.append(sent)

    def end_waiting(self, sent: Sent, *, computed: bool, announced: bool = True) -> None:
        self.waiting.remove(sent)
        own, name = self.routers[sent.by], sent.placement.replica
        (own.prefilled if computed else own.finish)(sent.placement)
        other = self.routers[1 - sent.by]
        for _ in range(2 * announced):
            (other.expected_prefilled if computed else other.expected_finished)(name, sent.number)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 1000))
    def compute(self, which: int) -> None:
        sent = self.waiting[which % len(self.waiting)]
        name, hashes = sent.placement.replica, sent.placement.block_hashes
        self.held[name].update(hashes)
        for each in self.routers:
            each.stored(name, hashes)
        self.end_waiting(sent, computed=True)
        self.decoding.append(sent)
        self.report(name)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        self.end_waiting(self.waiting[which % len(self.waiting)], computed=False)

    @precondition(lambda self: self.decoding)
    @rule(which=st.integers(0, 1000))
    def end(self, which: int) -> None:
        sent = self.decoding.pop(which % len(self.decoding))
        self.routers[sent.by].finish(sent.placement)
        for _ in range(2):
            self.routers[1 - sent.by].expected_finished(sent.placement.replica, sent.number)

    @rule(name=st.sampled_from(NAMES))
    def evict(self, name: str) -> None:
        """Evict all that no request waits for."""
        needed = {block for sent in self.waiting for block in sent.placement.block_hashes}
        gone = self.held[name] - needed
        self.held[name] -= gone
        for each in self.routers:
            each.removed(name, gone)

    @rule(name=st.sampled_from(NAMES), again=st.booleans())
    def clear(self, name: str, again: bool) -> None:
        """The cache is cleared, or its reader begins anew: then it gets all that there is."""
        if not again:
            self.held[name].clear()
            for each in self.routers:
                each.cleared(name)
            return
        self.read_anew = True
        for sent in [sent for sent in self.waiting if sent.placement.replica == name][:1]:
            self.end_waiting(sent, computed=False, announced=False)
        for number, each in enumerate(self.routers):
            each.reset(name)
            each.stored(name, self.held[name])
            for sent in self.waiting:
                if sent.placement.replica == name and sent.by != number:
                    each.expect(name, sent.number, sent.placement.block_hashes, sent.num_prompt_tokens)
            for sent in self.decoding:
                if sent.placement.replica == name and sent.by != number:
                    each.expect(name, sent.number, [], sent.num_prompt_tokens)
                    each.expected_prefilled(name, sent.number)

    @rule(seconds=st.sampled_from([0.01, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name in NAMES:
            self.report(name)

    @invariant()
    def what_waits_is_found_where_it_was_sent(self) -> None:
        for sent in self.waiting:
            name, hashes = sent.placement.replica, list(sent.placement.block_hashes)
            for each in self.routers:
                assert self.depth(each, name, hashes) == len(hashes)

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        for name in NAMES:
            num_waiting = sum(sent.placement.replica == name for sent in self.waiting)
            num_decoding = sum(sent.placement.replica == name for sent in self.decoding)
            first, second = (each._replicas[name] for each in self.routers)
            assert first.queued == second.queued or self.read_anew
            for state in (first, second):
                assert (len(state.waiting), len(state.decoding)) == (num_waiting, num_decoding)
                assert state.queued == sum(placement.num_tokens for placement in state.waiting)

    @staticmethod
    def depth(of: Router, name: str, hashes: list[int]) -> int:
        state = of._replicas[name]
        return state.depth(hashes, of._held.hits(hashes))

    def teardown(self) -> None:
        while self.waiting:
            self.end_waiting(self.waiting[0], computed=False)
        while self.decoding:
            self.end(0)
        for _ in range(len(NAMES)):
            self.now += 6.0
            for _ in range(200):
                self.report("a")
        for each in self.routers:
            assert not each._expiring
            for state in each._replicas.values():
                assert (state.queued, state.num_others_blocks) == (0, 0)
                assert not any((state.expected, state.waiting, state.others, state.decoding))


TestRouters = Routers.TestCase
TestRouters.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_when_the_first_prompt_ends_the_next_one_begins() -> None:
    times = [0.0]
    router = Router(BLOCK, seconds_per_token=0.001, clock=lambda: times[-1])
    router.add("a")
    for number in range(2):
        router.expect("a", number, [], 100)
    times.append(0.09)
    router.expected_finished("a", 1)
    state = router._replicas["a"]
    assert state.seconds_left(times[-1], 0.001) == pytest.approx(0.01)
    router.expect("a", 2, [], 100)
    router.expected_finished("a", 0)
    assert state.seconds_left(times[-1], 0.001) == pytest.approx(0.1)


def test_others_requests_beyond_the_bound_are_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.routing.router._MAX_OTHERS_BLOCKS", 9)
    router = Router(BLOCK)
    router.add("a")
    for number in range(20):
        router.expect("a", number, [3 * number, 3 * number + 1, 3 * number + 2], 50)
    state = router._replicas["a"]
    # Of those beyond the bound of blocks, the lengths count; of those beyond the bound of requests, nothing.
    assert (len(state.others), state.num_others_blocks, len(state.expected)) == (9, 9, 9)
    assert state.queued == 9 * 50
    router.expected_finished("a", 0)
    router.expect("a", 100, [1, 2, 3], 50)
    assert (len(state.others), state.num_others_blocks) == (9, 9)
    router.expect("gone", 0, [1], 20)
    router.expected_prefilled("gone", 0)
    router.expected_finished("gone", 0)
    assert router.replicas == ["a"]


def test_a_request_that_is_aborted_leaves_its_prefix_to_those_that_wait_for_it() -> None:
    """Its replica still computes the prefix for the next one, which the router used to expect no longer."""
    times = [0.0]
    router = Router(BLOCK, clock=lambda: times[-1])
    router.add("a")
    first, second = (router.choose([1, 2, 3, number], 70) for number in (4, 5))
    assert first is not None
    assert second is not None
    router.finish(first)
    for seconds in (6.0, 12.0):
        times.append(seconds)
        router.report("a")
        assert router.holder([1, 2, 3, 4]) == router.holder([1, 2, 3, 5]) == "a"
        assert router._replicas["a"].expected == {1, 2, 3, 5}
    router.finish(second)
    times.append(20.0)
    router.report("a")
    router.report("a")
    assert router.holder([1, 2, 3, 4]) is None


def test_a_prompt_begins_at_once_on_an_idle_replica_and_is_at_most_done_when_it_is_late() -> None:
    times = [0.0]
    router = Router(BLOCK, seconds_per_token=0.001, clock=lambda: times[-1])
    router.add("a")
    router.expect("a", 0, [], 100)
    times.append(5.0)
    router.expected_finished("a", 0)
    times.append(9.0)
    router.expect("a", 1, [], 100)
    times.append(9.05)
    router.expect("a", 2, [], 100)  # behind it
    state = router._replicas["a"]
    assert state.seconds_left(9.05, 0.001) == pytest.approx(0.15)
    assert state.seconds_left(20.0, 0.001) == pytest.approx(0.1)
    router.expected_prefilled("a", 2)  # before the other one, which cannot have been computed meanwhile
    assert state.seconds_left(9.05, 0.001) == pytest.approx(0.1)


def test_what_was_sent_to_an_idle_replica_counts_half_after_five_minutes() -> None:
    times = [0.0]
    router = Router(BLOCK, clock=lambda: times[-1])
    for name, seconds, num_tokens in (("a", 0.0, 1000), ("b", 600.0, 300)):
        times.append(seconds)
        router.add(name)
        router.expect(name, 0, [], num_tokens)
        router.expected_prefilled(name, 0)
        router.expected_finished(name, 0)
    assert [router._replicas[name].recently_sent(600.0) for name in "ab"] == [250.0, 300.0]
    placement = router.choose([], 16)
    assert placement is not None
    assert placement.replica == "a"


def test_what_others_send_is_found_where_it_goes_and_not_elsewhere() -> None:
    router = Router(BLOCK)
    for name in "ab":
        router.add(name)
    router.stored("a", [1, 2])
    for name in "ab":
        router.expect(name, 0, [1, 2, 3], 3 * BLOCK + 1)
    assert [router._replicas[name].queued for name in "ab"] == [BLOCK + 1, 3 * BLOCK + 1]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 6)), max_size=5),
    st.integers(0, 5),
    st.integers(0, 6),
)
def test_what_waiting_prompts_have_in_common_with_one(
    prompts: list[tuple[int, int, int]], first: int, end: int
) -> None:
    router = Router(BLOCK)
    router.add("a")
    for number, prompt in enumerate(prompts):
        router.expect("a", number, hashes_of(*prompt), 7 * BLOCK)
    asked = hashes_of(0, 3, 6)
    in_common = [first]
    for prompt in prompts:
        pairs = zip(asked[:end], hashes_of(*prompt), strict=False)
        in_common.append(len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))))
    assert router._replicas["a"].awaited_depth(asked, first, end) == max(in_common)
