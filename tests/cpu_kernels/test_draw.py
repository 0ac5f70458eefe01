"""Native draws are those of numpy, which the sampler's tests hold against a distribution in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_variants import each_variant, use

from radixkv import SamplingParams
from radixkv.sampling import exponential, host_draw
from radixkv.sampling.variates import SamplingRow
from radixkv_cpu import Truncation, draw_tokens, library

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


@contextmanager
def without_native_code() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_draw, "library", lambda: None)
        yield


def both(logits: torch.Tensor, rows: list[SamplingRow]) -> tuple[list[int], list[int]]:
    native = exponential.draw(logits, rows)
    with without_native_code():
        expected = exponential.draw(logits, rows)
    return native.tolist(), expected.tolist()


KINDS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.01, 0.7, 1.0, 3.0]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.001]),
        "top_k": st.sampled_from([0, 1, 2, 40, 300, 5000]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.05, 1.0]),
    }
)


@settings(max_examples=300, deadline=None, derandomize=True)  # roundings differ at the border of what is left
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from([1, 15, 16, 17, 255, 256, 257, 3000, 9001]),
    spacing=st.sampled_from([None, 0.5, 4.0]),
    num_masked=st.sampled_from([0, 1, 200, 3000]),
    kinds=st.lists(KINDS, min_size=1, max_size=6),
)
def test_draws_are_those_of_numpy(
    seed: int, vocab_size: int, spacing: float | None, num_masked: int, kinds: list[dict[str, Any]]
) -> None:
    """Also among equally likely tokens, and where a grammar leaves few."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(kinds), vocab_size, generator=generator) * 3
    if spacing is not None:
        logits = (logits / spacing).round() * spacing
    if num_masked < vocab_size:
        logits[:, torch.randperm(vocab_size, generator=generator)[:num_masked]] = float("-inf")
    rows = [SamplingRow(SamplingParams(**kind), seed + i, i % 2, i) for i, kind in enumerate(kinds)]
    native, expected = both(logits, rows)
    assert native == expected


LARGE: dict[str, dict[str, Any]] = {
    "whole": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_p of a flat distribution": {"temperature": 50.0, "top_p": 0.9999},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "most": {"temperature": 0.8, "top_k": 20_000},
    "min_p": {"temperature": 1.5, "min_p": 0.02},
    "all": {"temperature": 1.2, "top_k": 500, "top_p": 0.9, "min_p": 0.001},
}


@each_variant
@pytest.mark.parametrize("params", LARGE.values(), ids=LARGE)
def test_draws_from_a_large_vocabulary(variant: str, params: dict[str, Any]) -> None:
    logits = torch.randn(48, 49_152, generator=torch.Generator().manual_seed(1)) * 3
    rows = [SamplingRow(SamplingParams(**params), i, 0, i) for i in range(len(logits))]
    with use(variant):
        native, expected = both(logits, rows)
    assert native == expected
    assert len({*native}) > 40


@each_variant
@pytest.mark.parametrize("truncated", [False, True])
def test_a_row_that_is_no_numbers_draws_some_token_and_disturbs_no_other(variant: str, truncated: bool) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    columns = torch.full((4,), 0.01), torch.full((4,), 20), torch.full((4,), 0.9)
    arguments = torch.ones(4), torch.arange(4), Truncation(*columns) if truncated else None
    with use(variant):
        expected = draw_tokens(logits, *arguments).tolist()
        for position, value in ((0, "nan"), (299, "nan"), (150, "inf")):
            logits[1, position] = float(value)
            found = draw_tokens(logits, *arguments).tolist()
            assert [found[0], *found[2:]] == [expected[0], *expected[2:]]
            assert 0 <= found[1] < 300
        logits[1] = float("-inf")
        assert 0 <= int(draw_tokens(logits, *arguments)[1]) < 300


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "logits": ({"logits": torch.zeros(6)}, r"logits: expected shape \[any, any\], got \[6\]"),
    "type": ({"logits": torch.zeros(2, 6).bfloat16()}, "logits: expected float32, got bfloat16"),
    "no token": ({"logits": torch.zeros(2, 0)}, r"logits: expected at least one token, got shape \[2, 0\]"),
    "temperatures": ({"temperatures": torch.ones(3)}, r"temperatures: expected shape \[2\], got \[3\]"),
    "states": ({"states": torch.zeros(2)}, "states: expected int64, got float32"),
    "truncation": (
        {"truncation": Truncation(torch.zeros(2), torch.ones(2), torch.ones(2))}, "top_k: expected int64, got float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_bad_tensors_are_refused(changed: dict[str, Any], message: str) -> None:
    arguments = {"logits": torch.zeros(2, 6), "temperatures": torch.ones(2), "states": torch.zeros(2).long()}
    with pytest.raises(ValueError, match=message):
        draw_tokens(**(arguments | changed))


def test_no_rows_are_no_tokens() -> None:
    assert draw_tokens(torch.zeros(0, 6), torch.ones(0), torch.zeros(0).long()).tolist() == []
