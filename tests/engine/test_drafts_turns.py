"""Which sequences drafters are asked about, and when: many whose drafts are never right should cost nothing."""

from __future__ import annotations

from collections.abc import Sequence

from support.drafters import draft_from
from support.drafting_engines import drafting
from support.model_zoo import VOCAB_SIZE
from support.tiny_engine import add, tiny

from radixkv import SamplingParams
from radixkv.drafting import Draft, DraftContext, Drafter

NUM_WRONG = 64
NUM_RIGHT = 60
SIZES = {"num_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64}


class Late(Drafter):
    """Drafts one token, always wrong at first, and later always right.

    Args:
        answers: the answers to come, each after a prompt of one token.
    """

    source = "late"

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers = {answer[0]: answer for answer in answers}
        self.asked: list[tuple[int, int]] = []

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        prompt, position = context.token_ids[0], len(context.token_ids)
        self.asked.append((prompt, position))
        token_id = self.answers[prompt][position]
        return Draft([token_id if position > NUM_WRONG else (token_id + 1) % VOCAB_SIZE])


def asked(num_sequences: int) -> list[list[int]]:
    """For each of that many sequences, the positions at which the drafter was asked for the next token."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_WRONG + NUM_RIGHT, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + number]} for number in range(num_sequences)]
    expected = tiny().generate(prompts, params, use_tqdm=False)
    llm = drafting(**SIZES)
    late = Late([[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in expected])
    draft_from(llm, late)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    return [[position for prompt, position in late.asked if prompt == first] for first in late.answers]


def test_among_many_those_that_drafts_never_fit_are_asked_about_seldom_and_together() -> None:
    positions = asked(6)
    assert all(len([position for position in each if position <= NUM_WRONG]) <= 12 for each in positions)
    assert all([p for p in each if p <= NUM_WRONG] == [p for p in positions[0] if p <= NUM_WRONG] for each in positions)
    # When drafts become right, they are soon asked for in every step again; each brings two tokens.
    assert all(len([position for position in each if position > NUM_WRONG]) >= 18 for each in positions)


def test_one_that_is_not_asked_about_has_no_draft_of_an_earlier_turn() -> None:
    """Otherwise steps would wait for the tokens that follow a draft of an earlier turn."""
    llm = drafting(**SIZES)
    engine = llm.engine
    late = Late([[5 + number, *[0] * NUM_WRONG] for number in range(6)])  # hardly ever right
    draft_from(llm, late)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_WRONG, ignore_eos=True)
    for number in range(6):
        add(engine, str(number), [5 + number], params)
    skipped = 0
    while engine.scheduler.waiting or engine.scheduler.running:
        late.asked.clear()
        engine.step()
        asked_about = {prompt for prompt, _ in late.asked}
        for group in engine.scheduler.running:
            (sequence,) = group.sequences
            if sequence.drafts is not None and sequence.token_ids[0] not in asked_about:
                skipped += 1
                assert not sequence.drafts.proposed
    assert skipped > 100


def test_few_are_always_asked_about() -> None:
    """A step of few rows takes as long as the weights take to be read, and asking is nothing beside it."""
    (positions,) = asked(1)
    assert positions[:NUM_WRONG] == list(range(1, NUM_WRONG + 1))
