"""Incremental text equals the text of all tokens, and stop strings are found at any position."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from radixkv.sampling.detokenizer import IncrementalDetokenizer

TEXTS = ["Hello, world! ", "naïve café ", "日本語のテキスト", "👩‍👩‍👧 family 🎉", "  two spaces\n\ttab", "Привет, мир"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4), cut=st.integers(0, 3))
def test_deltas_add_up_to_the_full_text(default_tokenizer: Any, parts: list[str], cut: int) -> None:
    ids = default_tokenizer("".join(parts), add_special_tokens=False)["input_ids"]
    ids = ids[: len(ids) - cut]  # may end inside a character
    detokenizer = IncrementalDetokenizer(default_tokenizer)
    pieces = []
    for token_id in ids:
        assert detokenizer.append([token_id]) is None
        pieces.append(detokenizer.delta())
        assert "\N{REPLACEMENT CHARACTER}" not in pieces[-1]
    detokenizer.finish()
    pieces.append(detokenizer.delta())
    assert "".join(pieces) == detokenizer.text == default_tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), parts=st.lists(st.sampled_from([*TEXTS, "<|im_end|>"]), min_size=1, max_size=4))
def test_text_is_the_same_however_seldom_it_is_read(
    default_tokenizer: Any, data: st.DataObject, parts: list[str]
) -> None:
    """Against a detokenizer that must read every token at once, because it looks for a stop string."""
    ids = default_tokenizer("".join(parts), add_special_tokens=False)["input_ids"]
    often, seldom = IncrementalDetokenizer(default_tokenizer, stop=["\0"]), IncrementalDetokenizer(default_tokenizer)
    pieces = ""
    for token_id in ids:
        often.append([token_id])
        seldom.append([token_id])
        if data.draw(st.booleans()):
            pieces += seldom.delta()
            assert pieces == seldom.text == often.text
    often.finish()
    seldom.finish()
    assert pieces + seldom.delta() == seldom.text == often.text


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [["two"], ["o, t"], ["three", "wo"], ["one, two, three"]])
def test_a_stop_string_truncates_the_text_and_is_never_streamed(
    default_tokenizer: Any, stop: list[str], include: bool
) -> None:
    text = "zero one, two, three, four"
    ids = default_tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(default_tokenizer, stop=stop, include_stop_str_in_output=include)
    streamed, hit = "", None
    for token_id in ids:
        hit = detokenizer.append([token_id])
        streamed += detokenizer.delta()
        if hit is not None:
            break
    end, first = min((text.index(string) + len(string), string) for string in stop if string in text)
    assert hit == first
    assert detokenizer.text == streamed == text[: end if include else end - len(first)]


def sentencepiece_style() -> Any:
    """A tokenizer that drops the leading space of a text, as Llama 2's and Mistral's do."""
    vocabulary = {"<unk>": 0, **{word: i for i, word in enumerate(["▁The", "▁sea", "▁is", "▁blue", "ish"], start=1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_an_answer_starts_with_the_space_that_separates_it_from_its_prompt() -> None:
    tokenizer = sentencepiece_style()
    for prompt, answer, text in [([1, 2, 3], [4, 5], " blueish"), ([1, 2, 3, 4], [5], "ish"), ([], [4, 5], "blueish")]:
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        pieces = ""
        for token_id in answer:
            detokenizer.append([token_id])
            pieces += detokenizer.delta()
        detokenizer.finish()
        assert pieces + detokenizer.delta() == detokenizer.text == text


def test_an_answer_to_an_incomplete_character_has_all_its_own_bytes(default_tokenizer: Any) -> None:
    ids = default_tokenizer("ab\N{GRINNING FACE}cd", add_special_tokens=False)["input_ids"]
    cut = next(i for i in range(len(ids)) if default_tokenizer.decode(ids[:i]).endswith("\N{REPLACEMENT CHARACTER}"))
    detokenizer = IncrementalDetokenizer(default_tokenizer, ids[:cut])
    detokenizer.append(ids[cut:])
    detokenizer.finish()
    assert detokenizer.text == default_tokenizer.decode(ids[cut:], clean_up_tokenization_spaces=False)


def test_special_tokens_are_left_out_unless_asked_for(default_tokenizer: Any) -> None:
    ids = default_tokenizer("Hi<|im_end|>", add_special_tokens=False)["input_ids"]
    texts = []
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(default_tokenizer, skip_special_tokens=skip)
        detokenizer.append(ids)
        texts.append(detokenizer.text)
    assert texts == ["Hi", "Hi<|im_end|>"]
