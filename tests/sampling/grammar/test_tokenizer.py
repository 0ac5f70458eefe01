"""Grammars are followed by every tokenizer whose tokens have bytes, whatever it does to a text before it cuts it up."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import TEMPLATES, make_tokenizer, text_interface
from support.example_tools import ADD, WEATHER
from support.in_process_server import served
from support.model_zoo import build
from support.sentencepiece_tokenizer import sentencepiece_tokenizer
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer

from radixkv import LLM, SamplingParams, StructuredOutputsParams
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling.grammar.tokenizer import grammar_tokenizer
from radixkv.server.pauses import prepare_grammars

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Hello world", "w"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def with_spaces_added(by: str) -> Any:
    """A tokenizer that puts a space before a text: a normalizer, a Metaspace by its scheme, or a ByteLevel does."""
    if by == "ByteLevel":
        tokenizer = make_tokenizer(TEMPLATES["json"])
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel()])
        return tokenizer
    tokenizer = sentencepiece_tokenizer()
    if by == "Prepend":
        tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("▁")
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    elif by != "Sequence":
        tokenizer.backend_tokenizer.normalizer = None
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=by, split=False)
    return tokenizer


@pytest.fixture(scope="module", params=["Sequence", "Prepend", "first", "always", "ByteLevel"])
def spacing_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    tokenizer = with_spaces_added(request.param)
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    model = build("llama", {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, **ids})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    llm = LLM(str(folder), dtype="float32", num_blocks=300)
    yield llm
    llm.engine.cache.check()


def is_person(text: str) -> bool:
    person = json.loads(text)
    return person["name"] in ("Hello world", "w") and 0 <= person["age"] <= 9


@pytest.mark.parametrize(
    ("spec", "holds"),
    [
        ({"json": PERSON}, is_person),
        ({"choice": ["Hello world", "wörld", " world"]}, lambda text: text in ("Hello world", "wörld", " world")),
        ({"choice": ["world"]}, lambda text: text == "world"),
        ({"regex": r"He(llo)?-[0-9]{2}!"}, lambda text: re.fullmatch(r"He(llo)?-[0-9]{2}!", text)),
        ({"grammar": 'start: "world" ("+" | "-") "Hello"\n'}, lambda text: re.fullmatch("world[+-]Hello", text)),
        ({"grammar": 'root ::= "(" ("red" | "world") ")"\n'}, lambda text: text in ("(red)", "(world)")),
    ],
)
def test_answers_satisfy_their_grammar_where_the_tokenizer_adds_spaces(
    spacing_llm: LLM, spec: dict[str, Any], holds: Any
) -> None:
    """Forced text used to be tokenized with a space before it, which the grammar does not allow there: requests failed."""
    params = SamplingParams(max_tokens=150, seed=1, n=4, structured_outputs=StructuredOutputsParams(**spec))
    (output,) = spacing_llm.generate("Hello", params, use_tqdm=False)
    assert [sample.finish_reason for sample in output.outputs] == ["stop"] * 4
    assert all(holds(sample.text) for sample in output.outputs)


def test_any_object_may_be_the_answer_where_the_tokenizer_adds_spaces(spacing_llm: LLM) -> None:
    spec = StructuredOutputsParams(json_object=True)
    (output,) = spacing_llm.generate(
        "Hello", SamplingParams(max_tokens=20, seed=1, structured_outputs=spec), use_tqdm=False
    )
    assert output.outputs[0].text.lstrip(" ").startswith("{")


def test_required_tools_are_called_where_the_tokenizer_adds_spaces(spacing_llm: LLM) -> None:
    params = SamplingParams(max_tokens=300, seed=1)
    question = [{"role": "user", "content": "Hello"}]
    options: Any = {"tools": [WEATHER, ADD], "parallel_tool_calls": False, "tool_choice": "required"}
    (output,) = spacing_llm.chat(question, params, False, **options)
    (answer,) = [part.answer for part in output.outputs]
    assert answer is not None
    (call,) = answer.tool_calls
    required = {"get_weather": {"city", "unit"}, "add": {"a", "b"}}
    assert required[call.name] <= set(json.loads(call.arguments))


async def test_a_response_format_is_kept_to_where_the_tokenizer_adds_spaces(spacing_llm: LLM) -> None:
    async with served(spacing_llm) as client:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "response_format": form,
            "max_tokens": 150,
            "seed": 1,
        }
        response = await client.post("/v1/chat/completions", json={"model": "model", **body})
        assert response.status_code == 200, response.text
        assert is_person(response.json()["choices"][0]["message"]["content"])


def test_forced_text_has_the_tokens_that_it_has_within_a_text() -> None:
    """Not those of any other spelling of its bytes, and the tokenizer that was given stays as it is."""
    tokenizer = sentencepiece_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    for_grammars = grammar_tokenizer(tokenizer, len(tokenizer), [2])
    for text, tokens in [
        ("world Hello", ["w", "or", "ld", "▁Hello"]),
        (" world", ["▁world"]),
        ("ö", ["<0xC3>", "<0xB6>"]),
    ]:
        assert tokenizer.convert_ids_to_tokens(for_grammars.tokenize_str(text)) == tokens
    assert tokenizer.backend_tokenizer.to_str() == before


def compose(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


def lowercase(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def strip(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken("[a]", special=False, lstrip=True, rstrip=True)])


def add_marker(tokenizer: Any) -> None:
    tokenizer.add_tokens([AddedToken("<mark>", special=False, normalized=False)])


@pytest.mark.parametrize(
    ("change", "text"),
    [(compose, "cafe\u0301"), (lowercase, "Say NO"), (strip, "x  [a]  y"), (add_marker, "a <mark> b")],
)
def test_forced_text_is_spelled_where_the_tokenizer_makes_other_text_of_it(change: Any, text: str) -> None:
    """Its tokens used to be those of the other text, and requests failed; so with names of markers that are not special."""
    loaded = text_interface(TEMPLATES["json"])
    change(loaded.tokenizer)
    assert answer(dataclasses.replace(loaded, vocab_size=len(loaded.tokenizer)), text) == text


def test_an_added_token_that_is_shown_with_a_space_is_no_text_of_a_grammar() -> None:
    """With a Prepend normalizer, a normalized one is decoded with a space before it; grammars took it for its name."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_tokens([AddedToken("Hello!", special=False, normalized=True)])
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(["w", "Hello!"])) == "w Hello!"
    for_grammars = grammar_tokenizer(tokenizer, len(tokenizer), [2])
    assert tokenizer.decode(for_grammars.tokenize_str("wHello!")) == "wHello!"


