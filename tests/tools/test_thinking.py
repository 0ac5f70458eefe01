"""Reasoning before the answer: found, streamed apart, and outside of what structured output constrains."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from support.answer_forms import read
from support.chat_templates import TEMPLATES, make_tokenizer, speaker
from support.in_process_server import make_client

from radixkv import LLM, AsyncLLM, Chat, SamplingParams, StructuredOutputsParams
from radixkv.outputs import CompletionOutput
from radixkv.prompts import Prompt
from radixkv.server.chat.events import ChatEvents
from radixkv.server.chat.prefix_keeper import PrefixKeeper
from radixkv.server.chat.request import ChatCompletionRequest
from radixkv.server.generation import ChoiceDelta
from radixkv.server.output.logprobs import TextLength
from radixkv.server.protocol import CompletionTokensDetails, PromptTokensDetails, Usage
from radixkv.server.time_limits import Deadlines, TimeLimits
from radixkv.tools.chat_format import ChatFormat
from radixkv.tools.pieces import ParsedAnswer

QUESTION = [{"role": "user", "content": "Why?"}]


def format_of(name: str) -> ChatFormat:
    return ChatFormat.of(make_tokenizer(TEMPLATES[name]))


def parse(form: ChatFormat, prompt: str, text: str) -> ParsedAnswer:
    """Parsed in every way to cut it in two, and character by character."""
    answer_form = form.answer_form(prompt, None)
    assert answer_form is not None
    whole = read(answer_form, [text])
    for pieces in [*((text[:cut], text[cut:]) for cut in range(len(text))), tuple(text)]:
        assert read(answer_form, pieces) == whole
    return whole


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|im_start|>assistant\n", "<think>\nWell < this.\n</think>\n\nBecause.\n", ("Because.\n", "Well < this.")),
        ("<|im_start|>assistant\n", "\nBecause.", ("\nBecause.", None)),
        ("<|im_start|>assistant\n<think>\n", "Well.</think>Because.", ("Because.", "Well.")),
        ("<|im_start|>assistant\n<think>\n", "I never sto", ("", "I never sto")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Because.", ("Because.", None)),
    ],
)
def test_thoughts_are_apart_from_the_text(prompt: str, text: str, expected: tuple[str, str | None]) -> None:
    answer = parse(format_of("think_switch"), prompt, text)
    assert (answer.text, answer.reasoning) == expected


def test_a_template_without_tags_has_no_thoughts() -> None:
    assert format_of("json").reasoning is None
    assert format_of("json").answer_form("", None) is None
    assert ChatFormat.of(make_tokenizer(TEMPLATES["think_open"]), reasoning="none").reasoning is None
    assert ChatFormat.of(make_tokenizer(TEMPLATES["json"]), "hermes", "mistral").reasoning is not None


@pytest.fixture(scope="module", params=["think_open", "harmony"])
def thinker(request: pytest.FixtureRequest) -> LLM:
    return speaker(TEMPLATES[request.param])


def towards_the_end_of_thinking(llm: LLM) -> dict[int, float]:
    """Of the allowed tokens, a random model then soon takes those that end its thoughts."""
    tokenizer = llm.get_tokenizer()
    biases = {
        "</think>": 100.0,
        "<|end|>": 100.0,
        "f": 50.0,
        "c": 50.0,
    }  # the channels are analysis, commentary and final
    return {tokenizer.convert_tokens_to_ids(token): bias for token, bias in biases.items()}


def test_structured_output_begins_after_the_thinking(thinker: LLM) -> None:
    params = SamplingParams(
        n=4,
        seed=1,
        min_tokens=3,
        max_tokens=200,
        logit_bias=towards_the_end_of_thinking(thinker),
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
    )
    (output,) = thinker.chat(QUESTION, params, False)
    for part in output.outputs:
        assert part.answer is not None
        assert part.answer.text in ("yes", "no")
        assert part.text != part.answer.text
    assert {part.finish_reason for part in output.outputs} == {"stop"}


def test_a_required_call_comes_after_the_thinking(thinker: LLM) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    params = SamplingParams(seed=1, max_tokens=200, logit_bias=towards_the_end_of_thinking(thinker))
    (output,) = thinker.chat(QUESTION, params, False, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    answer = output.outputs[0].answer
    assert answer is not None
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("now", {})]


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_no_effort_turns_thinking_off(fields: dict[str, Any], thinks: bool) -> None:
    request = ChatCompletionRequest.model_validate({"messages": QUESTION, **fields})
    tokenizer = make_tokenizer(TEMPLATES["think_switch"])
    prompt = tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True, **request.template_variables
    )
    assert prompt.endswith("</think>\n\n") != thinks


def test_thoughts_are_streamed_apart(thinker: LLM) -> None:
    body: dict[str, Any] = {
        "messages": [*QUESTION, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}, *QUESTION],
        "max_tokens": 200,
        "seed": 1,
        "logit_bias": {str(token): bias for token, bias in towards_the_end_of_thinking(thinker).items()},
        "structured_outputs": {"choice": ["yes", "no"]},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
    }

    async def main() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with AsyncLLM(thinker) as engine, make_client(engine) as client:
            whole = await client.post("/v1/chat/completions", json=body)
            assert whole.status_code == 200, whole.text
            streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
            return whole.json()["choices"][0]["message"], deltas_of(streamed)

    message, deltas = asyncio.run(main())
    assert message["content"] in ("yes", "no")
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (message["reasoning_content"] or "")
    assert [delta.get("reasoning") for delta in deltas] == [delta.get("reasoning_content") for delta in deltas]
    assert message["reasoning"] == message["reasoning_content"]
    assert not any(delta.get("content") and delta.get("reasoning_content") for delta in deltas)


def test_the_usage_counts_thoughts(thinker: LLM) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 30, "seed": 1, "temperature": 1.0}
    answered = {**body, "max_tokens": 200, "structured_outputs": {"choice": ["yes", "no"]}}
    answered["logit_bias"] = {str(token): bias for token, bias in towards_the_end_of_thinking(thinker).items()}
    stream = {"stream": True, "stream_options": {"include_usage": True}}

    async def main() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        results = []
        async with AsyncLLM(thinker) as engine, make_client(engine) as client:
            for asked in ({**body, "min_tokens": 30}, answered):
                whole = (await client.post("/v1/chat/completions", json=asked)).json()
                streamed = await client.post("/v1/chat/completions", json={**asked, **stream})
                last = json.loads(streamed.text.split("data: ")[-2])
                results.append((whole["choices"][0]["message"]["reasoning"] or "", whole["usage"], last["usage"]))
        return results

    for reasoning, *usages in asyncio.run(main()):
        for usage in usages:
            num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
            assert (num_reasoning > 0) == bool(reasoning)
            assert num_reasoning <= usage["completion_tokens"]


class GenerationOfCharacters:
    """Stands in for a `Generation`: two choices take turns, and each character is a token; some arrive at once."""

    def __init__(self, text: str, at_once: int) -> None:
        self._text = text
        self._at_once = at_once

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=1,
            completion_tokens=0,
            total_tokens=1,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=0, rejected_prediction_tokens=0
            ),
        )

    async def __aiter__(self) -> AsyncGenerator[ChoiceDelta, None]:
        for begin in range(0, len(self._text), self._at_once):
            characters = self._text[begin : begin + self._at_once]
            reason: Any = "stop" if begin + self._at_once >= len(self._text) else None
            for choice in range(2):
                token_ids = [ord(character) for character in characters]
                yield ChoiceDelta(choice, 0, CompletionOutput(choice, characters, token_ids, finish_reason=reason))


@pytest.mark.parametrize("at_once", [1, 2, 5, 13, 100])
@pytest.mark.parametrize("rest", ["", " ", "\n</think>\n\nYes.", "</think>ü"])
def test_thoughts_count_with_the_tokens_whose_text_was_held_back(rest: str, at_once: int) -> None:
    """But those that arrive with them, and follow, do not."""
    thought = "a\n\nä <c\n\n</d"
    generation: Any = GenerationOfCharacters(thought + rest, at_once)
    keeper = PrefixKeeper(Mock(), "", ChatCompletionRequest(messages=[]), [], Prompt([1]))
    form = format_of("think_open").answer_form("<think>\n", None)
    texts = Mock(bytes_of=lambda token_id: chr(token_id).encode(), is_left_out=lambda token_id: False)
    deadlines = Deadlines(Mock(), TimeLimits(), Mock())
    events = ChatEvents(generation, form, keeper, deadlines, lambda: TextLength(texts))
    for choice in asyncio.run(events.collect()):
        assert (ParsedAnswer.of(choice.pieces).reasoning or "").strip() == thought
    # Whitespace is part of a thought that ends with it, and neither that before the end tag nor the tag is.
    assert events.usage.completion_tokens_details.reasoning_tokens == 2 * len(thought + re.split("\n|</", rest)[0])


def test_an_async_chat_ends_with_its_answer(thinker: LLM) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    params = SamplingParams(n=2, seed=1, max_tokens=200, logit_bias=towards_the_end_of_thinking(thinker))
    options: Any = {"tools": [tool], "tool_choice": "required"}
    (expected,) = thinker.chat(QUESTION, params, False, parallel_tool_calls=False, **options)

    async def main() -> dict[int, ParsedAnswer]:
        async with AsyncLLM(thinker) as engine:
            pieces = [piece async for piece in engine.chat(QUESTION, params, parallel_tool_calls=False, **options)]
            return {part.index: part.answer for piece in pieces for part in piece.outputs if part.answer is not None}

    answers = asyncio.run(main())
    for part in expected.outputs:
        assert part.answer is not None
        assert answers[part.index].reasoning == part.answer.reasoning
        assert [call.arguments for call in answers[part.index].tool_calls] == [part.answer.tool_calls[0].arguments]


def deltas_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0]["delta"] for line in lines]


def test_streams_and_chats_have_thoughts_apart(thinker: LLM) -> None:
    params = SamplingParams(
        seed=1,
        min_tokens=3,
        max_tokens=200,
        logit_bias=towards_the_end_of_thinking(thinker),
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
    )
    written, pieces, answer = "", [], None
    for output in thinker.stream(QUESTION, params):
        (part,) = output.outputs
        written += part.text
        pieces += part.pieces or []
        answer = part.answer
    assert answer is not None
    assert answer == ParsedAnswer.of(pieces)
    assert answer.text in ("yes", "no")
    assert written != answer.text  # without the marks of thinking
    chat = Chat(thinker, sampling_params=params)
    text = chat.send("Why?")
    assert chat.answer == answer
    assert text == answer.text
    assert chat.history[-1] == answer.as_message()

    async def stream() -> ParsedAnswer:
        async with AsyncLLM(thinker) as engine:
            return ParsedAnswer.of(
                [piece async for part in engine.chat(QUESTION, params) for piece in part.outputs[0].pieces or []]
            )

    assert asyncio.run(stream()) == answer
