"""Progress bars show the prompts of the call that they were made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.model_zoo import build_shallow
from tqdm import tqdm

from radixkv import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM(build_shallow("llama"), num_blocks=64)


def test_a_progress_bar_is_made_by_what_is_given(tiny: LLM) -> None:
    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, disable=True)
            bars.append((self, options))

    tiny.generate([IDS, IDS], GREEDY, use_tqdm=Bar)
    assert [options["total"] for _, options in bars] == [2]


def bar_with(update: Callable[[float], None]) -> Callable[..., Any]:
    """Makes progress bars that call ``update`` instead of showing how many prompts have ended."""

    def make(**options: Any) -> tqdm[Any]:
        bar = tqdm(**options, disable=True)
        bar.update = update  # type: ignore[assignment]
        return bar

    return make


def test_a_progress_bar_counts_only_its_own_prompts(tiny: LLM) -> None:
    counted: list[float] = []
    others = tiny.stream(IDS, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    next(others)
    tiny.generate(
        [IDS, IDS], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=bar_with(counted.append)
    )
    assert sum(counted) == 2
    assert [*others][-1].finished


def test_a_progress_bar_may_use_the_llm_that_it_belongs_to(tiny: LLM) -> None:
    answers: list[RequestOutput] = []
    bar = bar_with(lambda _: answers.extend(tiny.generate([IDS], GREEDY, use_tqdm=False)))
    (output,) = tiny.generate([IDS], GREEDY, use_tqdm=bar)
    assert [answer.outputs for answer in answers] == [output.outputs] * len(answers)
    assert answers
