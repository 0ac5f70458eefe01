"""Every token that is not reused has a reason, and nothing of another namespace is ever shown."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from support.cache_driver import leave, press

from radixkv.cache import LRU, Adaptive, EvictionPolicy, InvalidArgumentError, PrefixCache, Reason


def make_cache(num_blocks: int = 8) -> tuple[PrefixCache, list[float]]:
    """A cache of blocks of two tokens, and its clock."""
    now = [100.0]
    return PrefixCache(num_blocks, 2, remembered_blocks=4 * num_blocks, clock=lambda: now[0]), now


def reasons(cache: PrefixCache, prompt: list[int], **options: object) -> list[tuple[Reason, int]]:
    found = cache.explain(prompt, **options)  # type: ignore[arg-type]
    assert found.num_reused_tokens + sum(part.num_tokens for part in found.computed) == len(prompt)
    return [(part.reason, part.num_tokens) for part in found.computed]


def whole_prefixes(cache: PrefixCache) -> set[tuple[int, ...]]:
    """Every cached prefix of whole blocks."""
    pending = [((), node) for node in cache.tree_snapshot().values()]
    found = set[tuple[int, ...]]()
    for before, node in pending:
        tokens = (*before, *node.tokens.tolist())
        found.update(tokens[:stop] for stop in range(cache.block_size, len(tokens) + 1, cache.block_size))
        pending += [(tokens, child) for child in node.children]
    return found


def test_in_an_empty_cache_all_tokens_are_new() -> None:
    cache, _ = make_cache()
    assert reasons(cache, [1, 2, 3]) == [(Reason.NEW, 3)]
    assert cache.explain([1]).divergence is None


def test_nothing_is_near_while_the_first_sequence_of_a_namespace_runs() -> None:
    """It was said to diverge at once from a cached prompt of no tokens."""
    cache, _ = make_cache()
    table = cache.open([1, 2, 3])
    assert cache.explain([1, 2, 3]).divergence is None
    cache.reserve(table, 3)
    cache.append(table, [1, 2, 3])
    assert cache.explain([1, 2, 3]).divergence is not None


def test_all_but_the_last_token() -> None:
    cache, _ = make_cache()
    leave(cache, [1, 2, 3])
    assert reasons(cache, [1, 2, 3]) == [(Reason.LAST_TOKEN, 1)]
    assert cache.explain([1, 2, 3]).divergence is None


def test_reading_is_switched_off() -> None:
    cache, _ = make_cache()
    leave(cache, [1, 2, 3])
    assert reasons(cache, [1, 2, 3, 4], read=False) == [(Reason.READ_OFF, 3), (Reason.NEW, 1)]


@pytest.mark.parametrize(
    ("prompt", "position", "cached"),
    [
        ([1, 2, 3, 4, 5, 9], 5, [6, 7, 8]),  # inside a block
        ([1, 2, 9], 2, [3, 4, 5, 6, 7, 8]),  # at a border inside a node
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8, []),  # a cached prompt ends
    ],
)
def test_the_nearest_cached_prompt_is_shown(prompt: list[int], position: int, cached: list[int]) -> None:
    cache, _ = make_cache()
    leave(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    divergence = cache.explain(prompt).divergence
    assert divergence is not None
    assert (divergence.position, divergence.cached_tokens.tolist()) == (position, cached)
    assert divergence.prompt_tokens.tolist() == prompt[position:]


def test_where_prompts_branch_the_one_used_last_is_shown() -> None:
    cache, now = make_cache()
    leave(cache, [1, 2, 3, 4])
    leave(cache, [1, 2, 5, 6])
    now[0] += 1
    cache.abort(cache.open([1, 2, 3, 4, 9]))
    divergence = cache.explain([1, 2, 7, 8]).divergence
    assert divergence is not None
    assert divergence.cached_tokens.tolist() == [3, 4]


def test_what_was_evicted_is_reported_with_its_age_and_uses() -> None:
    cache, now = make_cache(4)
    leave(cache, [1, 2, 3, 4, 5, 6, 7])
    now[0] += 10
    cache.abort(cache.open([1, 2, 3, 4, 5, 6, 9]))
    now[0] += 5
    press(cache, 2)
    now[0] += 2
    assert cache.match([1, 2, 3, 4, 5, 6, 7]) == 4
    found = cache.explain([1, 2, 3, 4, 5, 6, 7, 8])
    assert [(part.reason, part.start, part.num_tokens) for part in found.computed] == [
        (Reason.EVICTED, 4, 2),
        (Reason.EVICTED, 6, 1),
        (Reason.NEW, 7, 1),
    ]
    blocks, tail = found.computed[:2]
    assert (blocks.evicted_seconds_ago, blocks.unused_seconds, blocks.uses) == (2, 5, 2)
    assert (tail.evicted_seconds_ago, tail.unused_seconds, tail.uses) == (2, 15, 1)
    assert reasons(cache, [1, 2, 3, 4, 5, 9]) == [(Reason.NEW, 2)]


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_a_prompt_that_ends_anywhere_within_what_was_evicted_was_evicted(num_tokens: int) -> None:
    cache, _ = make_cache()
    leave(cache, [1, 2, 3, 4, 5, 6, 7])
    press(cache, 8)
    found = reasons(cache, [1, 2, 3, 4, 5, 6, 7, 8][:num_tokens])
    evicted = num_tokens if num_tokens == 7 else num_tokens // 2 * 2 if num_tokens < 7 else 7
    rest = num_tokens - evicted
    assert found == ([(Reason.EVICTED, evicted)] if evicted else []) + ([(Reason.NEW, rest)] if rest else [])


def test_evicted_prefixes_are_remembered_in_bounded_memory() -> None:
    cache = PrefixCache(4, 1, remembered_blocks=6)
    for first in range(100):
        leave(cache, [first, 1000, 1001])
    memory = cache._store.evicted
    assert memory is not None
    assert memory.num_blocks <= 6
    assert reasons(cache, [98, 1000, 1001, 1])[0][0] is Reason.EVICTED
    assert reasons(cache, [5, 1000, 1001, 1]) == [(Reason.NEW, 4)]
    assert PrefixCache(4, 1)._store.evicted is None


def test_what_is_cleared_is_forgotten() -> None:
    cache, _ = make_cache(4)
    leave(cache, [1, 2, 3, 4], namespace="a")
    press(cache, 4)
    assert reasons(cache, [1, 2, 3, 4], namespace="a") == [(Reason.EVICTED, 4)]
    cache.clear("a")
    assert reasons(cache, [1, 2, 3, 4], namespace="a") == [(Reason.NEW, 4)]


def test_nothing_of_another_namespace_is_shown() -> None:
    cache, _ = make_cache()
    leave(cache, [1, 2, 3, 4, 5, 6], namespace="theirs")
    leave(cache, [1, 2], namespace="mine")
    found = cache.explain([1, 2, 3, 4, 9], "mine")
    assert [(part.reason, part.num_tokens) for part in found.computed] == [(Reason.OTHER_NAMESPACE, 2), (Reason.NEW, 1)]
    assert found.divergence is not None
    assert found.divergence.cached_tokens.tolist() == []
    assert "theirs" not in repr(found)
    press(cache, 8)
    # What was evicted from other namespaces is not even counted.
    assert reasons(cache, [1, 2, 3, 4, 9], namespace="nobody") == [(Reason.NEW, 5)]


@pytest.mark.parametrize("seed", range(20))
def test_the_most_that_any_other_namespace_has_is_found(seed: int) -> None:
    random = Random(seed)
    cache = PrefixCache(400, 4)

    def some_tokens() -> list[int]:
        return [random.randint(0, 1) for _ in range(random.randint(1, 14))]

    for _ in range(40):
        leave(cache, some_tokens(), namespace=random.choice("abcdef"))
    for _ in range(20):
        prompt, namespace = [*some_tokens(), 2], random.choice("abcdefg")
        own, most = cache.match(prompt, namespace), max(cache.match(prompt, other) for other in "abcdefg")
        expected = [(Reason.OTHER_NAMESPACE, most - own)] if most > own else []
        assert reasons(cache, prompt, namespace=namespace) == [*expected, (Reason.NEW, len(prompt) - most)]


def test_an_empty_prompt_is_refused() -> None:
    cache, _ = make_cache()
    with pytest.raises(InvalidArgumentError, match="at least one"):
        cache.explain([])


@pytest.mark.parametrize("name", ["max_pinned_blocks", "remembered_blocks"])
def test_impossible_limits_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        PrefixCache(4, 2, **{name: -1})  # type: ignore[arg-type]


SYSTEM, CHAT, OTHER = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 50, 60]


@pytest.mark.parametrize("policy", [LRU, Adaptive])
def test_of_an_evicted_prompt_what_is_not_computed_anew_stays_remembered(policy: Callable[[], EvictionPolicy]) -> None:
    """The rest of a chat became new with the first other chat after the same system prompt: its record was dropped whole."""
    cache = PrefixCache(8, 2, policy(), remembered_blocks=100)
    leave(cache, CHAT)
    press(cache, 8)
    leave(cache, OTHER)
    assert reasons(cache, CHAT) == [(Reason.EVICTED, 4)]
    press(cache, 8)
    found = cache.explain(CHAT).computed
    assert [part.reason for part in found] == [Reason.EVICTED] * len(found)
    assert sum(part.num_tokens for part in found) == len(CHAT)
    assert cache._store.evicted is not None
    assert cache._store.evicted.num_blocks == 5  # the blocks of both, those in common once


@pytest.mark.parametrize("policy", [LRU, Adaptive])
def test_a_shorter_prompt_that_is_evicted_later_hides_nothing_of_a_longer_one(
    policy: Callable[[], EvictionPolicy],
) -> None:
    cache = PrefixCache(8, 2, policy(), remembered_blocks=100)
    leave(cache, [*CHAT, 9])
    press(cache, 8)
    leave(cache, SYSTEM)
    press(cache, 8)
    assert sum(tokens for reason, tokens in reasons(cache, [*CHAT, 9, 10]) if reason is Reason.EVICTED) == 9
    leave(cache, CHAT)
    assert reasons(cache, [*CHAT, 9, 10]) == [(Reason.EVICTED, 1), (Reason.NEW, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [LRU, Adaptive])
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_no_block_that_was_evicted_is_called_new(
    policy: Callable[[], EvictionPolicy], block_size: int, seed: int
) -> None:
    """Against the set of all prefixes of whole blocks that were ever evicted, with memory for all of them."""
    now = [0.0]
    cache = PrefixCache(8, block_size, policy(), remembered_blocks=100_000, clock=lambda: now[0])
    random, prompts = Random(seed), [[0]]
    evicted, cached = set[tuple[int, ...]](), set[tuple[int, ...]]()
    for _ in range(200):
        now[0] += 1
        stem = random.choice(prompts[-20:])
        prompt = stem[: random.randint(0, len(stem))] + random.choices([0, 1], k=random.randint(1, 2 * block_size))
        if len(prompt) > 8 * block_size:
            continue
        prompts.append(prompt)
        stop = cache.match(prompt) // block_size * block_size
        while stop + block_size <= len(prompt) and tuple(prompt[: stop + block_size]) in evicted:
            stop += block_size
        new = [part.start for part in cache.explain(prompt).computed if part.reason is Reason.NEW]
        assert min(new, default=len(prompt)) >= stop
        leave(cache, prompt)
        before, cached = cached, whole_prefixes(cache)
        evicted |= before - cached


def test_what_was_evicted_is_found_where_a_prompt_leaves_the_tree_inside_a_node() -> None:
    cache = PrefixCache(8, 2, Adaptive(), remembered_blocks=100)
    leave(cache, CHAT)
    press(cache, 8)
    leave(cache, OTHER)
    leave(cache, [*CHAT[:6], 70])
    assert reasons(cache, CHAT) == [(Reason.EVICTED, 2)]
