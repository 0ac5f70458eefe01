"""Ctrl-C stops a program between two steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from support.model_zoo import VOCAB_SIZE, build_supported
from support.preloaded_process import PreloadedProcess

from radixkv import LLM, SamplingParams
from radixkv.serving.interrupts import deferred_interrupt

PROGRAM = """
import sys
from radixkv import LLM, SamplingParams
llm = LLM()
step = llm.engine.step
def announced():
    print("step", flush=True)
    return step()
llm.engine.step = announced
try:
    llm.generate(["One, two,"] * 4, SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    llm.engine.cache.check()
    assert not llm.engine.has_unfinished_requests
    assert llm.reset_prefix_cache()
    print("clean", flush=True)
"""


def test_ctrl_c_in_the_middle_is_a_clean_stop() -> None:
    process = PreloadedProcess(PROGRAM)
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read().endswith("clean\n")
    assert process.wait(600) == 0


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_python_s_own_handler_raises_between_steps_and_is_there_again(handled_by: Callable[[Any], None]) -> None:
    handled_by(signal.default_int_handler)
    with deferred_interrupt() as interrupt:
        press()
        with pytest.raises(KeyboardInterrupt):
            interrupt.deliver()
        interrupt.deliver()  # delivered once
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_one_does_not_wait(handled_by: Callable[[Any], None]) -> None:
    handled_by(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_what_comes_in_the_last_step_is_not_lost(handled_by: Callable[[Any], None]) -> None:
    handled_by(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        press()


def test_a_handler_of_the_program_s_own_is_called_between_steps(handled_by: Callable[[Any], None]) -> None:
    """It used to be replaced by a KeyboardInterrupt, and `asyncio.run` did not know that it had been stopped."""
    llm, pressed = LLM(build_supported("llama"), block_size=4, num_blocks=60), []
    in_step, step = [False], llm.engine.step

    def pressing() -> Any:
        in_step[0] = True
        press()
        touched = step()
        in_step[0] = False
        return touched

    llm.engine.step = pressing  # type: ignore[method-assign]
    handled_by(lambda *_: pressed.append(in_step[0]))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    (output,) = llm.generate([[VOCAB_SIZE - 1]], params, use_tqdm=False)
    streamed = list(llm.stream([VOCAB_SIZE - 2], params))
    assert len(output.outputs[0].token_ids) == len(streamed) == 3
    assert len(pressed) >= 6
    assert not any(pressed)


def test_what_the_program_ignores_does_nothing(handled_by: Callable[[Any], None]) -> None:
    """Ctrl-C used to stop a program that ignores it."""
    handled_by(signal.SIG_IGN)
    with deferred_interrupt() as interrupt:
        press()
        interrupt.deliver()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_sets_another_is_not_put_back(handled_by: Callable[[Any], None]) -> None:
    handled_by(lambda *_: handled_by(signal.SIG_IGN))
    with deferred_interrupt() as interrupt:
        press()
        interrupt.deliver()
        press()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_second_one_while_requests_are_aborted_leaves_none(
    handled_by: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to end the aborting: the rest stayed in the engine with their blocks, and nobody could end them."""
    handled_by(signal.default_int_handler)
    llm = LLM(build_supported("llama"), num_blocks=100)
    step, abort = llm.engine.step, llm.engine.abort

    def step_pressed() -> Any:
        press()
        return step()

    def abort_pressed(request_id: str) -> bool:
        if request_id == "1":
            press()
        return abort(request_id)

    monkeypatch.setattr(llm.engine, "step", step_pressed)
    monkeypatch.setattr(llm.engine, "abort", abort_pressed)
    prompts = [{"prompt_token_ids": [3 + number, 4, 5]} for number in range(5)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SamplingParams(max_tokens=50, detokenize=False), use_tqdm=False)
    assert not llm.engine.has_unfinished_requests
