"""Where steps are launched ahead, drafts are asked for now and then: what is learned then, and which steps wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drafters import draft_from, speculator_of
from support.drafting_engines import drafting
from support.tiny_engine import add

from radixkv import LLM, SamplingParams
from radixkv.drafting import Draft, DraftContext, Drafter

GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


class Known(Drafter):
    """Knows some prompts' answers, or says that it does."""

    source = "known"

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        self.is_right = True
        self.num_asked: dict[tuple[int, ...], int] = {}

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        prompt = tuple(context.token_ids[: context.num_prompt_tokens])
        self.num_asked[prompt] = self.num_asked.get(prompt, 0) + 1
        start = len(context.token_ids) - len(prompt)
        tokens = self.answers.get(prompt, ())[start : start + max_tokens]
        return Draft(tokens if self.is_right else [token_id ^ 1 for token_id in tokens])


def engine(known: Known, ahead: bool = True) -> LLM:
    llm = drafting(async_scheduling=ahead, max_num_seqs=16, max_num_batched_tokens=64, num_blocks=600)
    draft_from(llm, known)
    return llm


def let_drafts_cost(llm: LLM, monkeypatch: pytest.MonkeyPatch, of_row: float, of_any: float = 0.0) -> None:
    """What a draft's row, and drafts at all, add to a step, as parts of it."""

    def predict(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return 1.0 + of_row * (rows - rows[0]) + of_any * (rows > rows[0])

    monkeypatch.setattr(speculator_of(llm)._times, "predict", predict)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("ahead", [False, True], ids=["in order", "launched ahead"])
def test_a_source_that_has_become_right_is_drafted_from_again(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that got no rows in a step launched ahead used to teach nothing: after two wrong ones, no more were verified."""
    known = Known()
    llm = engine(known, ahead)
    let_drafts_cost(llm, monkeypatch, of_row=0.45)
    prompt = [5, 6, 7]
    (answer,) = answers(llm, [prompt])
    known.answers[tuple(prompt)] = answer
    steps = []
    for is_right in (False, True, True):
        known.is_right, before = is_right, llm.engine.num_steps
        assert answers(llm, [prompt]) == [answer]
        steps.append(llm.engine.num_steps - before)
    wrong, _, right = steps
    assert wrong == 100
    assert right < 50


def test_a_draft_that_is_not_worth_its_rows_keeps_no_step_from_being_launched_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sequence of twelve with a good draft, which was never verified, used to make every step of all of them wait."""
    known, num_calls = Known(), 0
    llm = engine(known)
    step = llm.engine.step

    def counting() -> Any:
        nonlocal num_calls
        num_calls += 1
        return step()

    monkeypatch.setattr(llm.engine, "step", counting)
    prompts = [[5, 6, 7, number] for number in range(12)]
    expected = answers(llm, prompts)
    known.answers[tuple(prompts[0])] = expected[0]

    def num_waiting_and_drafted() -> tuple[int, int]:
        """Calls of `step` that only waited for tokens in flight, and tokens that were drafted."""
        counts = llm.engine.draft_counts.get("known")
        calls, steps, drafted = num_calls, llm.engine.num_steps, 0 if counts is None else counts.drafted
        assert answers(llm, prompts) == expected
        calls, steps = num_calls - calls, llm.engine.num_steps - steps
        counts = llm.engine.draft_counts.get("known")
        return calls - steps, (0 if counts is None else counts.drafted) - drafted

    let_drafts_cost(llm, monkeypatch, of_row=0.0)
    assert num_waiting_and_drafted()[1] > 50
    let_drafts_cost(llm, monkeypatch, of_row=0.02, of_any=0.5)
    num_waiting, num_drafted = num_waiting_and_drafted()
    assert num_waiting < 10
    assert num_drafted == 0
    let_drafts_cost(llm, monkeypatch, of_row=0.0)
    assert num_waiting_and_drafted()[1] > 50


def test_drafters_are_asked_about_a_sequence_however_many_others_begin_beside_it() -> None:
    """Each prompt that was computed used to begin the count of steps anew after which drafters are asked about all."""
    known = Known()
    llm = engine(known)
    add(llm.engine, "long", [5, 6, 7], GREEDY)
    for number in range(20):
        add(llm.engine, f"short-{number}", [8, number], SamplingParams(max_tokens=2, ignore_eos=True))
        for _ in range(4):
            llm.engine.step()
    assert known.num_asked[5, 6, 7] >= 4
