"""With drafts, tokens are those without, over all kinds of work; and a difference is seen where there is one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.model_zoo import build_supported

from radixkv import LLM, SamplingParams
from radixkv.bench.drafts import run_drafts
from radixkv.bench.drafts_equality import Comparison

# Sums in another order; of logits of up to 30, at a temperature of 0.3.
_ROUNDING = 1e-3


@pytest.mark.nightly
def test_ten_thousand_tokens_differ_at_most_where_two_candidates_are_a_rounding_apart(tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w") as out:
        rows = run_drafts(Console(file=out), 1, [], "float32", 64, None, None)
    assert sum(row.tokens for row in rows) >= 10_000
    differences = [difference for row in rows for difference in row.differences]
    assert all(each.gap is not None and abs(each.gap) < _ROUNDING for each in differences), differences


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 0.7}, {"repetition_penalty": 1.5}])
def test_the_gap_is_by_how_much_the_drawn_token_won(changes: dict[str, Any]) -> None:
    """The drawn token wins over any other; where the other is the drawn one, by the same the other way round."""
    llm = LLM(build_supported("llama"), num_blocks=40)
    params = SamplingParams(**{"temperature": 0.0, "seed": 4, "max_tokens": 6, "ignore_eos": True, **changes})
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7, 6]}, params, use_tqdm=False)
    (sample,) = output.outputs
    comparison = Comparison(lambda: build_supported("llama"))
    for other in range(3, 20):
        tokens = [*sample.token_ids[:4], other, 9]
        if other == sample.token_ids[4]:
            continue
        answer = dataclasses.replace(output, outputs=[dataclasses.replace(sample, token_ids=tokens)])
        (there,) = comparison.differences([(output, params)], [(answer, params)])
        (back,) = comparison.differences([(answer, params)], [(output, params)])
        assert (there.index, there.without, there.with_drafts) == (4, sample.token_ids[4], other)
        assert there.gap is not None
        assert back.gap is not None
        assert there.gap > 0
        assert back.gap == pytest.approx(-there.gap)
    shorter = dataclasses.replace(output, outputs=[dataclasses.replace(sample, token_ids=sample.token_ids[:3])])
    (difference,) = comparison.differences([(output, params)], [(shorter, params)])
    assert (difference.index, difference.with_drafts, difference.gap) == (3, None, None)
    assert not [*comparison.differences([(output, params)], [(output, params)])]
