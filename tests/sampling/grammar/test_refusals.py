"""Grammars that nothing satisfies or that cost too much are refused; what exceeds its limits fails its request alone."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from radixkv import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from radixkv.errors import StructuredOutputError
from radixkv.prompts import Prompt
from radixkv.sampling.grammar import compiler
from radixkv.sampling.grammar.state import GrammarState

# Its cost shows only once the string has begun.
COSTLY = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "a?" * 4000 + "a" * 100}},
    "required": ["a"],
}
# Likewise that of a pattern together with a length, and of a name.
COSTLY_LENGTH = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": r"^\p{L}+b?$", "maxLength": 40}},
    "required": ["a"],
}
COSTLY_NAMES = {
    "type": "object",
    "properties": {
        "a": {"type": "object", "patternProperties": {"a?" * 2000 + "a" * 100: {}}, "additionalProperties": False}
    },
    "required": ["a"],
}


class Person(BaseModel):
    name: str


def test_a_grammar_whose_lexer_explodes_is_refused(llm: LLM) -> None:
    """With eight such requests, each mask used to take up to 920 ms, for all others too, until the budget was used up."""
    rules = [f"r{i}: /[^{chr(97 + i % 26)}]*{i}*/" for i in range(300)]
    grammar = "\n".join(["start: (" + " | ".join(f"r{i}" for i in range(300)) + ")*", *rules])
    with pytest.raises(ValueError, match="its regular expressions take too much work"):
        llm.engine.grammars.compile(StructuredOutputsParams(grammar=grammar))
    properties = {f"name{i}": {"type": ["string", "integer", "null"], "maxLength": 200} for i in range(60)}
    llm.engine.grammars.compile(StructuredOutputsParams(json={"type": "object", "properties": properties}))


def test_an_object_may_have_as_many_optional_properties_as_a_schema(llm: LLM) -> None:
    """From 499 on, the answer failed where the object began."""
    schema = {"properties": {f"name{i}": {"type": "integer"} for i in range(1000)}, "additionalProperties": False}
    state = llm.engine.grammars.compile(StructuredOutputsParams(json={"type": "object", **schema}))
    token_ids = llm.get_tokenizer()('{"name7": 1, "name999": 2}', add_special_tokens=False)["input_ids"]
    assert state.num_before_end(token_ids) >= len(token_ids) - 1  # the last may complete the answer


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "minimum"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": False}, "Unsatisfiable"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "incompatible types"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "'a' is unsatisfiable"),
        ({"json": {"not": {"type": "string"}}}, "#/not: this cannot be enforced"),
        (
            {"json": {"properties": {"a/b": {"type": "array", "items": {"uniqueItems": True}}, "not": {}}}},
            "#/properties/a~1b/items/uniqueItems: this cannot be enforced",
        ),
        ({"json": {"anyOf": [{}, {"type": "string", "format": "iri"}]}}, "#/anyOf/1/format: this 'iri' cannot be"),
        (
            {"json": {"anyOf": [{}, {"patternProperties": {"^a/": {}, r"\/b$": {}}}]}},
            "#/anyOf/1/patternProperties: this cannot be enforced (patternProperty",
        ),
        ({"json": {"properties": {f"{number}": {} for number in range(1001)}}}, "at most 1000 properties"),
        ({"json": {"type": "object", "required": [f"{number}" for number in range(1001)]}}, "at most 1000 properties"),
        # Behind a reference to no usual place, they were not counted, and took seconds to compile.
        (
            {"json": {"$ref": "#/x/y", "x": {"y": {"properties": {f"{number}": {} for number in range(1001)}}}}},
            "at most 1000 properties in all, got 1001",
        ),
        ({"choice": ["x" * 100] * 90}, "at most 8192"),
        ({"json": {"$ref": "#"}}, "json cannot be followed: #: no value of finite length satisfies this"),
        ({"json": {"type": "nonsense"}}, "Invalid type"),
        ({"json": {"type": "string", "format": ["x"]}}, "json cannot be followed: Expected string for 'format'"),
        ({"json": "{"}, "json cannot be read"),
        ({"json": "[]"}, "expected a JSON schema"),
        ({"json": '{"type":"array","items":' * 300 + "{}" + "}" * 300}, "recursion"),
        ({"json": {"type": "string", "pattern": "a?" * 5000}}, "at most 8192"),
        # These used to fail the answer where the string, or the name, of the pattern began.
        ({"json": COSTLY}, "json cannot be followed: its regular expressions take too"),
        ({"json": {"$ref": "#/x/y", "x": {"y": COSTLY}}}, "json cannot be followed: its regular expressions take too"),
        ({"json": COSTLY_LENGTH}, "json cannot be followed: its regular expressions take too"),
        ({"json": COSTLY_NAMES}, "json cannot be followed: its regular expressions take too"),
        (
            {"json": {"patternProperties": {"a?" * 4000: {}}}},
            "json cannot be followed: its regular expressions take too",
        ),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "[^\\x00-\\U0010FFFF]"}, "regex cannot be followed: no answer satisfies it"),
        ({"regex": "a?" * 4000 + "a" * 100}, "its regular expressions take too much work to compile"),
        ({"regex": "a{1000000000}"}, "regex cannot be followed: its regular expressions take too"),
        ({"regex": "a" * 9000}, "at most 8192"),
        ({"grammar": "start: nowhere\n"}, "unknown name"),
        ({"grammar": "nonsense"}, "grammar cannot be followed: "),
        ({"grammar": ""}, "grammar cannot be followed: Empty grammar"),
        ({"grammar": "root ::= nowhere"}, "grammar cannot be read: Rule 'nowhere' not found"),
        ({"grammar": 'rule ::= "a"'}, "No 'root' rule found"),
        # All but the first line of the rule was read as another rule, or as nothing.
        ({"grammar": "root ::= "}, "grammar cannot be followed: only the empty answer satisfies it"),
        ({"grammar": 'start: ""'}, "grammar cannot be followed: only the empty answer satisfies it"),
        ({"regex": ""}, "regex cannot be followed: only the empty answer satisfies it"),
        # These failed the answer where the rule, or the regular expression, began.
        ({"grammar": f'start: /[c-f]+/ "b" deep\ndeep: "x" | /{"a?" * 3000 + "a" * 100}/\n'}, "take too much work"),
        ({"grammar": 'start: /[c-f]+/ "b" /x/ DEEP\nDEEP: A~0..3000 "a"~100\nA: "a"\n'}, "take too much work"),
        ({"grammar": "start: start\n"}, "grammar cannot be followed: no answer satisfies it"),
        ({"json": Person}, "Person'>; Person.model_json_schema() is one"),
        ({"json": {"properties": {"a": Person}}}, "json cannot be read: expected a JSON schema"),
        ({"structural_tag": {"triggers": {1}}}, "structural_tag cannot be read: expected a JSON schema"),
        ({"structural_tag": {"triggers": ["<"]}}, "expected an object with 'triggers' and 'structures'"),
        ({"structural_tag": {"triggers": [""], "structures": [{}]}}, "list of non-empty strings"),
        ({"structural_tag": {"triggers": ["<"], "structures": []}}, "at least one element"),
        ({"structural_tag": {"triggers": ["<"], "structures": [{"begin": "<"}]}}, "'begin', 'schema' and 'end'"),
        (
            {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "<", "schema": {"not": {}}, "end": ""}]}},
            "#/not: this cannot be enforced",
        ),
        (
            {
                "structural_tag": {
                    "triggers": ["<"],
                    "structures": [{"begin": "<", "schema": {"format": {}}, "end": ""}],
                }
            },
            "Expected string for 'format'",
        ),
        (
            {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "<", "schema": COSTLY, "end": ""}]}},
            "structural_tag cannot be followed: its regular expressions take too",
        ),
        ({"choice": []}, "choice must be"),
        ({"choice": "yes"}, "choice must be"),
        ({"choice": ["yes", ""]}, "choice must be"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({}, "got none"),
    ],
)
def test_unsatisfiable_and_malformed_specifications_are_refused(llm: LLM, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs.*{re.escape(message)}"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(**spec)), use_tqdm=False)
    llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("beams", [False, True])
def test_a_grammar_that_exceeds_its_limits_fails_its_request_alone(
    default_llm: LLM, monkeypatch: pytest.MonkeyPatch, beams: bool
) -> None:
    monkeypatch.setattr(compiler, "_MAX_ITEMS_PER_TOKEN", 150)
    # So ambiguous that every letter multiplies the parses of the letters before.
    hostile = StructuredOutputsParams(grammar=f'start: start start | "{"a" if beams else "b"}"\n')
    engine = default_llm.engine
    other = engine.request_factory.make("other", Prompt([5, 6, 7]), SamplingParams(max_tokens=20, ignore_eos=True))
    failing = engine.request_factory.make(
        "failing",
        Prompt([5, 6, 8]),
        BeamSearchParams(2, 200, structured_outputs=hostile)
        if beams
        else SamplingParams(max_tokens=200, min_tokens=200, structured_outputs=hostile),
    )
    engine.add(other)
    engine.add(failing)
    while engine.has_unfinished_requests:
        engine.step()
    assert isinstance(failing.failure, StructuredOutputError)
    assert "Too many items" in str(failing.failure)
    assert "<" not in str(failing.failure)
    assert other.failure is None
    assert len(other.sequences[0].output_token_ids) == 20


def test_the_prompt_that_failed_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_MAX_ITEMS_PER_TOKEN", 150)
    hostile = StructuredOutputsParams(grammar='start: start start | "b"\n')
    good, bad = SamplingParams(max_tokens=2), SamplingParams(max_tokens=200, min_tokens=200, structured_outputs=hostile)
    with pytest.raises(StructuredOutputError) as failure:
        llm.generate(["One", "Two", "Three"], [good, bad, good], use_tqdm=False)
    assert failure.value.__notes__ == ["of 3 prompts, prompts[1]"]


@pytest.mark.parametrize("explore", ["likely_tokens", "num_before_end", "fill_bitmask"])
def test_a_grammar_does_not_meet_its_limits_earlier_because_drafts_were_walked(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, explore: str
) -> None:
    """They used to be walked in the request's own parser, and what was too much there failed the request."""
    monkeypatch.setattr(compiler, "_MAX_ITEMS_PER_TOKEN", 150)
    hostile = StructuredOutputsParams(grammar='start: start start | "b"\n')
    (letter,) = llm.get_tokenizer()("b", add_special_tokens=False).input_ids
    vocab_size = llm.engine.loaded.vocab_size
    lengths = []
    for explores in (False, True):
        state = llm.engine.grammars.compile(hostile)
        lengths.append(0)
        while state.failure is None:
            state.fill_bitmask(np.full((1, -(-vocab_size // 32)), -1, dtype=np.int32), 0)
            if explores and explore == "likely_tokens":
                state.likely_tokens(letter, {letter: [letter]}, 8)
            elif explores and explore == "num_before_end":
                state.num_before_end([letter] * 8)
            elif explores:
                state.fill_bitmask(np.full((9, -(-vocab_size // 32)), -1, dtype=np.int32), 0, [letter] * 8)
            state.advance(letter)
            lengths[-1] += 1
    assert lengths[0] > 8
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("step", ["prepare", "compile"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Which error was raised used to depend on what needed the package first."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = compiler.GrammarCompiler(llm.engine.loaded)
    monkeypatch.setattr(llm.engine, "grammars", grammars)
    with pytest.raises(
        ImportError, match=r"structured_outputs: llguidance is not installed: pip install 'radixkv\[serv"
    ):
        grammars.prepare() if step == "prepare" else grammars.compile(StructuredOutputsParams(regex="[a-z]"))


def test_a_request_fails_though_only_the_first_of_its_samples_does(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spec = llm.engine, StructuredOutputsParams(regex="[0-9]{30}")
    options = SamplingParams(n=2, seed=1, max_tokens=20, structured_outputs=spec)
    request = engine.request_factory.make("a", Prompt([5, 6, 7]), options)
    engine.add(request)
    while len(request.sequences) < 2:
        engine.step()
    assert request.sequences[0].sampling is not None
    failing, failure = request.sequences[0].sampling.grammar, StructuredOutputError("too many items")
    monkeypatch.setattr(GrammarState, "failure", property(lambda state: failure if state is failing else None))
    engine.step()
    assert request.failure is failure
    assert not engine.has_unfinished_requests
