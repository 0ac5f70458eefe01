"""What grammars may take of the time of all requests, and what their tenants are charged for it."""

from __future__ import annotations

import itertools
import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from radixkv import LLM, BeamSearchParams, CompletionOutput, SamplingParams, StructuredOutputsParams
from radixkv.errors import StructuredOutputError
from radixkv.prompts import Prompt
from radixkv.sampling.grammar import compiler
from radixkv.sampling.grammar import mask as grammar_mask
from radixkv.sampling.grammar.budget import REQUEST_SECONDS, STEP_SECONDS, GrammarBudget, costs, settle
from radixkv.sampling.grammar.state import GrammarState


class SteppingClock:
    """Moves on by ``seconds`` with every look at it."""

    def __init__(self) -> None:
        self.now = self.seconds = 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


@pytest.fixture(autouse=True)
def vocabulary_prepared_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compiler here has the same one, which takes more than a second."""
    tokenizer = llm.engine.grammars._prepared_tokenizer()
    monkeypatch.setattr(compiler, "grammar_tokenizer", lambda *_: tokenizer)


@pytest.mark.parametrize("beams", [False, True])
def test_a_grammar_that_takes_too_long_fails_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, beams: bool
) -> None:
    """Masks of up to 720 ms per token used to go on for as long as the request did."""
    engine = llm.engine
    clock = SteppingClock()
    monkeypatch.setattr(engine.request_factory, "grammars", compiler.GrammarCompiler(engine.loaded, clock))
    slow = StructuredOutputsParams(regex="[0-9]{400}")
    failing = engine.request_factory.make(
        "failing",
        Prompt([5, 6, 8]),
        BeamSearchParams(2, 60, structured_outputs=slow)
        if beams
        else SamplingParams(max_tokens=60, seed=1, structured_outputs=slow),
    )
    monkeypatch.setattr(engine.request_factory, "grammars", compiler.GrammarCompiler(engine.loaded, lambda: 0.0))
    quick = SamplingParams(max_tokens=30, seed=1, structured_outputs=StructuredOutputsParams(regex="[0-9]{6}"))
    other = engine.request_factory.make("other", Prompt([5, 6, 7]), quick)
    engine.add(other)
    engine.add(failing)
    clock.seconds = 0.05
    steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        steps += failing.failure is None
    assert isinstance(failing.failure, StructuredOutputError)
    assert "processor time" in str(failing.failure)
    # A mask and a token take 100 ms per step, of which 25 to 50 are the request's share.
    assert 1 <= steps <= 12
    assert other.failure is None
    assert re.fullmatch(
        "[0-9]{6}", llm.get_tokenizer().decode(other.sequences[0].output_token_ids, skip_special_tokens=True)
    )


def test_a_tenant_pays_for_the_time_of_its_grammars(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenant of a costly grammar used to be served as many tokens as others, though all waited for its masks."""
    engine, shares = llm.engine, llm.engine.scheduler.shares
    clocks = {"dear": SteppingClock(), "cheap": SteppingClock()}
    requests: dict[str, Any] = {}
    for tenant, clock in clocks.items():
        monkeypatch.setattr(engine.request_factory, "grammars", compiler.GrammarCompiler(engine.loaded, clock))
        spec = StructuredOutputsParams(regex="[0-9]{30}")
        options = SamplingParams(max_tokens=20, min_tokens=20, seed=1, structured_outputs=spec)
        requests[tenant] = engine.request_factory.make(tenant, Prompt([5, 6, 7]), options, tenant=tenant)
        engine.add(requests[tenant])
    dear = requests["dear"].grammar.budget
    ticks = itertools.count()
    monkeypatch.setattr(engine._output_processor, "_clock", lambda: 0.012 * next(ticks))
    with monkeypatch.context() as patch:
        charge = Mock(wraps=shares.charge_cost)
        patch.setattr(shares, "charge_cost", charge)
        engine.step()
        assert 0 not in [call.args[1] for call in charge.mock_calls]  # it would change whose turn it is
    assert shares.counter("dear") == pytest.approx(shares.counter("cheap"))
    clocks["dear"].seconds = 0.005
    for _ in range(4):
        engine.step()
    # A mask and a token are 10 ms of a step's 12; in the other 2 it generates a token for each, which counts 2.
    assert shares.counter("dear") - shares.counter("cheap") == pytest.approx(4 * (2 + 2) * 10 / 2)
    owed = shares.counter("dear")
    failure = StructuredOutputError("too many items")
    monkeypatch.setattr(GrammarState, "failure", property(lambda state: failure if state.budget is dear else None))
    engine.step()  # the one in which a grammar fails, too
    assert shares.counter("dear") - owed == pytest.approx(2 + (2 + 2) * 10 / 2)
    while engine.has_unfinished_requests:
        engine.step()
    assert shares.counter("dear") == 0.0


def test_nobody_pays_for_the_replay_of_a_resumed_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, clock = llm.engine.request_factory, SteppingClock()
    clock.seconds = 0.005
    monkeypatch.setattr(factory, "grammars", compiler.GrammarCompiler(llm.engine.loaded, clock))
    spec = StructuredOutputsParams(regex="[0-9]{30}")
    begun = CompletionOutput(0, "", llm.get_tokenizer().encode("123"))
    before = clock()
    request = factory.make("a", Prompt([5], resume=[begun]), SamplingParams(seed=1, structured_outputs=spec))
    assert request.grammar is not None
    assert clock() - before > 2 * clock.seconds
    assert request.grammar.budget.stalled_seconds == 0


def test_masks_that_are_filled_side_by_side_cost_the_time_that_passed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor_time, wall_time = SteppingClock(), SteppingClock()
    processor_time.seconds, wall_time.seconds = 0.5, 3.0
    grammars = compiler.GrammarCompiler(llm.engine.loaded, processor_time, wall_time)
    states = [grammars.compile(StructuredOutputsParams(regex="[a-f]{9}")) for _ in range(8)]
    monkeypatch.setattr(grammar_mask, "_MAX_SERIAL_SECONDS", -1.0)
    grammar_mask.apply_grammar_bitmask(torch.zeros(8, llm.engine.loaded.vocab_size), dict(enumerate(states)))
    budgets = [state.budget for state in states]
    assert sum(budget.stalled_seconds for budget in budgets) == pytest.approx(3.0)
    # What grammars take of a step that is nearly all theirs is bounded.
    assert sum(costs(budgets, 2.0, 3.0)) == pytest.approx(2.0 * 50)


def test_what_a_grammar_leaves_of_its_share_reduces_its_debt() -> None:
    budgets = [GrammarBudget(), GrammarBudget()]
    for _ in range(1000):  # twice its share, then none of it, again and again
        budgets[0].spend(STEP_SECONDS)
        assert settle(budgets) == [None, None]
        assert [budget.in_debt for budget in budgets] == [True, False]
        assert settle(budgets) == [None, None]
        assert not budgets[0].in_debt
    budgets[1].spend(REQUEST_SECONDS + STEP_SECONDS)
    assert [error is None for error in settle(budgets)] == [True, False]
