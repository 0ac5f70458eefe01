"""Log-probabilities in `/v1/responses`: of the tokens of each message's text, whole and in events."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from support.chat_templates import TEMPLATES, make_tokenizer
from support.in_process_server import serve
from support.named_events import named_events
from support.response_requests import BODY, EVENT, create

from radixkv import LLM
from radixkv.outputs import Logprob
from radixkv.server import response_size
from radixkv.server.logprobs import TextLength
from radixkv.server.responses.store import ResponseStore
from radixkv.server.text_logprobs import TextLogprobs
from radixkv.serving.answer_reader import PieceReader
from radixkv.tools.chat_format import ChatFormat
from radixkv.tools.pieces import ReadPiece, ReasoningPiece, TextPiece, ToolCallBegin

INCLUDED: dict[str, Any] = {"include": ["message.output_text.logprobs"]}


def test_log_probabilities_are_those_of_the_chat(llm: LLM) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        messages = [{"role": "user", "content": BODY["input"]}]
        fields = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        chat = await client.post("/v1/chat/completions", json={"messages": messages, **fields})
        expected = chat.json()["choices"][0]["logprobs"]["content"]
        whole = await create(client, **INCLUDED, top_logprobs=2)
        (part,) = whole["output"][0]["content"]
        assert part["logprobs"] == expected
        assert (len(expected), whole["top_logprobs"]) == (12, 2)
        assert (await client.get(f"/v1/responses/{whole['id']}")).json() == whole

        answer = await client.post("/v1/responses", json={**BODY, **INCLUDED, "top_logprobs": 2, "stream": True})
        events = named_events(answer.text)
        for event in events:
            EVENT.validate_python(event)
        by_type = {event["type"].removeprefix("response."): event for event in events}
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == expected
        assert by_type["content_part.added"]["part"]["logprobs"] == []
        for part in (
            by_type["output_text.done"],
            by_type["content_part.done"]["part"],
            by_type["output_item.done"]["item"]["content"][0],
            by_type["incomplete"]["response"]["output"][0]["content"][0],
        ):
            assert part["logprobs"] == expected

        # The chosen ones alone, and none where they are not included.
        alone = (await create(client, **INCLUDED))["output"][0]["content"][0]["logprobs"]
        assert alone == [{**entry, "top_logprobs": []} for entry in expected]
        without = await create(client, top_logprobs=2)
        assert (without["output"][0]["content"][0]["logprobs"], without["top_logprobs"]) == ([], 2)
        # What was returned can be named, listed, and sent again.
        item = whole["output"][0]
        for sent in ({"type": "item_reference", "id": item["id"]}, item):
            again = await create(client, input=[sent, {"role": "user", "content": "And?"}])
            listed = (await client.get(f"/v1/responses/{again['id']}/input_items")).json()["data"]
            assert listed[1]["content"] == [{"type": "output_text", "text": part["text"], "annotations": []}]

    serve(llm, scenario)


def test_what_continues_a_response_does_not_count_for_its_log_probabilities(llm: LLM) -> None:
    """It has none of them, so that a conversation could not be continued long before it took as much."""

    async def scenario(client: httpx.AsyncClient) -> None:
        first = await create(client, **INCLUDED, top_logprobs=20)
        second = await create(client, **INCLUDED, top_logprobs=20, previous_response_id=first["id"])
        assert len((await client.get(f"/v1/responses/{second['id']}")).content) > 15_000
        assert (await client.get(f"/v1/responses/{first['id']}")).status_code == 404  # displaced
        assert await create(client, previous_response_id=second["id"])

    serve(llm, scenario, responses=ResponseStore(max_bytes=36_000))


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
    logprobs = [{index: Logprob(-1.0, 1, text)} for index, text in enumerate(answer)]
    found = TextLogprobs(TextLength(texts)).read(range(len(answer)), logprobs, read)
    assert [[index for index, _ in tokens] for tokens in found] == [[], [2, 3], []]


@pytest.mark.parametrize("stream", [False, True])
def test_more_than_a_response_may_hold_are_refused(llm: LLM, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a stream, the last event of which holds them all."""
    monkeypatch.setattr(response_size, "MAX_RETURNED_LOGPROBS", 35)

    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/responses", json={**BODY, **INCLUDED, "top_logprobs": 2, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")

    serve(llm, scenario)


def test_tokens_of_reasoning_and_markers_are_left_out_however_the_answer_was_cut() -> None:
    end = "<|end|><|start|>assistant<|channel|>"
    answer = [
        ("<|channel|>analysis<|message|>", False),
        ("Hm", False),
        (f"{end}commentary<|message|>", False),
        ("Wait", True),
        (", ü", True),
        (f"{end}final<|message|>", False),
        ("Y", True),
        ("es", True),
    ]
    form = ChatFormat.of(make_tokenizer(TEMPLATES["harmony"])).answer_form("", None)
    texts = Mock(bytes_of=lambda index: answer[index][0].encode(), is_left_out=lambda index: False)
    logprobs = [{index: Logprob(-1.0, 1, text)} for index, (text, _) in enumerate(answer)]
    for chosen in range(1 << (len(answer) - 1)):
        cuts = [0, *(place for place in range(1, len(answer)) if chosen >> (place - 1) & 1), len(answer)]
        for is_late in (False, True):
            reader, found = PieceReader(form), TextLogprobs(TextLength(texts))
            said = ""
            of_text: list[int] = []
            parts = [(list(range(*cut)), "".join(text for text, _ in answer[slice(*cut)])) for cut in pairwise(cuts)]
            if is_late:
                ids, shown = zip(*parts, strict=True)
                parts = list(zip([*ids, []], ["", *shown], strict=True))
            for number, (token_ids, text) in enumerate(parts, start=1):
                read = reader.read(0, text, number == len(parts))
                of_pieces = found.read(token_ids, [logprobs[index] for index in token_ids], read)
                for (piece, _), tokens in zip(read, of_pieces, strict=True):
                    assert isinstance(piece, TextPiece) or not tokens
                    said += piece.text if isinstance(piece, TextPiece) else ""
                    of_text += [index for index, _ in tokens]
            assert of_text == [index for index, (_, counts) in enumerate(answer) if counts], cuts
            assert said == "".join(text for text, counts in answer if counts)
