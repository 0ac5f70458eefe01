"""Prompts go where they are answered first: to their prefix, away from a queue, and apart where nothing is known of them."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from radixkv.cache import EventLog, InvalidArgumentError, PrefixCache
from radixkv.routing import Placement, Router, prompt_hashes

BLOCK = 16


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router(clock: Clock) -> Router:
    router = Router(BLOCK, decode_weight=10.0, seconds_per_token=0.001, clock=clock)
    for name in "abc":
        router.add(name)
    return router


def send(router: Router, *hashes: int) -> Placement:
    placement = router.choose(hashes, len(hashes) * BLOCK + 1)
    assert placement is not None
    return placement


def test_a_prompt_goes_to_who_holds_most_of_it(router: Router) -> None:
    router.stored("a", [1, 2])
    router.stored("b", [1, 2, 3])
    placement = send(router, 1, 2, 3, 4)
    assert (placement.replica, placement.num_tokens) == ("b", BLOCK + 1)
    router.removed("b", [2, 3])
    router.finish(placement)
    assert send(router, 1, 2, 3).replica == "a"


def test_the_last_token_of_a_prompt_is_always_computed(router: Router) -> None:
    router.stored("a", [1, 2])
    placement = router.choose([1, 2], 2 * BLOCK)
    assert placement is not None
    assert (placement.replica, placement.num_tokens) == ("a", 1)
    router.expect("a", 1, [1, 2], 2 * BLOCK)
    assert router._replicas["a"].queued == 1 + 1


def test_the_holder_of_a_prefix_has_most_of_it(router: Router) -> None:
    assert router.holder([1, 2, 3]) is None
    router.stored("a", [1])
    router.stored("b", [1, 2])
    assert router.holder([1, 2, 3]) == "b"
    placement = router.choose([1, 2, 3], 49, excluded={"a", "b"})
    assert placement is not None
    assert router.holder([1, 2, 3]) == "c"  # it will, and has not reported it yet
    assert router.holder([]) is None
    assert Router(BLOCK).holder([1]) is None


def test_a_replica_that_holds_a_prefix_goes_before_one_that_will(router: Router) -> None:
    """Half of the prefixes were pinned where a request for them waited, or had been refused, and nothing was held."""
    prefixes = [[first, first + 1] for first in range(0, 40, 2)]
    router.stored("a", range(40))
    router.stored("b", range(0, 40, 2))
    for prefix in prefixes:
        assert router.choose([*prefix, 99], 3 * BLOCK, excluded={"a", "c"}) is not None
    assert {router.holder(prefix) for prefix in prefixes} == {"a"}


def test_prefixes_that_all_replicas_hold_have_holders_among_all_of_them(router: Router) -> None:
    """The first replica got all pins, beyond the bound of each tenant there."""
    prefixes = [[first, first + 1] for first in range(0, 200, 2)]
    for name in "abc":
        router.stored(name, range(200))
    holders = [router.holder(prefix) for prefix in prefixes]
    assert all(holders.count(name) > 20 for name in "abc")
    router.remove("c")  # of the others, none changes
    assert all(router.holder(prefix) == name for prefix, name in zip(prefixes, holders, strict=True) if name != "c")


def test_what_was_sent_counts_as_held_before_any_event(router: Router) -> None:
    first = send(router, 1, 2, 3, 4, 5, 6, 7, 8)
    second = send(router, *range(1, 9), 9)
    assert second.replica == first.replica
    assert second.num_tokens == BLOCK + 1


def test_what_no_event_confirms_is_expected_no_longer(router: Router, clock: Clock) -> None:
    placement = send(router, 1, 2, 3)
    clock.now = 1.0
    router.prefilled(placement)
    router.finish(placement)
    clock.now = 5.9
    second = send(router, 1, 2, 3)
    assert second.num_tokens == 1
    router.finish(second)
    clock.now = 6.1
    router.report("b")
    assert send(router, 1, 2, 3).num_tokens == 3 * BLOCK + 1


def test_what_a_replica_held_when_it_was_cleared_is_expected_no_longer_than_the_rest(
    router: Router, clock: Clock
) -> None:
    router.stored("a", [1, 2])
    placement = send(router, 1, 2, 3)
    router.cleared("a")
    assert router.holder([1, 2, 3]) == "a"
    router.prefilled(placement)
    router.finish(placement)
    clock.now = 6.0
    router.report("a")
    assert router.holder([1, 2, 3]) is None


def test_what_no_event_confirms_stays_expected_while_another_prompt_waits_for_it(clock: Clock) -> None:
    router = Router(BLOCK, clock=clock)
    router.add("a")
    router.add("b")
    first = send(router, 1, 2, 3)
    second = send(router, 1, 2, 3, 4)
    assert (first.replica, second.replica) == ("a", "a")
    router.prefilled(first)
    router.finish(first)
    router.stored("a", [1, 2])  # but not yet 3
    router.stored("b", [1, 2, 3])
    state = router._replicas["a"]
    for clock.now in (6.0, 10.0):
        router.report("a")
        assert state.expected == {1, 2, 3, 4}
        assert router._expiring[-1][0] == 11.0  # not looked at again before
    router.stored("a", [3])
    clock.now = 12.0
    router.report("a")
    assert state.expected == {4}
    assert not router._expiring


def test_what_was_sent_long_ago_is_forgotten_between_choices_and_not_all_at_once(router: Router, clock: Clock) -> None:
    """A burst of long prompts took a tenth of a second of the choice that came five seconds later."""
    for number in range(100):
        placement = send(router, *range(1000 * number, 1000 * number + 50))
        router.prefilled(placement)
        router.finish(placement)
    clock.now = 60.0
    for num_left in (100, 98, 96):
        assert num_left * 50 == sum(len(replica.expected) for replica in router._replicas.values())
        router.report("a")
    for number in range(200, 250):
        router.prefilled(send(router, number))
    assert sum(len(replica.expected) for replica in router._replicas.values()) == 50


def test_a_hot_prefix_gets_a_second_replica_once_waiting_costs_more_than_computing_it_again(router: Router) -> None:
    router.stored("a", range(1, 11))
    replicas = [send(router, *range(1, 11), 100 * number).replica for number in range(40)]
    # Each adds a block to the queue at `a`; computing ten blocks elsewhere counts about twice.
    assert replicas[:10] == ["a"] * 10
    assert {"b", "c"} & set(replicas)
    assert replicas.count("a") > 12


def test_of_many_replicas_a_prefix_moves_later_to_an_idle_one() -> None:
    def waiting_tokens_until_it_moves(num_replicas: int) -> int:
        router = Router(block_size=4)
        for number in range(num_replicas):
            router.add(str(number))
        router.stored("0", range(1, 11))
        for tokens in itertools.count(1):
            router.expect("0", "another's", [], tokens)
            placement = router.choose(list(range(1, 11)), 40)
            assert placement is not None
            router.finish(placement)
            router.expected_finished("0", "another's")
            if placement.replica != "0":
                return tokens
        raise AssertionError

    few, many = waiting_tokens_until_it_moves(2), waiting_tokens_until_it_moves(16)
    assert 40 < few < many < 4 * 40


def test_what_another_holds_is_computed_anew_only_where_few_wait_for_that(router: Router) -> None:
    """The same tokens are waited for, in many requests or in few."""
    router.stored("a", range(1, 11))
    for num_requests, expected in ((20, "a"), (2, "b")):
        for name, queued in (("a", 2000), ("b", 1000), ("c", 4000)):
            for number in range(num_requests * queued // 2000):
                router.expect(name, number, [], 2000 // num_requests)
        placement = send(router, *range(1, 11))
        assert placement.replica == expected
        router.finish(placement)
        for name in router.replicas:
            router.reset(name)
        assert router.holder([1]) is None
        router.stored("a", range(1, 11))


def test_unknown_prompts_are_spread_also_over_idle_replicas(router: Router) -> None:
    chosen = []
    for number in range(9):
        placement = send(router, *range(100 * number, 100 * number + 5))
        chosen.append(placement.replica)
        router.prefilled(placement)
        router.finish(placement)
    assert sorted(chosen) == sorted("abc" * 3)


def test_what_other_routers_decode_counts_beside_ones_own(router: Router) -> None:
    own = send(router, 1)
    router.prefilled(own)
    for name in router.replicas:
        if name != own.replica:
            for number in range(2):
                router.expect(name, number, [], 1)
                router.expected_prefilled(name, number)
    second = send(router, 2)
    assert second.replica == own.replica
    router.finish(second)
    for name in router.replicas:
        router.expected_finished(name, 0)
        router.expected_finished(name, 1)
    assert send(router, 3).replica != own.replica


def test_decoding_sequences_count_until_they_end(router: Router) -> None:
    first = send(router, 1, 2, 3)
    router.prefilled(first)
    router.cleared(first.replica)
    elsewhere = send(router, 7)
    assert elsewhere.replica != first.replica
    router.finish(first)
    router.finish(elsewhere)
    assert all(not replica.decoding and not replica.waiting for replica in router._replicas.values())
    assert all(replica.queued == 0 for replica in router._replicas.values())


def test_progress_of_the_first_prompt_is_taken_into_account(router: Router, clock: Clock) -> None:
    placements = [send(router, *range(100 * number, 100 * number + 10 + number)) for number in range(3)]
    assert len({placement.replica for placement in placements}) == 3
    clock.now = 0.18
    # All but a little of each is computed, so the shortest queue is not that of the shortest prompt any more: all are equal.
    assert send(router, 1, 2).replica == placements[0].replica


def test_what_is_not_cached_is_not_expected(router: Router) -> None:
    router.stored("b", [1, 2])
    first = router.choose([1, 2, 3, 4], 4 * BLOCK + 1, writes=False)
    assert first is not None
    assert (first.replica, first.num_tokens) == ("b", 2 * BLOCK + 1)  # what is held is reused
    router.cleared("b")
    router.finish(first)
    assert router.holder([1, 2, 3, 4]) is None


def test_a_replica_that_does_not_cache_is_expected_to_hold_nothing(clock: Clock) -> None:
    router = Router(BLOCK, clock=clock)
    router.add("a", caches=False)
    assert [send(router, 1, 2, 3).num_tokens for _ in range(2)] == [3 * BLOCK + 1] * 2
    router.expect("a", 1, [1, 2, 3], 3 * BLOCK + 1)
    assert router.holder([1, 2, 3]) is None
    router.expected_prefilled("a", 1)
    router.expected_finished("a", 1)
    assert router._replicas["a"].num_others_blocks == 0


def test_a_slow_replica_gets_less(router: Router) -> None:
    for name, seconds in (("a", 4e-3), ("b", 1e-4), ("c", None)):
        router.report(name, seconds)
    router.stored("a", [1])
    assert send(router, 1, 2).replica == "b"
    router.expect("b", 1, [], 1000)
    # Of one that has computed nothing yet, the others' average is expected.
    assert [send(router, 10 * number, 1, 2).replica for number in range(3)] == ["b", "b", "b"]
    router.expect("b", 2, [], 100_000)
    assert send(router, 100, 1, 2).replica == "c"
    for name in "ab":
        router.report(name, None)  # their engines are others now


def test_others_prompts_make_no_replica_slow(router: Router, clock: Clock) -> None:
    """Another ingress's prompts are computed all the time, before and after those of this one, which take long for that."""
    for number in range(20):
        for name in "abc":
            router.report(name, 1e-3)
        router.expect("a", number, [], 16_000)
        placement = router.choose([1000 + number], 1000, excluded={"b", "c"})
        assert placement is not None
        clock.now += 16.0
        router.expected_prefilled("a", number)
        router.expected_finished("a", number)
        clock.now += 1.0
        router.prefilled(placement)
        router.finish(placement)
    for name in "abc":
        router.report(name, 1e-3)
    router.stored("a", [1])
    # As fast as the others, and with the least to do.
    assert send(router, 1, 2).replica == "a"


