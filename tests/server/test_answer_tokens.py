"""The tokens of an answer's pieces are found however its tokens and its text arrive, and whatever is left out of the text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from support.chat_templates import TEMPLATES, make_tokenizer
from support.in_process_server import served
from support.model_zoo import build
from support.sentencepiece_tokenizer import sentencepiece_tokenizer

from radixkv import LLM
from radixkv.outputs import CompletionOutput, Logprob
from radixkv.server.chat.answer_tokens import AnswerTokens, LocatedPiece
from radixkv.server.output.logprobs import TextLength
from radixkv.server.output.token_text import TokenTexts
from radixkv.serving.answer_reader import PieceReader
from radixkv.tools.chat_format import ChatFormat
from radixkv.tools.pieces import AnswerPiece, ReadPiece, ReasoningPiece, TextPiece, ToolCallBegin

NEXT = "<|end|><|start|>assistant<|channel|>"
# Two thoughts, and text before, between and after them. Of which kind of piece each token is; None: of neither.
ANSWER: list[tuple[str, type[AnswerPiece] | None]] = [
    ("<|channel|>commentary<|message|>", None),
    ("Hi", TextPiece),
    (f"{NEXT}analysis<|message|>", ReasoningPiece),
    ("Hm", ReasoningPiece),
    ("<|im_start|>", ReasoningPiece),
    (", ü", ReasoningPiece),
    ("<|im_start|>", ReasoningPiece),
    (f"{NEXT}commentary<|message|>", None),
    ("Wait", TextPiece),
    (f"{NEXT}analysis<|message|>", ReasoningPiece),
    ("an", ReasoningPiece),  # as in the tag before it
    (f"{NEXT}final<|message|>", None),
    ("Yes", TextPiece),
]
LEFT_OUT = [index for index, (text, _) in enumerate(ANSWER) if text == "<|im_start|>"]
MARKERS = [index for index, (text, _) in enumerate(ANSWER) if "<|channel|>" in text]


def ways_to_cut(length: int) -> Iterator[list[int]]:
    for chosen in range(1 << (length - 1)):
        yield [0, *(position for position in range(1, length) if chosen >> (position - 1) & 1), length]


def tokens_of_text(located: Sequence[LocatedPiece]) -> list[int]:
    return [token.token_id for piece, tokens in located if isinstance(piece, TextPiece) for token in tokens]


@pytest.mark.parametrize("text_is_late", [False, True])
def test_tokens_do_not_depend_on_how_the_answer_was_cut(text_is_late: bool) -> None:
    """A tag before a thought did not count if it came with text before it, nor did a thought that its own tag contains."""
    form = ChatFormat.of(make_tokenizer(TEMPLATES["harmony"])).answer_form("", None)
    texts = Mock(
        bytes_of=lambda index: ANSWER[index][0].encode(), is_left_out=lambda index: index in [*LEFT_OUT, *MARKERS]
    )
    shown = ["" if index in LEFT_OUT else text for index, (text, _) in enumerate(ANSWER)]
    for cuts in ways_to_cut(len(ANSWER)):
        parts = [list(range(begin, end)) for begin, end in pairwise(cuts)]
        said = ["".join(shown[index] for index in part) for part in parts]
        if text_is_late:
            parts, said = [*parts, []], ["", *said]
        tokens, reader = AnswerTokens(TextLength(texts, shown_special_tokens=MARKERS)), PieceReader(form)
        located: list[LocatedPiece] = []
        for number, (token_ids, text) in enumerate(zip(parts, said, strict=True), start=1):
            logprobs = [{index: Logprob(-1.0, 1, shown[index])} for index in token_ids]
            output = CompletionOutput(0, text, token_ids, logprobs=logprobs)
            located += tokens.locate(output, reader.read(0, text, number == len(parts)))
        assert tokens_of_text(located) == [index for index, (_, of) in enumerate(ANSWER) if of is TextPiece], cuts
        assert tokens.num_reasoning == sum(of is ReasoningPiece for _, of in ANSWER), cuts
        assert all(list(token.logprobs) == [token.token_id] for _, tokens in located for token in tokens)
        assert "".join(piece.text for piece, _ in located if isinstance(piece, TextPiece)) == "HiWaitYes"


def test_tokens_of_a_call_before_a_thought_are_not_its_own() -> None:
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
    tokens, reader = AnswerTokens(TextLength(texts)), PieceReader(form)
    for index, (text, _) in enumerate(answer):
        pieces = reader.read(0, text, index == len(answer) - 1)
        tokens.locate(CompletionOutput(0, text, [index]), pieces)
    assert tokens.num_reasoning == sum(counts for _, counts in answer)


def test_a_space_that_is_left_out_moves_no_token() -> None:
    """The last token seemed to begin behind the text."""
    tokenizer = sentencepiece_tokenizer()
    token_ids = tokenizer.convert_tokens_to_ids(["▁", "▁He", "l", "o", "!"])
    tokens = AnswerTokens(TextLength(TokenTexts(tokenizer)))
    tokens.locate(CompletionOutput(0, "Helo!", token_ids), [ReadPiece(ReasoningPiece("Helo!"), len(" Helo!"))])
    assert tokens.num_reasoning == len(token_ids)


def test_a_token_that_begins_before_the_text_is_one_of_its_tokens() -> None:
    """White space before a text is left out of it, and may be part of its first token."""
    answer = ["Hm", ".</think>", "\n Yes", ".\n", "<tool_call>"]
    ends = [sum(map(len, answer[:number])) for number in range(len(answer) + 1)]
    read = [
        ReadPiece(ReasoningPiece("Hm."), len("Hm.")),
        ReadPiece(TextPiece("Yes."), ends[3] + 1),
        ReadPiece(ToolCallBegin(0, "call_1", "f"), ends[5]),
    ]
    texts = Mock(bytes_of=lambda index: answer[index].encode(), is_left_out=lambda index: False)
    tokens = AnswerTokens(TextLength(texts))
    located = tokens.locate(CompletionOutput(0, "", [*range(len(answer))]), read)
    assert (tokens.num_reasoning, tokens_of_text(located)) == (2, [2, 3])


@pytest.mark.parametrize(
    ("family", "biases", "fields", "end"),
    [
        ("think_open", {"Z": 100, "<|start|>": 100, "</think>": 100}, {}, "</think>"),
        ("harmony", {"Z": 100, "<|end|>": 99}, {"structured_outputs": {"choice": ["yes", "no"]}}, "<|end|>"),
    ],
)
async def test_special_tokens_among_thoughts_count(
    family: str, biases: dict[str, float], fields: dict[str, Any], end: str
) -> None:
    """Each that is left out of the text moved the last tokens behind the thoughts, or did not count; markers are not."""
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
    async with served(llm) as client:
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
