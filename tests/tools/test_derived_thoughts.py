"""Tags of reasoning that are derived from chat templates of unknown families."""

from __future__ import annotations

import json

import pytest
from support.answer_forms import CALLS, Grammar, functions, options, read
from support.chat_templates import TEMPLATES, chatml, make_tokenizer, written_calls
from tokenizers import AddedToken

from radixkv.tools.chat_format import ChatFormat
from radixkv.tools.reasoning import THINK, ReasoningTags

_WRITTEN = "<think>\n{{ message.reasoning_content }}\n</think>\n"


def thinking(written: str, *, otherwise: str = "", only_beside: str = "message.reasoning_content") -> str:
    """A template that writes thoughts like this.

    Args:
        written: with ``THOUGHT`` in it.
        otherwise: what it writes in an assistant's message without thoughts.
        only_beside: the condition under which it writes thoughts.
    """
    template = chatml("", written_calls("<call>{{ call.function | tojson }}</call>"))
    assert _WRITTEN in template
    written = written.replace("THOUGHT", "{{ message.reasoning_content }}")
    other = f"{{% elif message.role == 'assistant' %}}{otherwise}" if otherwise else ""
    return template.replace(_WRITTEN, written + other).replace("if message.reasoning_content", f"if {only_beside}")


# In the manner of Seed-OSS', Gemma 4's, MiniMax-M3's and Hy3's templates.
WRITTEN = {
    "tags": (thinking("<seed:think>THOUGHT</seed:think>\n"), ReasoningTags("<seed:think>", "</seed:think>")),
    "beside-calls": (
        thinking(
            "<|channel>thought\nTHOUGHT\n<channel|>", only_beside="message.reasoning_content and message.tool_calls"
        ),
        ReasoningTags("<|channel>thought", "<channel|>"),
    ),
    "end-alone": (
        thinking("<mm:think>THOUGHT</mm:think>", otherwise="</mm:think>"),
        ReasoningTags("<mm:think>", "</mm:think>"),
    ),
    "empty": (
        thinking("<think:open>THOUGHT</think:open>", otherwise="<think:open></think:open>"),
        ReasoningTags("<think:open>", "</think:open>"),
    ),
    "known": (thinking("<think>\nTHOUGHT\n</think>\n"), THINK),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("special", [False, True])
def test_thoughts_are_read_as_the_template_writes_them(name: str, special: bool) -> None:
    template, tags = WRITTEN[name]
    tokenizer = make_tokenizer(template)
    tokens = [tags.open.removesuffix("thought"), tags.close]
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    form = ChatFormat.of(tokenizer)
    assert form.reasoning == tags
    prompt = str(tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False))
    answer_form = form.answer_form(prompt, options("required"))
    assert answer_form is not None
    # Special tokens are left out of a text, unless parts of the answer are recognised by them.
    assert all(answer_form.format.added_tokens[token] in answer_form.special_markers for token in tokens) == special
    grammar = Grammar(answer_form, tokenizer)
    calls = form.calls.write_calls(CALLS)
    for text, thought in (
        (f"{tags.open}\nWhy < not?\n{tags.close}\n{calls}", "Why < not?"),
        (f"{tags.close}\n{calls}", None),
        (calls, None),
    ):
        assert grammar.accepts(text)
        for pieces in ([text], text):
            answer = read(answer_form, pieces)
            assert (answer.reasoning, answer.text, functions(answer)) == (thought, "", CALLS)


@pytest.mark.parametrize("name", ["end-alone", "empty"])
def test_where_a_prompt_ends_an_empty_thought_the_answer_has_none(name: str) -> None:
    template, tags = WRITTEN[name]
    form = ChatFormat.of(make_tokenizer(template)).answer_form(f"assistant\n{tags.open}{tags.close}", None)
    assert form is not None
    assert not form.may_reason
    assert read(form, "Yes.").text == "Yes."


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATES["json"],
        thinking("THOUGHT\n[BEGIN FINAL RESPONSE]\n"),
        thinking("Thought: THOUGHT\n</thought>"),
        thinking("<thought>THOUGHT\nAnswer: "),
        # In the manner of Kimi K3's.
        thinking(
            "<|open|>think<|sep|>THOUGHT<|close|>think<|sep|><|open|>text<|sep|>", otherwise="<|open|>text<|sep|>"
        ),
        thinking(
            "<|open|>think<|sep|>THOUGHT<|close|>think<|sep|><|open|>text<|sep|>",
            otherwise="<|open|>think<|sep|><|close|>think<|sep|><|open|>text<|sep|>",
        ),
        "{% for message in messages %}{{ raise_exception('never') }}{% endfor %}",
    ],
    ids=["none", "no-tag-before", "words-before", "words-after", "words-between-tags", "two-tags", "refused"],
)
def test_what_is_not_between_tags_is_no_thought(template: str) -> None:
    assert ChatFormat.of(make_tokenizer(template)).reasoning is None


def test_gpt_oss_marks_thoughts_itself() -> None:
    assert ChatFormat.of(make_tokenizer(TEMPLATES["harmony"])).reasoning is None


def test_a_call_within_a_thought_is_none() -> None:
    template, tags = WRITTEN["tags"]
    form = ChatFormat.of(make_tokenizer(template)).answer_form("", options())
    assert form is not None
    call = f"<call>{json.dumps({'name': 'now', 'arguments': {}})}</call>"
    answer = read(form, f"{tags.open}{call}{tags.close}Yes.")
    assert (answer.reasoning, answer.text, answer.tool_calls) == (call, "Yes.", [])
