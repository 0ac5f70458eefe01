"""Tokens of reasoning are counted however an answer's tokens and its text arrive, and whatever is left out of the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from support.chat_templates import TEMPLATES, make_tokenizer
from support.in_process_server import serve
from support.model_zoo import build
from support.sentencepiece_tokenizer import sentencepiece_tokenizer

from radixkv import LLM
from radixkv.server.logprobs import TextLength
from radixkv.server.reasoning_tokens import ReasoningTokens
from radixkv.server.token_text import TokenTexts
from radixkv.serving.answer_reader import PieceReader
from radixkv.tools.chat_format import ChatFormat
from radixkv.tools.pieces import ReadPiece, ReasoningPiece

NEXT = "<|end|><|start|>assistant<|channel|>"
# Two thoughts, and text before, between and after them. Whether each token counts.
ANSWER = [
    ("<|channel|>commentary<|message|>", False),
    ("Hi", False),
    (f"{NEXT}analysis<|message|>", True),
    ("Hm", True),
    ("<|im_start|>", True),
    (", ü", True),
    (f"{NEXT}commentary<|message|>", False),
    ("Wait", False),
    (f"{NEXT}analysis<|message|>", True),
    ("an", True),  # as in the tag before it
    (f"{NEXT}final<|message|>", False),
    ("Yes", False),
]
LEFT_OUT = [index for index, (text, _) in enumerate(ANSWER) if text == "<|im_start|>"]
MARKERS = [index for index, (text, _) in enumerate(ANSWER) if "<|channel|>" in text]


def ways_to_cut(length: int) -> Iterator[list[int]]:
    for chosen in range(1 << (length - 1)):
        yield [0, *(position for position in range(1, length) if chosen >> (position - 1) & 1), length]


@pytest.mark.parametrize("text_is_late", [False, True])
def test_the_count_does_not_depend_on_how_the_answer_was_cut(text_is_late: bool) -> None:
    """A tag before a thought did not count if it came with text before it, nor did a thought that its own tag contains."""
    form = ChatFormat.of(make_tokenizer(TEMPLATES["harmony"])).answer_form("", None)
    texts = Mock(
        bytes_of=lambda index: ANSWER[index][0].encode(), is_left_out=lambda index: index in [*LEFT_OUT, *MARKERS]
    )
    shown = ["" if index in LEFT_OUT else text for index, (text, _) in enumerate(ANSWER)]
    for cuts in ways_to_cut(len(ANSWER)):
        tokens = [list(range(begin, end)) for begin, end in pairwise(cuts)]
        parts = ["".join(shown[index] for index in part) for part in tokens]
        if text_is_late:
            tokens, parts = [*tokens, []], ["", *parts]
        counter = ReasoningTokens(lambda: TextLength(texts, shown_special_tokens=MARKERS))
        reader = PieceReader(form)
        for number, (token_ids, text) in enumerate(zip(tokens, parts, strict=True), start=1):
            pieces = reader.read(0, text, number == len(parts))
            counter.read(0, token_ids, pieces)
        assert counter.count == sum(counts for _, counts in ANSWER), cuts


def test_tokens_of_a_call_before_a_thought_do_not_count() -> None:
    """They were taken for a part of the thought."""
    answer = [
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", False),
        ('{"a":', False),
        (" 1}", False),
        (f"{NEXT}analysis<|message|>", True),
        ("Hm", True),
        (".", True),
    ]
    form = ChatFormat.of(make_tokenizer(TEMPLATES["harmony"])).answer_form("", None)
    texts = Mock(bytes_of=lambda index: answer[index][0].encode(), is_left_out=lambda index: False)
    counter = ReasoningTokens(lambda: TextLength(texts))
    reader = PieceReader(form)
    for index, (text, _) in enumerate(answer):
        pieces = reader.read(0, text, index == len(answer) - 1)
        counter.read(0, [index], pieces)
    assert counter.count == sum(counts for _, counts in answer)


def test_a_space_that_is_left_out_moves_no_token() -> None:
    """The last token seemed to begin behind the text."""
    tokenizer = sentencepiece_tokenizer()
    token_ids = tokenizer.convert_tokens_to_ids(["▁", "▁He", "l", "o", "!"])
    counter = ReasoningTokens(lambda: TextLength(TokenTexts(tokenizer)))
    counter.read(0, token_ids, [ReadPiece(ReasoningPiece("Helo!"), len(" Helo!"))])
    assert counter.count == len(token_ids)


@pytest.mark.parametrize(
    ("family", "biases", "fields", "end"),
    [
        ("think_open", {"Z": 100, "<|start|>": 100, "</think>": 100}, {}, "</think>"),
        ("harmony", {"Z": 100, "<|end|>": 99}, {"structured_outputs": {"choice": ["yes", "no"]}}, "<|end|>"),
    ],
)
def test_special_tokens_among_thoughts_count(
    family: str, biases: dict[str, float], fields: dict[str, Any], end: str
) -> None:
    """Each that is left out of the text moved the thoughts' last tokens behind them; markers are not left out."""
    tokenizer = make_tokenizer(TEMPLATES[family])
    ids = tokenizer.get_vocab()
    llm = LLM(build("llama", {"vocab_size": len(tokenizer)}), tokenizer=tokenizer, num_blocks=40)
    body = {
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 60,
        "seed": 1,
        "logit_bias": {str(ids[token]): bias for token, bias in biases.items()},
        "return_token_ids": True,
        **fields,
    }

    async def scenario(client: httpx.AsyncClient) -> None:
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        streamed = await client.post(
            "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        token_ids = whole["choices"][0]["token_ids"]
        thought = tokenizer.convert_ids_to_tokens(token_ids[: token_ids.index(ids[end])])
        assert whole["choices"][0]["message"]["reasoning"] == thought.count("Z") * "Z" != ""
        assert ("<|start|>" in thought) == (family == "think_open")
        last = json.loads(streamed.text.split("data: ")[-2])
        for usage in (whole["usage"], last["usage"]):
            assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought)

    serve(llm, scenario)
