"""What each drafter guesses, over a cache without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from support.cache_driver import leave

from radixkv.cache import PrefixCache
from radixkv.drafting import DraftContext
from radixkv.drafting.followers import Followers
from radixkv.drafting.sources import AnswerDrafter, GrammarDrafter

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
    tokens += [100]
    assert not AnswerDrafter(cache).draft(context, 4).token_ids


class Following:
    """A grammar that forces nothing: as a likely token it gives what last followed the previous token."""

    def likely_tokens(self, last: int, followers: Mapping[int, Sequence[int]], max_tokens: int) -> list[int]:
        return list(followers.get(last, ()))[:1]


def test_what_structures_repeat_is_remembered_within_a_namespace() -> None:
    drafter = GrammarDrafter()

    def guess(tokens: list[int], namespace: str) -> list[int]:
        return list(drafter.draft(DraftContext(tokens, 1, namespace, grammar=Following()), 4).token_ids)

    assert guess([5, 6, 7, 8, 6], "ann") == [7]
    assert guess([5, 6], "ann") == [7]
    assert guess([5, 6], "ben") == []
    assert guess([6, 9, 6], "ben") == [9]  # 6 is the prompt's, and 9 follows it as the answer's first token


def test_followers_are_bounded_and_the_last_comes_first() -> None:
    followers = Followers()
    followers.note([1, 2, 1, 3, 1, 2, 1, 4, 1, 5, 1, 6], 1)
    assert followers.by_token[1] == [6, 5, 4, 2]
    followers.note(list(range(10, 10_000)), 1)
    assert len(followers.by_token) == 4096
    assert 1 not in followers.by_token
