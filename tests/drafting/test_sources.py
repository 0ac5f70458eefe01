"""What each drafter guesses, over a cache without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from support.cache_driver import leave

from radixkv.cache import PrefixCache
from radixkv.drafting import DraftContext
from radixkv.drafting.followers import Followers, NamespaceFollowers
from radixkv.drafting.sources import AnswerDrafter, GrammarDrafter, PrefixDrafter, TreeDrafter, drafters
from radixkv.drafting.tree_index import TreeIndex

PROMPT = list(range(1, 9))


def test_another_answer_to_the_prompt_is_found_again_behind_other_tokens() -> None:
    cache = PrefixCache(64, 4)
    leave(cache, [*PROMPT, *range(100, 140)])
    drafter, tokens = AnswerDrafter(cache), list(PROMPT)
    context = DraftContext(tokens, len(PROMPT), table=cache.open(tokens))
    assert list(drafter.draft(context, 4).token_ids) == [100, 101, 102, 103]
    tokens += [100, 101, 50, 51, 52, 53, 54, 55]
    drafter.draft(context, 4)
    tokens += [120, 121]
    assert list(drafter.draft(context, 4).token_ids) == [122, 123, 124, 125]


def test_without_another_answer_or_in_the_middle_of_one_there_is_no_draft() -> None:
    cache = PrefixCache(64, 4)
    tokens = list(PROMPT)
    context = DraftContext(tokens, len(PROMPT), table=cache.open(tokens))
    assert not AnswerDrafter(cache).draft(context, 4).token_ids
    leave(cache, [*PROMPT, *range(100, 140)])
    tokens += [100, 101]
    assert not AnswerDrafter(cache).draft(context, 4).token_ids


def test_another_answer_is_found_by_a_sample_that_is_first_asked_about_behind_its_first_token() -> None:
    cache = PrefixCache(64, 4)
    leave(cache, [*PROMPT, *range(100, 140)])
    drafter, tokens = AnswerDrafter(cache), [*PROMPT, 100]
    context = DraftContext(tokens, len(PROMPT), table=cache.open(tokens))
    assert not drafter.draft(context, 4).token_ids  # where in the answer is not known yet
    tokens.append(101)
    assert list(drafter.draft(context, 4).token_ids) == [102, 103, 104, 105]


def test_a_sequence_with_many_blocks_of_its_own_is_not_looked_for_in_the_tree() -> None:
    cache = PrefixCache(64, 4)
    leave(cache, [*PROMPT, *range(100, 140)])
    tokens = [*PROMPT, 100]
    context = DraftContext(tokens, len(PROMPT), table=cache.open(tokens))
    assert context.table is not None
    for num_blocks in range(1, 4):
        cache.reserve(context.table, 8 + 4 * num_blocks)
        assert len(context.table.own_block_ids) == num_blocks
        assert list(PrefixDrafter(cache).draft(context, 2).token_ids) == ([101, 102] if num_blocks <= 2 else [])


class Following:
    """A grammar that forces nothing: as a likely token it gives what last followed the previous token."""

    def likely_tokens(self, last: int, followers: Mapping[int, Sequence[int]], max_tokens: int) -> list[int]:
        return list(followers.get(last, ()))[:1]


def test_what_structures_repeat_is_remembered_within_a_namespace() -> None:
    drafter = GrammarDrafter(NamespaceFollowers())

    def guess(tokens: list[int], namespace: str) -> list[int]:
        return list(drafter.draft(DraftContext(tokens, 1, namespace, grammar=Following()), 4).token_ids)

    assert guess([5, 6, 7, 8, 6], "ann") == [7]
    assert guess([5, 6], "ann") == [7]
    assert guess([5, 6], "ben") == []
    assert guess([6, 9, 6], "ben") == [9]  # 6 is the prompt's, and 9 follows it as the answer's first token
    prompt = DraftContext([7, 8, 7], 3, "ben", grammar=Following())
    assert not drafter.draft(prompt, 4).token_ids  # what follows 7 in the prompt is no answer


@pytest.mark.parametrize("private", [{"write_cache": False}, {"read_cache": False}])
def test_what_a_request_that_leaves_the_cache_alone_repeats_is_remembered_for_itself(private: dict[str, bool]) -> None:
    """Its tokens used to be guesses for all others of the namespace, whatever its switches."""
    drafter = GrammarDrafter(NamespaceFollowers())

    def guess(tokens: list[int], **switches: bool) -> list[int]:
        return list(drafter.draft(DraftContext(tokens, 1, **switches, grammar=Following()), 4).token_ids)

    assert guess([5, 6, 7, 8, 6], **private) == [7]
    assert guess([5, 6]) == []
    assert guess([5, 6, 9, 6]) == [9]
    assert guess([5, 6], **private) == []


@pytest.mark.parametrize("cleared", ["ann", None])
def test_what_structures_repeat_is_forgotten_with_the_cache(cleared: str | None) -> None:
    """It used to survive, though nothing that was said may. The tree need not know the namespaces any more."""
    followers = NamespaceFollowers()
    cache = PrefixCache(64, 4, observers=[followers])
    for namespace in ("ann", "ann/her salt", "anna"):
        followers.of(namespace).note([5, 6], 1)
    cache.clear(cleared)
    assert not followers.of("ann").by_token
    assert not followers.of("ann/her salt").by_token
    assert bool(followers.of("anna").by_token) == (cleared is not None)


def test_an_engines_grammar_drafter_forgets_with_the_cache() -> None:
    cache, index = PrefixCache(64, 4), TreeIndex(64, 4)
    (drafter,) = [each for each in drafters(cache, index) if isinstance(each, GrammarDrafter)]
    drafter.draft(DraftContext([5, 6, 7, 6], 1, grammar=Following()), 4)
    assert drafter.draft(DraftContext([5, 6], 1, grammar=Following()), 4).token_ids == [7]
    cache.clear()
    assert drafter.draft(DraftContext([5, 6], 1, grammar=Following()), 4).token_ids == []


def test_the_tree_is_not_drafted_from_for_a_request_that_does_not_read_the_cache() -> None:
    index = TreeIndex(64, 4)
    cache = PrefixCache(64, 4, observers=[index])
    leave(cache, [*PROMPT, *range(100, 140)])
    for drafter in (PrefixDrafter(cache), AnswerDrafter(cache), TreeDrafter(index)):
        for reads in (True, False):
            tokens = list(PROMPT)
            context = DraftContext(tokens, len(PROMPT), read_cache=reads, table=cache.open(tokens))
            assert bool(drafter.draft(context, 4).token_ids) == reads


def test_followers_are_bounded_and_the_last_comes_first() -> None:
    followers = Followers()
    followers.note([1, 2, 1, 2], 1)
    assert followers.by_token[1] == [2]
    followers.note([1, 2, 1, 3, 1, 2, 1, 4, 1, 5, 1, 6], 1)
    assert followers.by_token[1] == [6, 5, 4, 2]
    followers.note(list(range(10, 10_000)), 1)
    assert len(followers.by_token) == 4096
    assert 1 not in followers.by_token


def test_followers_of_the_namespace_used_longest_ago_are_forgotten() -> None:
    followers = NamespaceFollowers()
    for number in range(32):
        followers.of(str(number)).note([5, 6], 1)
    assert all(followers.of(str(number)).by_token for number in range(32))
    followers.of("0")
    followers.of("one more")
    assert followers.of("0").by_token
    assert followers.of("2").by_token
    assert not followers.of("1").by_token
