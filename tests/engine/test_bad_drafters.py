"""User-written drafters: whatever they return, requests get the same tokens as without them."""

from __future__ import annotations

import logging
import re
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.drafters import Guesser
from support.drafting_engines import Work, answers, drafting, plain_llm
from support.model_zoo import VOCAB_SIZE

from radixkv import LLM, SamplingParams
from radixkv.drafting import Draft, DraftContext, Drafter

NO_LISTS: dict[str, Any] = {
    "an empty array": np.array([], dtype=int),
    "an empty tensor": torch.tensor([], dtype=torch.int64),
    "an array": np.array([VOCAB_SIZE + 1]),
    "a set": {VOCAB_SIZE},
    "text": "no",
    "floats": [1.0],
    "nothing": None,
}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return plain_llm()


@pytest.mark.parametrize("guesses", ["raises", "too many", "outside", *NO_LISTS])
def test_a_bad_drafter_is_ignored_and_named_once(plain: LLM, guesses: str, caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Drafter):
        source = "bad"

        def draft(self, context: Any, max_tokens: int) -> Any:
            if guesses == "raises":
                raise RuntimeError("no idea")
            if guesses in NO_LISTS:
                return Draft(NO_LISTS[guesses])
            return Draft([3] * (max_tokens + 1) if guesses == "too many" else [VOCAB_SIZE])

    llm = drafting([Bad()])
    requests: Work = [([5, 6, 7], SamplingParams(temperature=0.5, seed=1, max_tokens=20))]
    with caplog.at_level(logging.WARNING):
        assert answers(llm, requests) == answers(plain, requests)
    assert "bad" not in llm.engine.draft_counts
    # An array without ids is no draft.
    said = [] if guesses.startswith("an empty") else ["drafter 'bad':"]
    assert [record.getMessage()[:14] for record in caplog.records] == said


@pytest.mark.parametrize("kind", [np.array, set, tuple, deque, torch.tensor])
def test_a_draft_may_be_any_collection_of_ids(plain: LLM, kind: Any) -> None:
    """A draft that could not be sliced used to fail the whole batch."""

    class Own(Drafter):
        source = "own"

        def draft(self, context: Any, max_tokens: int) -> Any:
            return Draft(kind([context.token_ids[-1]]))

    llm = drafting([Own()])
    requests: Work = [([5, 6, 7], SamplingParams(temperature=0.5, seed=seed, max_tokens=20)) for seed in range(2)]
    assert answers(llm, requests) == answers(plain, requests)
    assert llm.engine.draft_counts["own"].drafted > 0


def test_drafters_that_are_equal_and_have_no_hash_keep_notes_of_their_own(
    plain: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a dataclass: what it noted raised, and its drafts were dropped."""

    @dataclass
    class Noting(Drafter):
        source = "noting"

        def draft(self, context: DraftContext, max_tokens: int) -> Draft:
            asked.append((self, context.notes.get(self)))
            context.notes[self] = id(self)
            return Draft([context.token_ids[-1]])

    asked: list[tuple[Drafter, int | None]] = []
    both = [Noting(), Noting()]
    both[1].source = "noting, too"  # type: ignore[misc]  # a subclass would not be equal
    requests: Work = [([5, 6, 7], SamplingParams(temperature=0.5, seed=1, max_tokens=6))]
    assert answers(drafting(both), requests) == answers(plain, requests)
    assert not caplog.records
    for drafter in both:
        assert {note for each, note in asked if each is drafter} == {None, id(drafter)}


@pytest.mark.parametrize(("answer", "shown"), [(None, "None"), ([3, 4], r"\[3, 4\]")])
def test_what_is_no_draft_is_named(answer: Any, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    class Bare(Drafter):
        source = "bare"

        def draft(self, context: Any, max_tokens: int) -> Any:
            return answer

    with caplog.at_level(logging.WARNING):
        answers(drafting([Bare()]), [([5, 6, 7], SamplingParams(max_tokens=4))])
    (record,) = caplog.records
    assert re.fullmatch(f"drafter 'bare': .*: TypeError: expected a Draft, got {shown}", record.getMessage())


def test_a_drafter_alone_is_no_list() -> None:
    with pytest.raises(
        ValueError, match=r"^speculative_config: drafters: expected a list, got a value of type Guesser$"
    ):
        drafting(Guesser(1, VOCAB_SIZE))  # type: ignore[arg-type]


def test_what_is_no_drafter_is_refused() -> None:
    for wrong in (Guesser, 5, "tree"):
        with pytest.raises((TypeError, ValueError), match="drafters: expected objects of subclasses of Drafter"):
            drafting([wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("source", ["guesser", "tree"])
def test_two_drafters_of_one_source_are_refused(source: str) -> None:
    """What was learned of one was applied to the other, and only one of their drafts was kept; a built-in one counts, too."""
    second = type("Second", (Guesser,), {"source": source})(1, VOCAB_SIZE)
    with pytest.raises(
        ValueError, match=f"drafters: expected each drafter to have a source of its own, got 2 with '{source}'"
    ):
        drafting([Guesser(1, VOCAB_SIZE), second])
