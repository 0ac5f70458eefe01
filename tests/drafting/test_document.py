"""Where a sequence's last tokens occur in a text, and what follows them there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counted_reads import CountedReads

from radixkv.drafting.document import NEAR_PAIR, NEAR_TOKEN, REALIGNED, Document
from radixkv.drafting.kgrams import RUN_LENGTHS, KGramTable, kgram_hash, kgram_hashes

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=40)


@given(tokens=TOKENS, k=st.integers(1, 8), seed=st.integers(0, 2**64 - 1))
def test_many_hashes_are_those_of_each(tokens: list[int], k: int, seed: int) -> None:
    hashes = kgram_hashes(np.array(tokens, dtype=np.int32), k, seed)
    assert hashes.tolist() == [kgram_hash(tokens[i : i + k], seed) for i in range(len(tokens) - k + 1)]


def test_a_table_holds_the_last_place_of_a_run_in_bounded_memory() -> None:
    table = KGramTable(1000)
    assert table.nbytes == 4 * 1024
    assert table.get(5) < 0
    table.put_all(np.array([7, 8, 7], dtype=np.uint64), np.array([1, 2, 3], dtype=np.int32))
    assert (table.get(7), table.get(8)) == (3, 2)
    table.put(8, 9)
    assert table.get(8) == 9


@given(
    chunks=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=8),
    max_tokens=st.integers(1, 9),
)
def test_a_draft_is_what_followed_the_longest_run_that_is_found(chunks: list[list[int]], max_tokens: int) -> None:
    """As a sequence grows by a few tokens or many; the runs are checked against a search through the whole text."""
    tokens: list[int] = []
    document = Document(tokens)
    for chunk in chunks:
        tokens += chunk
        draft = document.draft(tokens, max_tokens)
        if draft.strength not in RUN_LENGTHS or not draft.token_ids:
            continue
        k = draft.strength
        positions = [i for i in range(k, len(tokens)) if tokens[i - k : i] == tokens[-k:]]
        assert draft.token_ids == tokens[positions[-1] : positions[-1] + max_tokens]
        longer = [
            n for n in RUN_LENGTHS if n > k and any(tokens[i - n : i] == tokens[-n:] for i in range(n, len(tokens)))
        ]
        assert not longer


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_a_text_that_grows_in_parts_is_indexed_as_a_whole_one_is(length: int) -> None:
    """Its runs across the ends of parts, too."""
    text = list(range(100, 220))
    whole, tokens = Document(text), []
    document = Document(tokens)
    for start in range(0, len(text), length):
        tokens += text[start : start + length]
        document.draft(text[:1], 4)
    for end in range(8, len(text)):
        assert document.draft(text[end - 8 : end], 4) == whole.draft(text[end - 8 : end], 4)


def test_a_text_is_indexed_once_as_it_grows() -> None:
    """When its tables double, too: all in all that reads as much again."""
    tokens = CountedReads()
    document = Document(tokens)
    for token in range(2000):
        tokens.append(token)
        document.draft(tokens, 4)
    assert tokens.num_read < 100 * len(tokens)


def test_a_run_of_two_is_enough_and_the_last_one_counts() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2]
    assert Document(tokens).draft(tokens, 3) == ([4, 9, 1], 2)


def test_a_prediction_begins_at_its_beginning_and_goes_on_behind_a_changed_token() -> None:
    prediction = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    document = Document(prediction, begins=True)
    tokens = [1, 2, 3]
    assert document.draft(tokens, 4) == ([10, 11, 12, 13], 8)
    tokens += [10, 11, 12, 99]  # instead of 13
    assert document.draft(tokens, 4) == ([14, 15, 16, 17], REALIGNED)
    tokens += [14, 15]
    assert document.draft(tokens, 4).token_ids == [16, 17, 18, 19]


def test_where_tokens_were_inserted_or_left_out_the_text_goes_on_behind_the_last_one_near_there() -> None:
    """And not after a distant occurrence of its last token or its last two."""
    prediction = [*range(10, 30), 99, 14, 80, 81, 19, 20, 82]
    document = Document(prediction, begins=True)
    tokens = [1]
    document.draft(tokens, 4)
    tokens += [10, 11, 12, 13]
    assert document.draft(tokens, 4) == ([14, 15, 16, 17], 4)
    tokens += [99]  # inserted
    assert document.draft(tokens, 4).strength == REALIGNED
    tokens += [14]
    assert document.draft(tokens, 4) == ([15, 16, 17, 18], NEAR_TOKEN)
    tokens += [19]  # 15 to 18 are left out
    assert document.draft(tokens, 4) == ([20, 21, 22, 23], NEAR_TOKEN)
    tokens += [20]
    assert document.draft(tokens, 4) == ([21, 22, 23, 24], NEAR_PAIR)


def test_a_prediction_begins_at_its_beginning_whatever_the_prompt_ends_with() -> None:
    document = Document([10, 11, 12, 13, 14, 15], begins=True)
    assert document.draft([1, 12, 13], 3) == ([10, 11, 12], 8)


# What the text has from index 20 on, instead of 20, 21 and so on; and how it goes on behind the tokens 10 to 19, 99 there:
# where in the text, and for what reason.
@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, (21, REALIGNED)),
        ({4: 99}, (25, NEAR_TOKEN)),
        ({1: 99, 6: 99}, (22, NEAR_TOKEN)),
        ({-3: 99, 1: 99}, (22, NEAR_TOKEN)),
        ({1: 99, 6: 19, 7: 99}, (28, NEAR_PAIR)),
        ({-3: 99}, (18, NEAR_TOKEN)),
        ({-4: 99}, (21, REALIGNED)),
        ({-19: 99}, (21, REALIGNED)),
        ({15: 99}, (36, NEAR_TOKEN)),
        ({16: 99}, (21, REALIGNED)),
    ],
)
def test_the_place_nearest_to_where_the_text_was_is_taken(others: dict[int, int], expected: tuple[int, int]) -> None:
    text = list(range(40))
    for index, token in others.items():
        text[20 + index] = token
    document = Document(text)
    tokens = text[18:20]
    document.draft(tokens, 3)
    tokens += [99]
    position, strength = expected
    assert document.draft(tokens, 3) == (text[position : position + 3], strength)


def test_a_place_at_the_end_of_the_text_is_none() -> None:
    text = [*range(10), 99]
    document = Document(text)
    tokens = [1, 4, 5]
    document.draft(tokens, 3)
    tokens += [99]
    assert document.draft(tokens, 3) == ([7, 8, 9], REALIGNED)


def test_a_place_is_given_up_where_nothing_matches_any_more_until_something_does() -> None:
    text = list(range(100, 140))
    document = Document(text)
    tokens = [*text[10:20]]
    document.draft(tokens, 4)
    for num_differing in range(1, 12):
        tokens.append(num_differing)
        draft = document.draft(tokens, 4)
        if num_differing <= 8:
            assert draft == (text[20 + num_differing :][:4], REALIGNED)
        else:
            assert not draft.token_ids
    tokens += text[4:8]
    assert document.draft(tokens, 4) == (text[8:12], 4)
    tokens.append(1)
    assert document.draft(tokens, 4) == (text[9:13], REALIGNED)


def test_a_long_text_is_indexed_at_once_and_bounded() -> None:
    text = np.random.default_rng(0).integers(0, 50_000, 200_000).tolist()
    document = Document(text)
    assert document.draft([*text[150_000:150_008]], 5) == (text[150_008:150_013], 8)
    assert document.nbytes == 3 * 4 * 131_072


def test_an_answer_that_grows_far_beyond_its_prompt_stays_indexed() -> None:
    """The index had room for the prompt and one draft only: of an answer of 4,000 tokens, it found a quarter of the runs."""
    text = np.random.default_rng(0).integers(0, 50_000, 4000).tolist()
    tokens = text[:10]
    document = Document(tokens)
    for token in text[10:]:
        tokens.append(token)
        document.draft(tokens, 4)
    starts = range(0, 3900, 13)
    found = sum(document.draft(text[start : start + 8], 4) == (text[start + 8 : start + 12], 8) for start in starts)
    assert found > 0.9 * len(starts)
    assert document.nbytes <= 200 * len(text)