def test_a_speed_that_is_none_is_refused(router: Router) -> None:
    for speed in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="seconds_per_token: expected a number above 0 or None, got"):
            router.report("a", speed)


def test_a_removed_replica_is_chosen_and_known_no_more(router: Router) -> None:
    router.stored("a", [1, 2, 3])
    placement = send(router, 1, 2, 3)
    assert placement.replica == "a"
    router.remove("a")
    router.remove("a")
    router.prefilled(placement)
    router.finish(placement)
    router.stored("a", [1, 2, 3])
    router.removed("a", [1])
    router.cleared("a")
    router.reset("a")
    router.report("a", 1e-3)
    assert send(router, 1, 2, 3).num_tokens == 3 * BLOCK + 1
    router.add("a")
    assert router.choose([1, 2, 3], 49, excluded=["b", "c"]).num_tokens == 49
    assert router.choose([1], 17, excluded=["a", "b", "c"]) is None


def test_a_request_on_a_replica_that_was_removed_is_none_of_the_one_that_has_its_name(
    router: Router, clock: Clock
) -> None:
    """It counted as decoded by its successor, whose expected blocks were forgotten with those of the removed one."""
    first = send(router, 1, 2)
    router.remove(first.replica)
    router.add(first.replica)
    router.prefilled(first)
    successor = router._replicas[first.replica]
    assert (len(successor.waiting), len(successor.decoding)) == (0, 0)
    clock.now = 1.0
    second = router.choose([1, 2], 33, excluded={"a", "b", "c"} - {first.replica})
    assert second is not None
    router.prefilled(second)
    clock.now = 5.5
    router.report("b")
    assert router.holder([1, 2]) == first.replica
    router.finish(second)
    router.finish(first)
    clock.now = 6.5
    router.report("b")
    assert router.holder([1, 2]) is None


