"""Where answers to chats end."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.answer_forms import FORMS, NOW
from support.chat_templates import TEMPLATES, speaker

from radixkv import SamplingParams, StructuredOutputsParams

QUESTION = [{"role": "user", "content": "Hi"}]


def test_nothing_that_ends_text_breaks_a_required_call() -> None:
    """A stop token did, and a stop string did not."""
    llm = speaker(TEMPLATES["hermes"])
    params = SamplingParams(seed=1, max_tokens=90)
    options: Any = {"use_tqdm": False, "tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False}
    (expected,) = llm.chat(QUESTION, params, **options)
    assert "r" in expected.outputs[0].text
    r = llm.get_tokenizer().convert_tokens_to_ids("r")
    for ends in ({"stop": ["r"]}, {"stop_token_ids": [r]}):
        (output,) = llm.chat(QUESTION, replace(params, **ends), **options)
        assert output.outputs[0].text == expected.outputs[0].text
        assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("name", FORMS)
def test_content_matches_its_regex_whatever_ends_the_answer(name: str) -> None:
    """Where parts of answers are marked by special tokens, all of these were in the text, the one that ended it, too."""
    llm = speaker(TEMPLATES[name])
    tokenizer = llm.get_tokenizer()
    # Of the tokens that the grammar allows, the one that ends an answer comes first, then harmony's channel "final".
    likely = {"<|im_end|>": 100.0, "f": 80.0, "a": 50.0, "b": 50.0}
    biases = {tokenizer.convert_tokens_to_ids(token): bias for token, bias in likely.items()}
    for include in (False, True):
        params = SamplingParams(
            seed=1,
            max_tokens=60,
            logit_bias=biases,
            include_stop_str_in_output=include,
            structured_outputs=StructuredOutputsParams(regex="[ab]{2,6}"),
        )
        (output,) = llm.chat(QUESTION, params, use_tqdm=False, tools=[NOW])
        (part,) = output.outputs
        assert part.finish_reason == "stop"
        assert part.answer is not None
        assert re.fullmatch("[ab]{2,6}", part.answer.text)
        assert "<|im_end|>" not in part.text
