"""Ctrl-C stops a program between two steps."""

from __future__ import annotations

import signal

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


def test_the_program_gets_its_own_handler_back(llm: LLM) -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        interrupted = False
        try:
            interrupt.raise_if_requested()
        except KeyboardInterrupt:
            interrupted = True
    assert interrupted
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.generate("Hi", SamplingParams(max_tokens=1), use_tqdm=False)
