"""Requests that come, run and are aborted in any order, with drafts: a state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.drafters import Guesser, Oracle
from support.drafting_engines import KINDS, drafting, plain_llm
from support.model_zoo import VOCAB_SIZE
from support.tiny_engine import add, finish

from radixkv import LLM, SamplingParams
from radixkv.scheduling.request import Request


class DraftMachine(RuleBasedStateMachine):
    """Requests come, run, and are aborted; whatever is drafted, each gets the tokens that it gets alone."""

    plain: LLM
    llm: LLM
    oracle: Oracle

    @initialize()
    def begin(self) -> None:
        self.llm.reset_prefix_cache()
        self.requests: list[Request] = []
        self.count = 0

    @rule(
        stem=st.integers(1, 12),
        number=st.integers(0, 3),
        kind=st.sampled_from(KINDS),
        length=st.integers(4, 24),
        known=st.booleans(),
    )
    def add(self, stem: int, number: int, kind: dict[str, Any], length: int, known: bool) -> None:
        prompt = [*range(10, 10 + stem), number]
        params = SamplingParams(max_tokens=length, seed=number, **kind)
        self.count += 1
        if known:
            (expected,) = self.plain.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            self.oracle.sequences += [[*prompt, *sample.token_ids] for sample in expected.outputs]
        self.requests.append(add(self.llm.engine, f"r{self.count}", prompt, params))

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.llm.engine.has_unfinished_requests:
                self.llm.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.llm.engine.abort(data.draw(st.sampled_from(self.requests)).request_id)

    @rule()
    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    @invariant()
    def cache_holds(self) -> None:
        engine = self.llm.engine
        engine.cache.check()
        for group in engine.scheduler.running:
            for sequence in group.sequences:
                assert sequence.table is not None
                if not engine.async_scheduling and sequence.num_pending == 1:
                    most = max(sequence.num_computed, sequence.request.num_prompt_tokens)
                    assert sequence.table.num_blocks <= -(-most // engine.cache.block_size)

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        finish(self.llm.engine)
        for request in self.requests:
            (expected,) = self.plain.generate(
                {"prompt_token_ids": request.prompt_token_ids.tolist()}, request.params, use_tqdm=False
            )
            for sequence, sample in zip(request.sequences, expected.outputs, strict=False):
                got = sequence.output_token_ids
                assert got == sample.token_ids[: len(got)]
                assert sequence.finish_reason in ("abort", sample.finish_reason)
        self.oracle.sequences.clear()


def test_drafts_change_no_answer_in_any_interleaving() -> None:
    class Machine(DraftMachine):
        plain = plain_llm()
        oracle = Oracle(3, error_rate=0.15, vocab_size=VOCAB_SIZE)
        llm = drafting([oracle, Guesser(4, VOCAB_SIZE)])

    run_state_machine_as_test(Machine, settings=settings(max_examples=8, stateful_step_count=20, deadline=None))
