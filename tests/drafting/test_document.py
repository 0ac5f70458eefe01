"""Where a sequence's last tokens occur in a text, and what follows them there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=60), max_tokens=st.integers(1, 9))
def test_a_draft_is_what_followed_the_longest_run_that_is_found(text: list[int], max_tokens: int) -> None:
    """Token by token, as a sequence grows; the runs are checked against a search through the whole text."""
    tokens: list[int] = []
    document = Document(tokens)
    for token in text:
        tokens.append(token)
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


def test_a_run_of_two_is_enough_and_the_last_one_counts() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2]
    assert Document(tokens).draft(tokens, 3) == ([4, 9, 1], 2)


def test_a_prediction_begins_at_its_beginning_and_goes_on_behind_a_changed_token() -> None:
    prediction = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    document = Document(prediction, begins=True)
    tokens = [1, 2, 3]
    assert document.draft(tokens, 4).token_ids == [10, 11, 12, 13]
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


def test_a_place_is_given_up_where_nothing_matches_any_more() -> None:
    document = Document([10, 11, 12, 13, 14, 15, 16, 17, 18, 19], begins=True)
    tokens = [1]
    document.draft(tokens, 4)
    for token in range(50, 60):
        tokens.append(token)
        last = document.draft(tokens, 4)
    assert not last.token_ids


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
