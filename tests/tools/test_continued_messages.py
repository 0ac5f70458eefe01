"""Answers that go on with a message of the assistant that has begun."""

from __future__ import annotations

from typing import Any

import pytest
from support.answer_forms import NOW, Grammar, functions, options, read
from support.chat_templates import TEMPLATES, make_tokenizer, speaker

from radixkv import SamplingParams, StructuredOutputsParams
from radixkv.tools.chat_format import AnswerForm, ChatFormat
from radixkv.tools.definitions import ToolOptions

REST = "dark red."
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Well.{NEXT}"


def form_of(name: str, continued: str, tools: ToolOptions | None = None) -> AnswerForm:
    form = ChatFormat.of(make_tokenizer(TEMPLATES[name])).answer_form("", tools, continued=continued)
    assert form is not None
    return form


@pytest.mark.parametrize(
    ("choice", "allowed", "forbidden"),
    [
        ("none", [REST], [f"{NEXT}{CALL}"]),
        ("auto", [REST, f"{NEXT}{CALL}", f"{REST}{NEXT}{THOUGHT}{CALL}"], [f"{NEXT}{CALL.replace('now', 'then')}"]),
        ("required", [f"{NEXT}{CALL}", f"{NEXT}{THOUGHT}{CALL}"], [REST, CALL]),
    ],
)
def test_a_message_of_harmony_s_ends_before_the_next_begins(
    choice: str, allowed: list[str], forbidden: list[str]
) -> None:
    """The grammar forced the header of a message into the one that was continued."""
    form = form_of("harmony", "The colour is ", options(choice, tools=[NOW]))
    grammar = Grammar(form, make_tokenizer(TEMPLATES["harmony"]))
    assert [grammar.accepts(text) for text in allowed] == [True] * len(allowed)
    assert [grammar.accepts(text) for text in forbidden] == [False] * len(forbidden)
    for text in allowed:
        answer = read(form, text)
        assert answer.text == (REST if text.startswith(REST) else "")
        assert functions(answer) == ([("now", {})] if CALL in text else [])


def test_text_that_continues_a_message_of_harmony_s_is_read_as_it_is() -> None:
    form = form_of("harmony", "My", None)
    assert read(form, " assistant says: ").text == " assistant says: "
    assert read(form, "assistants").text == "assistants"


@pytest.mark.parametrize(
    ("continued", "state"),
    [
        ("<think>\nI should", "open"),
        ("<think>", "open"),
        ("<think>\nYes.\n</think>\n\nIt", "over"),
        ("It", "over"),
    ],
)
def test_the_text_that_is_continued_says_whether_it_is_a_thought(continued: str, state: str) -> None:
    """It was never one: what followed in the thought was the answer, and constrained as such."""
    form = form_of("think_switch", continued)
    assert form.reasoning == state
    answer = read(form, " go.\n</think>\n\nYes.")
    assert (answer.reasoning, answer.text) == (
        (" go.", "Yes.") if state == "open" else (None, " go.\n</think>\n\nYes.")
    )


@pytest.mark.parametrize(
    ("name", "content", "before"),
    [
        ("harmony", "The colour is ", ""),
        ("think_switch", "<think>\nI say", "</think>"),
        ("hermes", "The colour is ", ""),
    ],
)
def test_the_rest_of_a_message_is_what_structured_outputs_ask_for(name: str, content: str, before: str) -> None:
    llm = speaker(TEMPLATES[name])
    bias = {llm.get_tokenizer().convert_tokens_to_ids(before): 100.0} if before else None
    params = SamplingParams(
        seed=1, max_tokens=60, logit_bias=bias, structured_outputs=StructuredOutputsParams(choice=["red", "green"])
    )
    messages: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    (output,) = llm.chat(messages, params, False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith(content)
    (part,) = output.outputs
    text = part.text if part.answer is None else part.answer.text
    assert text in ("red", "green")
