"""Log-probabilities are written as JSON text: as pydantic would, and not in the event loop."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import random
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from support.in_process_server import served

from radixkv import LLM
from radixkv.outputs import Logprob
from radixkv.server import completions
from radixkv.server.chat import routes as chat_completions
from radixkv.server.chat.routes import AssistantMessage, ChatChoice
from radixkv.server.completions import Completion, CompletionChoice
from radixkv.server.output.encoding import encode_response
from radixkv.server.output.logprobs import (
    ChatLogprobs,
    ChosenTokenLogprob,
    CompletionLogprobs,
    TextLength,
    TokenLogprob,
    encode_chat_logprobs,
    encode_completion_logprobs,
)
from radixkv.server.output.token_text import TokenTexts


def some_logprobs(seed: int, num_top: int) -> tuple[list[int], list[dict[int, Logprob]]]:
    """Tokens of which some are not among their likeliest, some are parts of characters, and one is impossible."""
    random.seed(seed)
    token_ids, logprobs = [], []
    for _ in range(20):
        ids = random.sample(range(2000), num_top + 1)
        entries = {i: Logprob(-random.random() * 20, rank, None) for rank, i in enumerate(ids[:num_top], start=1)}
        chosen = random.choice(ids)
        # The chosen one comes first.
        entries = {chosen: entries.get(chosen, Logprob(-30.0, 400, None)), **entries}
        token_ids.append(chosen)
        logprobs.append(entries)
    return token_ids, logprobs


def by_rank(entries: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda entry: entry[1].rank)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_chat_logprobs_are_what_pydantic_writes(default_tokenizer: Any, num_top: int) -> None:
    texts = TokenTexts(default_tokenizer)
    token_ids, logprobs = some_logprobs(num_top, num_top)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": logprob, "bytes": texts.bytes_of(token_id)}

    expected = ChatLogprobs(
        content=[
            ChosenTokenLogprob(
                **entry(token_id, entries[token_id].logprob),
                top_logprobs=[TokenLogprob(**entry(i, e.logprob)) for i, e in by_rank(entries) if e.rank <= num_top],
            )
            for token_id, entries in zip(token_ids, logprobs, strict=True)
        ]
    )
    encoded = encode_chat_logprobs(token_ids, logprobs, num_top, texts)
    assert encoded.encoded.decode() == expected.model_dump_json()
    choice = ChatChoice(index=0, message=AssistantMessage(content="x"), logprobs=encoded, finish_reason="stop")
    assert json.loads(choice.model_dump_json())["logprobs"] == expected.model_dump()


def test_completion_logprobs_are_what_pydantic_writes(default_tokenizer: Any) -> None:
    texts = TokenTexts(default_tokenizer)
    token_ids, logprobs = some_logprobs(1, 5)
    logprobs[3] = {token_ids[3]: Logprob(-math.inf, 9, None), 7: Logprob(-0.5, 1, None)}
    entries = [(5, None), *zip(token_ids, logprobs, strict=True)]
    length = TextLength(texts, skip_special_tokens=False)
    length.characters = 10
    encoded = encode_completion_logprobs(entries, 4, length, texts)
    shown = [texts.text(token_id) for token_id in (5, *token_ids)]
    written = b"".join(bytes(texts.bytes_of(token_id)) for token_id in (5, *token_ids))
    ends = [0, *itertools.accumulate(len(texts.bytes_of(token_id)) for token_id in (5, *token_ids))]
    # Without the last character, where it is incomplete.
    offsets = [10 + len(codecs.utf_8_decode(written[:end], "replace")[0]) for end in ends]
    expected = CompletionLogprobs(
        text_offset=offsets[:-1],
        tokens=shown,
        token_logprobs=[None, *(max(e[i].logprob, -9999.0) for i, e in zip(token_ids, logprobs, strict=True))],
        top_logprobs=[
            None,
            *(
                {texts.text(i): max(v.logprob, -9999.0) for i, v in [*by_rank(e)[:4], (chosen, e[chosen])]}
                for chosen, e in zip(token_ids, logprobs, strict=True)
            ),
        ],
    )
    assert length.characters == offsets[-1]
    assert encoded.encoded.decode() == expected.model_dump_json()
    choices = [CompletionChoice(index=0, text='"logprobs":null', logprobs=encoded), CompletionChoice(index=1, text="")]
    response = Completion(id="x", created=1, model="m", choices=choices)
    assert json.loads(encode_response(response)) == json.loads(response.model_dump_json())
    assert json.loads(encode_response(response))["choices"][0]["logprobs"]["tokens"] == shown


def test_of_tokens_with_one_text_the_chosen_one_counts_else_the_likeliest() -> None:
    """The one that came last did, so that a chosen token's log-probability could be another's, a thousand times lower."""
    names = {1: "A", 2: "A", 3: "B", 4: "B"}
    texts = Mock(
        quoted=lambda token_id: json.dumps(names[token_id]),
        bytes_of=lambda token_id: list(names[token_id].encode()),
        is_left_out=lambda token_id: False,
    )
    likeliest = [Logprob(-0.1, 1, None), Logprob(-2.5, 2, None), Logprob(-9.0, 3, None), Logprob(-9.5, 4, None)]
    by_id = dict(zip((1, 3, 2, 4), likeliest, strict=True))
    for chosen, top in ((1, {"A": -0.1, "B": -2.5}), (2, {"A": -9.0, "B": -2.5}), (4, {"A": -0.1, "B": -9.5})):
        entries = [(chosen, {chosen: by_id[chosen], **by_id})]
        encoded = json.loads(encode_completion_logprobs(entries, 4, TextLength(texts), texts).encoded)
        assert encoded["token_logprobs"] == [by_id[chosen].logprob]
        assert encoded["top_logprobs"] == [top]


async def test_special_tokens_that_are_left_out_have_no_length(llm: LLM) -> None:
    """An answer without text used to have offsets of 0, 10, 20 and 30."""
    async with served(llm) as client:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "logprobs": 0}
        body |= {"ignore_eos": True, "logit_bias": {"2": 100}}
        shown = {**body, "skip_special_tokens": False}
        for fields, text, offsets in [
            (body, "", [0, 0, 0, 0]),
            (shown, "<|im_end|>" * 4, [0, 10, 20, 30]),
            ({**body, "echo": True, "prompt": "One<|im_end|>"}, "One<|im_end|>", [0, 3, 13, 13, 13, 13]),
        ]:
            (choice,) = (await client.post("/v1/completions", json=fields)).json()["choices"]
            assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


@pytest.mark.parametrize("stream", [False, True])
async def test_many_log_probabilities_are_not_written_in_the_event_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """64 answers of 512 tokens with 20 each used to block it for 13 s."""
    writers: list[int] = []

    def noting(function: Any) -> Any:
        def write(*arguments: Any) -> Any:
            writers.append(threading.get_ident())
            return function(*arguments)

        return write

    monkeypatch.setattr(chat_completions, "encode_chat_logprobs", noting(encode_chat_logprobs))
    monkeypatch.setattr(completions, "encode_completion_logprobs", noting(encode_completion_logprobs))
    async with served(llm) as client:
        body = {"max_tokens": 20, "ignore_eos": True, "n": 2, "seed": 1}
        chat = {**body, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}
        for answer in (await client.post("/v1/chat/completions", json=chat)).json()["choices"]:
            assert [len(token["top_logprobs"]) for token in answer["logprobs"]["content"]] == [20] * 20
        assert len(writers) == 2
        prompt = "one two three " * 6
        text = {**body, "prompt": prompt, "echo": True, "logprobs": 20, "stream": stream}
        response = await client.post("/v1/completions", json=text)
        assert response.status_code == 200
        assert len(writers) > 2
        assert stream or threading.get_ident() not in writers  # single tokens need not go to the thread
