"""Random schemas: what their grammars allow is what they say, with jsonschema as the judge."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from support.chat_templates import text_interface

from radixkv import StructuredOutputsParams
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling.grammar.state import GrammarState
from radixkv.sampling.json_schema.prepare import prepare_schema, with_json_options

# Of each, the names that match it are its own: the compiler takes no others beside each other.
PATTERNS = ["^x-", "^[0-9]+$", "^(?:y|yy)$", "^a{2,3}$", "^-"]
NAMES = ["a", "b", "x-1", "x-2", "12", "3", "y", "yy", "aa", "aaa", "-end", "\u00e9", 'q"', ""]
TEXTS = ["", "a", "ab", "abc", "b1", "\u00e9\u00e9", 'q"\\', "a\nb", "12", "\U0001f600", "\x7f", "\x01"]
JUNK: list[Any] = [None, True, 0, 1, -3, 6, 0.5, 1.25, *TEXTS, [], [1], [1, 1], ["a", "b"], {}, {"a": 1}, {"x-1": "a"}]
ENUMS: list[list[Any]] = [["a", "b"], ["ab"], [1, 2, 3], [True], ["a", 1, None], [[1, "a"], {"a": 1}]]
Schema = dict[str, Any]


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["integer", "number"]))
    step = draw(st.sampled_from([2, 3, 7] if kind == "integer" else [0.5, 0.25, 3]))
    least = draw(st.integers(-12, 12))
    bounds = {"minimum": least, "maximum": least + 8, "exclusiveMinimum": least - 1, "exclusiveMaximum": least + 9}
    kept = draw(st.sets(st.sampled_from([*bounds, "multipleOf"])))
    return {"type": kind, **{key: value for key, value in {**bounds, "multipleOf": step}.items() if key in kept}}


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(0, 2))
    lengths = {"minLength": least, "maxLength": draw(st.integers(least, 4))}
    patterns = [{}, lengths, *({"pattern": pattern} for pattern in (r"^a?[a-c1]{1,2}$", "b", "^[^1]*$"))]
    return {"type": "string", **draw(st.sampled_from(patterns))}


SCALARS = st.one_of(
    numbers(),
    strings(),
    st.sampled_from(ENUMS).map(lambda values: {"enum": values}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"const": "a"}, {}]),
)


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    lengths = {"minItems": least, "maxItems": draw(st.integers(least, 3))} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        return {"type": "array", "items": draw(items), **lengths}
    values = draw(
        st.sampled_from([{"type": "boolean"}, {"enum": ["a", "b", "ab"]}, {"type": "integer", "enum": [1, 2]}])
    )
    return {"type": "array", "items": values, "uniqueItems": True, **lengths}


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
    schema: Schema = {"type": "object"}
    if properties or draw(st.booleans()):
        schema["properties"] = properties
        schema["required"] = draw(st.lists(st.sampled_from(NAMES[:6]), unique=True, max_size=2))
    if draw(st.booleans()):
        schema["patternProperties"] = draw(st.dictionaries(st.sampled_from(PATTERNS), values, max_size=2))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.just(False) | values)
    if len(schema) == 1 + ("additionalProperties" in schema) and draw(st.booleans()):
        schema["propertyNames"] = draw(st.sampled_from([{"enum": ["b", "a"]}, {"pattern": "^a"}, {"minLength": 2}]))
    return schema


@st.composite
def combinations(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    """Several schemas that must all hold, of one kind where that is likelier to be possible."""
    kinds = [numbers(), strings(), arrays(inner), objects(inner), objects(inner), inner]
    kind = draw(st.sampled_from(kinds))
    return {"allOf": draw(st.lists(kind, min_size=1, max_size=3))}


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        arrays(inner)
        | objects(inner)
        | combinations(inner)
        | st.lists(inner, min_size=1, max_size=2).map(lambda of: {"anyOf": of})
    ),
    max_leaves=6,
)


@st.composite
def wholes(draw: st.DrawFn) -> Schema:
    """Schemas, some of them with references: to alternatives that exclude each other, or to what must hold, too."""
    first = draw(SCHEMAS)
    match draw(st.integers(0, 4)):
        case 0:
            kinds = {"type": "object", "properties": {"kind": {"const": "p"}, "a": first}, "required": ["kind"]}
            others = {
                "type": "object",
                "properties": {"kind": {"enum": ["q", "r"]}, "b": draw(SCHEMAS)},
                "required": ["kind"],
            }
            alternatives: Schema = {"p": kinds, "q": others, "text": draw(strings())}
        case 1:
            alternatives = {"object": draw(objects(SCHEMAS)), "array": draw(arrays(SCHEMAS)), "number": draw(numbers())}
        case 2:
            parts = [{"$ref": "#/$defs/base"}, draw(objects(SCHEMAS))]
            return {"allOf": parts, "$defs": {"base": draw(objects(SCHEMAS))}}
        case _:
            return first
    schema = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in alternatives]}
    return {"type": "object", "properties": {"one": schema}, "required": ["one"], "$defs": alternatives}


@st.composite
def answers(draw: st.DrawFn, schema: Any, whole: Schema) -> Any:
    """Values that a schema allows, or nearly."""
    if not isinstance(schema, dict) or not schema or draw(st.integers(0, 11)) == 0:
        return draw(st.sampled_from(JUNK))
    if of_objects := all_objects(schema, whole):
        return draw(answers_of_objects(of_objects, whole))
    schema = target(schema, whole)
    match schema:
        case {"allOf": parts}:
            return draw(answers(draw(st.sampled_from(parts)), whole))
        case {"oneOf": alternatives} | {"anyOf": alternatives}:
            return draw(answers(draw(st.sampled_from(alternatives)), whole))
        case {"enum": values}:
            return draw(st.sampled_from(values))
        case {"const": value}:
            return value
        case {"type": "integer" | "number" as kind}:
            fractions = [0, 0, 0.5, 0.25] if kind == "number" else [0]
            whole_part = schema.get("minimum", 0) + draw(st.integers(-1, 9))
            fraction = draw(st.sampled_from(fractions))
            return whole_part + fraction if fraction else whole_part
        case {"type": "boolean"}:
            return draw(st.booleans())
        case {"type": "null"}:
            return None
        case {"type": "array"}:
            count = schema.get("minItems", 0) + draw(st.integers(0, 2))
            return [draw(answers(schema["items"], whole)) for _ in range(count)]
    return draw(st.sampled_from(TEXTS))


@st.composite
def answers_of_objects(draw: st.DrawFn, parts: list[Schema], whole: Schema) -> Any:
    """Objects that several schemas allow together, or nearly."""
    described = [name for part in parts for name in part.get("properties", ())]
    names = {name for part in parts for name in part.get("required", ()) if draw(st.integers(0, 9))}
    names |= draw(st.sets(st.sampled_from([*described, *NAMES]), max_size=3))
    ordered = sorted(names, key=lambda name: (place(parts, name), name))
    return {name: draw(answers({"allOf": [value_schema(part, name) for part in parts]}, whole)) for name in ordered}


def target(schema: Any, whole: Schema) -> Any:
    """The schema, or what it refers to."""
    if isinstance(schema, dict) and "$ref" in schema:
        return whole["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema


def all_objects(schema: Any, whole: Schema) -> list[Schema]:
    """The schemas of objects that must hold together; none if one of them is of something else."""
    match target(schema, whole):
        case {"allOf": parts}:
            found = [all_objects(part, whole) for part in parts if part not in (True, {})]
            return [each for part in found for each in part] if all(found) else []
        case {"type": "object"} as part:
            return [part]
    return []


def value_schema(schema: Schema, name: str) -> Any:
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    patterns = schema.get("patternProperties", {}).items()
    found = (value for pattern, value in patterns if re.search(pattern, name))
    return next(found, schema.get("additionalProperties", {}))


def place(parts: list[Schema], name: str) -> int:
    """Where a name stands in an answer: first what is described or required, and what is one of a few."""
    first: list[str] = []
    for part in parts:
        first += part.get("properties", ())
        first += ["y", "yy"] if "^(?:y|yy)$" in part.get("patternProperties", ()) else []
        first += part.get("propertyNames", {}).get("enum", ())
    # Those that are only required come behind them.
    first += [name for part in parts for name in part.get("required", ())]
    if name in first:
        return first.index(name)
    patterns = [pattern for part in parts for pattern in part.get("patternProperties", ())]
    return len(first) + (not any(re.search(pattern, name) for pattern in patterns))


@cache
def compiler() -> GrammarCompiler:
    interface = text_interface("")
    return GrammarCompiler(dataclasses.replace(interface, eos_token_ids=frozenset({interface.tokenizer.eos_token_id})))


def compiled(schema: Schema) -> GrammarState | None:
    """The grammar of a schema; None: nothing satisfies it."""
    try:
        return compiler().compile(StructuredOutputsParams(json=schema))
    except ValueError as error:
        event(str(error)[:120])
        # What is refused because of a part that is referred to may be satisfiable as a whole.
        kinds = ("no name that is not among", "are not disjoint")
        assume(not any(kind in str(error) for kind in kinds))
        if "nsatisfiable" not in str(error):
            raise
        return None


def allowed(state: GrammarState) -> list[int]:
    bitmask = np.zeros((1, -(-state.num_tokens // 32)), dtype=np.int32)
    state.fill_bitmask(bitmask, 0)
    assert state.failure is None
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    found: list[int] = bits.nonzero()[0].tolist()
    return found


def accepts(state: GrammarState, text: str) -> bool:
    tokenizer = compiler()._loaded.tokenizer
    for token_id in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
        if state.complete or token_id not in allowed(state):
            return state.complete and token_id == tokenizer.eos_token_id
        state.advance(token_id)
    return True


def walk(state: GrammarState, chance: random.Random) -> str | None:
    """Some text that the grammar allows, token by token; None: it became too long."""
    tokenizer = compiler()._loaded.tokenizer
    closing = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(['"', "}", "]", "1"])]
    token_ids: list[int] = []
    while len(token_ids) < 200:
        choices = [] if state.complete else allowed(state)
        if state.complete or (tokenizer.eos_token_id in choices and chance.random() < 0.7):
            text: str = tokenizer.decode(token_ids)
            return text
        assert choices, tokenizer.decode(token_ids)
        closers = [token_id for token_id in closing[1:] if token_id in choices]
        choices = [token_id for token_id in choices if token_id != tokenizer.eos_token_id]
        hurried = chance.random() < (0.3 if len(token_ids) < 30 else 0.9)
        token_ids.append(closers[0] if closers and hurried else chance.choice(choices))
        state.advance(token_ids[-1])
    return None


@settings(max_examples=100)
@given(schema=wholes(), chance=st.randoms(use_true_random=False))
def test_what_a_grammar_allows_is_valid(schema: Schema, chance: random.Random) -> None:
    state = compiled(schema)
    if state is None:
        return
    for _ in range(2):
        text = walk(state.fork(), chance)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


@settings(max_examples=100)
@given(schema=wholes(), data=st.data())
def test_what_is_valid_is_allowed(schema: Schema, data: st.DataObject) -> None:
    state = compiled(schema)
    validator = jsonschema.Draft202012Validator(schema)
    values = [data.draw(answers(schema, schema)) for _ in range(3)]
    if state is None:
        assert not any(map(validator.is_valid, [*values, *JUNK]))
        return
    numbered = "u" in with_json_options(prepare_schema(copy.deepcopy(schema)))["x-guidance"]["json_allowed_escapes"]
    for value in values:
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
        assume(numbered or r"\u00" not in text)
        assert accepts(state.fork(), text) == validator.is_valid(value), text