def test_forced_text_is_spelled_where_the_model_lacks_a_token_of_it() -> None:
    """A token without logits in the model used to be forced: nothing could be sampled."""
    loaded = text_interface(TEMPLATES["json"])
    loaded.tokenizer.add_tokens([AddedToken("an image", special=False)])
    assert loaded.vocab_size < len(loaded.tokenizer)
    assert answer(loaded, "an image!") == "an image!"


def answer(loaded: Any, choice: str) -> str:
    """What is left when each token is one that must come next."""
    state = GrammarCompiler(loaded).compile(StructuredOutputsParams(choice=[choice]))
    token_ids: list[int] = []
    while forced := state.likely_tokens(0, {}, 1):
        assert forced[0] < loaded.vocab_size
        token_ids += forced
        state.advance(forced[0])
    assert state.failure is None
    text: str = loaded.tokenizer.decode(token_ids)
    return text


def test_what_no_token_spells_is_refused() -> None:
    """Where the model lacks a letter, nothing satisfies the grammar, which is said before anything is generated."""
    loaded = text_interface(TEMPLATES["json"])
    lacking = {"vocab_size": loaded.tokenizer.convert_tokens_to_ids("z"), "eos_token_ids": frozenset([0])}
    loaded = dataclasses.replace(loaded, **lacking)
    assert answer(loaded, "lay") == "lay"
    with pytest.raises(ValueError, match="choice cannot be followed: no answer satisfies it"):
        GrammarCompiler(loaded).compile(StructuredOutputsParams(choice=["zoo"]))


def with_narrow_head(end: str) -> LLM:
    """A model that computes logits of a hundred tokens, none of which has a byte that is not ASCII."""
    tokenizer = make_tokenizer(TEMPLATES["json"])
    model = build("llama", {"vocab_size": len(tokenizer)})
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 100, bias=False)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(end)
    return LLM(model, tokenizer=tokenizer, num_blocks=20)


def test_a_grammar_is_followed_by_tokens_that_a_narrower_output_head_computes() -> None:
    """Where it allowed only others, token 0 was drawn."""
    llm = with_narrow_head("~")

    def answers(regex: str) -> set[str]:
        params = SamplingParams(n=4, seed=1, structured_outputs=StructuredOutputsParams(regex=regex))
        (output,) = llm.generate("Hello", params, use_tqdm=False)
        return {sample.text for sample in output.outputs}

    assert answers("(é|yes)é?") == {"yes"}
    with pytest.raises(ValueError, match="regex cannot be followed: no answer satisfies it"):
        answers("é")


def test_a_grammar_is_refused_where_a_narrower_output_head_cannot_end_an_answer() -> None:
    llm = with_narrow_head("<|im_end|>")
    message = "structured_outputs, or tools .*: expected one of the 100 tokens .* to end an answer, got .* \\[257\\]"
    with pytest.raises(ValueError, match=message):
        llm.engine.grammars.compile(StructuredOutputsParams(regex="yes"))


def test_a_tokenizer_in_python_is_refused_by_its_name_and_before_anything_is_generated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """llguidance said "Only fast tokenizers are supported", of no argument. A server says at its start what will fail."""
    llm = LLM(build("llama", {"vocab_size": 384}), tokenizer=ByT5Tokenizer(), num_blocks=20)
    message = "structured_outputs, or tools .*: expected a tokenizer with a fast backend .*, got ByT5Tokenizer"
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(ValueError, match=f"^{message}"):
        llm.generate("Hello", params, use_tqdm=False)
    prepare_grammars(llm.engine.grammars)
    assert re.search(
        f"^requests with structured output or tools that must be called will fail: {message}", caplog.messages[-1]
    )
    assert llm.generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished
