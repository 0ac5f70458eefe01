"""Sampling parameters: which are refused, and numbers of numpy among them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from radixkv.sampling_params import BeamSearchParams, SamplingParams


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n: expected at least 1, got 0"),
        ({"n": True}, "n: expected a whole number, got True"),
        ({"n": np.bool_(True)}, "n: expected a whole number, got"),
        ({"n": np.float64(1)}, "n: expected a whole number, got"),
        ({"temperature": np.bool_(True)}, "temperature: expected a number, got"),
        ({"temperature": np.float32("nan")}, "temperature"),
        ({"n": 2, "temperature": 0.0}, "n: expected 1 with temperature 0"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e39}, "temperature: expected at least 0.0 and at most 1e\\+30, got 1e\\+39"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"top_p": 0.0}, "top_p: expected more than 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -2}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: expected at most 8, the limit of the answer's tokens, got 9"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, r"logit_bias: expected a dictionary of biases by token id, got \[1\]"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias: expected finite, got inf"),
        ({"temperature": float("inf")}, r"temperature: expected at least 0.0 and at most 1e\+30, got inf"),
        ({"stop": 3}, "stop: expected a string or a list of strings, got 3"),
        ({"stop_token_ids": 3}, "stop_token_ids: expected a list of token ids, got 3"),
        ({"stop_token_ids": b"x"}, "stop_token_ids: expected a list of token ids, got b'x'"),
        ({"bad_words": 3}, "bad_words: expected a list of strings, got 3"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False, got 1"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens: expected True or False, got 'no'"),
    ],
)
def test_impossible_parameters_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**arguments)


def test_numbers_of_numpy_are_the_numbers_that_they_are() -> None:
    given: dict[str, Any] = {
        "n": np.int64(2),
        "temperature": np.float32(0.5),
        "top_p": np.float16(0.75),
        "top_k": np.int8(5),
        "min_p": np.float64(0.25),
        "seed": np.uint64(2**64 - 1),
        "max_tokens": np.int32(9),
        "logprobs": np.int16(3),
        "prompt_logprobs": np.int16(1),
    }
    plain = {name: value.item() for name, value in given.items()}
    params = SamplingParams(**given, stop_token_ids=np.array([7, 7, 8]), logit_bias={np.int64(4): np.float32(0.5)})
    found = asdict(params)
    assert {name: found[name] for name in plain} == plain
    # numpy's own would wrap around, and are not known to JSON.
    assert all(type(found[name]) is type(value) for name, value in plain.items())
    for numbers in (params.biases, params.biases.values(), params.end_token_ids):
        assert all(type(number) in (int, float) for number in numbers)
    assert (params.biases, params.end_token_ids) == ({4: 0.5}, {7, 8})
    beams = BeamSearchParams(np.int64(3), np.int64(4), length_penalty=np.float32(0.5))  # type: ignore[arg-type]
    assert [type(value) for value in (beams.beam_width, beams.max_tokens, beams.length_penalty)] == [int, int, float]