def test_what_ends_on_a_replica_that_is_back_is_not_counted_twice(router: Router) -> None:
    placement = router.choose([1, 2], 32)
    assert placement is not None
    router.prefilled(placement)
    router.remove(placement.replica)
    router.add(placement.replica)
    router.finish(placement)
    assert [len(replica.decoding) for replica in router._replicas.values()] == [0] * len(router.replicas)


def test_hashes_are_those_of_the_cache_s_events_also_in_namespaces(router: Router) -> None:
    tokens, caches = list(range(50)), {}

    def report(name: str) -> None:
        for event in caches[name].events.take():
            router.update(name, event)

    for name, namespace in (("a", "tenant-1"), ("b", "tenant-2")):
        caches[name] = cache = PrefixCache(10, BLOCK, events=EventLog())
        table = cache.open(tokens, namespace)
        cache.reserve(table, len(tokens))
        cache.append(table, tokens)
        cache.close(table)
        report(name)
    for name, namespace in (("a", "tenant-1"), ("b", "tenant-2")):
        placement = router.choose(prompt_hashes(tokens, namespace, BLOCK), 50)
        assert placement is not None
        assert (placement.replica, placement.num_tokens) == (name, 2)
        router.finish(placement)
    assert router.choose(prompt_hashes(tokens, "tenant-3", BLOCK), 50).num_tokens == 50
    assert prompt_hashes(tokens, "", BLOCK) == prompt_hashes(tokens[: 3 * BLOCK], "", BLOCK)
    caches["a"].clear("tenant-1")  # its blocks are removed one by one
    caches["b"].clear()
    for name, namespace in (("a", "tenant-1"), ("b", "tenant-2")):
        hashes = prompt_hashes(tokens, namespace, BLOCK)
        assert router.holder(hashes) == name
        report(name)
        assert router.holder(hashes) is None


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="decode_weight: expected a number above 0, got 0"):
        Router(16, decode_weight=0)
    with pytest.raises(ValueError, match="seconds_per_token: expected a number above 0, got '5'"):
        Router(16, seconds_per_token="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"block_size: expected a whole number of at least 1, got 1\.5"):
        Router(1.5)  # type: ignore[arg-type]
    router = Router(16)
    router.add("a")
    with pytest.raises(ValueError, match="a replica 'a' is there already"):
        router.add("a")
    with pytest.raises(InvalidArgumentError, match="namespace"):
        prompt_hashes([1], None, BLOCK)  # type: ignore[arg-type]


def test_without_replicas_none_is_chosen() -> None:
    router = Router(BLOCK)
    assert router.choose([1], BLOCK + 1) is None
    router.add("a")
    assert router.choose([1], BLOCK + 1, excluded=["a"]) is None


def test_it_needs_no_torch() -> None:
    code = "import sys, radixkv.routing; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
