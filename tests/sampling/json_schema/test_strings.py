"""Patterns, lengths and formats of strings in JSON schemas, as pydantic, zod and users write them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from support.schemas import accepts, one_string

from radixkv import LLM, StructuredOutputsParams
from radixkv.sampling.grammar.answer_frames import checked_frame, frame_text
from radixkv.tools.grammar import AnswerFrame

# Pydantic 2.12 and 2.13 wrote the first three of a decimal number; zod writes the last of an address.
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
PRICE = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*$)"
DIGITS = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)"
ADDRESS = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize(
    ("keywords", "allowed", "refused"),
    [
        ({"pattern": DECIMAL}, ["0", "-12.50", "+.5", "7."], ["", "-", ".", "+.", "1.2.3", "x"]),
        ({"pattern": PRICE}, ["0", "-1234.50", "+.5", "007.2"], ["", "-.", "12345", "1.234", "x"]),
        ({"pattern": r"^(?:\d{0,1}|(?=[\d.]{1,3}0*$)\d{0,1}\.\d{0,1}0*$)"}, ["1", "1.5", "1.50"], ["12", "1.25"]),
        ({"pattern": r"^(?:\d{0,1}|(?=[\d.]{1,3}0*$)\d{0,1}\.\d{0,5}0*$)"}, ["1.5", ".55", ".5500"], ["1.55", ".555"]),
        ({"pattern": DIGITS}, ["123", "-12.3", "0.1230", ".123", "1.", "001.23"], ["", "1234", "12.34", ".1234", "x"]),
        (
            {"pattern": ADDRESS, "format": "email"},
            ["a@b.de", "a.b+c@d-e.f.org"],
            [".a@b.de", "a..b@c.de", "a.@b.de", "a@b", "a@.de"],
        ),
        (
            {"pattern": r"^(?=.*[A-Z])(?=.*(\d|[)]))[^ ]{3,8}$"},
            ["A12", "bC)d"],
            ["abc1", "ABC", "A1", "A 12", "ABCDEFGH1"],
        ),
        ({"pattern": r"^[\p{L} ]{1,50}$", "maxLength": 40}, ["é", 40 * "a"], ["", "a1", 41 * "a"]),
        ({"pattern": r"^\p{L}+$", "minLength": 2, "maxLength": 40}, ["éa", 40 * "a"], ["a", 41 * "a"]),
        ({"pattern": "^[a-z]{4}$", "maxLength": 9}, ["abcd"], ["abc", "abcde"]),
        ({"pattern": "^[a-z]{2,}$", "minLength": 1}, ["ab", 60 * "a"], ["a"]),
    ],
)
def test_a_rewritten_pattern_allows_what_the_original_allows(
    llm: LLM, keywords: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    """Those with lookaheads were refused, and lengths beside classes of letters were too much work."""
    schema = one_string(**keywords)
    for text in allowed:
        if "p{L}" not in keywords["pattern"]:
            jsonschema.validate({"a": text}, schema)
        assert accepts(llm, schema, {"a": text}), text
    for text in refused:
        assert not accepts(llm, schema, {"a": text}), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!x).*$",
        r"^(?=a)b|c$",
        r"^a(?=b).$",
        r"^(?=((a)))a$",
        r"^(?<=a)b$",
    ],
)
def test_what_other_words_cannot_say_is_refused(llm: LLM, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"json cannot be followed: .*look-around"):
        llm.engine.grammars.compile(StructuredOutputsParams(json=one_string(pattern=pattern)))


def test_formats_that_every_string_has_are_accepted(llm: LLM) -> None:
    """Pydantic's of a path and of bytes were refused."""
    for name in ("path", "binary", "password"):
        assert accepts(llm, one_string(format=name), {"a": "x/y"})


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("base64", ["", "YQ==", "YWI=", "YWJj", "+/8="], ["a", "YQ=", "YQ", "-_8=", "YWJj="]),
        ("base64url", ["", "-_8=", "YWJj"], ["+/8=", "YQ="]),
        ("byte", ["YQ=="], ["a"]),
        ("uuid4", ["12345678-9abc-4def-8123-456789abcdef"], ["12345678-9abc-1def-8123-456789abcdef", "x"]),
        ("uuid7", ["12345678-9abc-7def-B123-456789abcdef"], ["12345678-9abc-7def-7123-456789abcdef"]),
        (
            "ipvanyaddress",
            ["1.2.3.4", "::", "1::2", "fe80::1:2", "1:2:3:4:5:6:7:8"],
            ["256.1.1.1", ":1", "1:2", "1::2::3"],
        ),
        ("ipv4interface", ["1.2.3.4", "10.0.0.1/8", "10.0.0.1/32"], ["10.0.0.1/33", "::/8", "1.2.3"]),
        ("ipv6interface", ["::1", "2001:db8::/32", "1::/128"], ["1::/129", "1.2.3.4", "1:2:3:4:5:6:7:8:9"]),
        ("ipvanyinterface", ["::1/64", "1.2.3.4/24"], ["1.2.3.4/64", "x"]),
    ],
)
def test_formats_of_pydantic_and_openapi_are_enforced(
    llm: LLM, name: str, allowed: list[str], refused: list[str]
) -> None:
    """Those of addresses, bytes and UUIDs of one version were refused."""
    for text in allowed:
        assert accepts(llm, one_string(format=name), {"a": text}), text
    for text in refused:
        assert not accepts(llm, one_string(format=name), {"a": text}), text


@pytest.mark.parametrize("name", ["ipv6network", "file-path", "regex", "jwt", "zoneinfo"])
def test_other_formats_are_refused(llm: LLM, name: str) -> None:
    with pytest.raises(ValueError, match=f"#/properties/a/format: this '{name}' cannot be enforced"):
        llm.engine.grammars.compile(StructuredOutputsParams(json=one_string(format=name)))


def test_a_format_that_json_schema_does_not_have_is_what_the_pattern_beside_it_says(llm: LLM) -> None:
    """Zod's of identifiers, telephone numbers and its users' own were refused."""
    for name in ("nanoid", "base64url", "cool-id"):
        schema = one_string(format=name, pattern="^[a-z_-]{3}$")
        assert accepts(llm, schema, {"a": "a_-"})
        assert not accepts(llm, schema, {"a": "a_"})
    with pytest.raises(ValueError, match="this 'regex' cannot be enforced"):
        llm.engine.grammars.compile(StructuredOutputsParams(json=one_string(format="regex", pattern="^a$")))


def test_of_a_tool_s_schema_that_is_refused_the_patterns_alone_are_left_to_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All arguments were: one such pattern, and neither types nor names were enforced."""
    guidance = {"whitespace_pattern": " ?", "json_allowed_escapes": 'n"', "lenient": True}
    others = {"additionalProperties": False, "title": "f", "x-guidance": guidance}
    schema = {**one_string(pattern="^(?!x)"), **others}
    frame = frame_text(AnswerFrame("start: @f", {"f": schema}))
    grammars = json.loads(checked_frame(frame, lambda text: "look-around" if "(?!x)" in text else None))
    assert grammars[1]["json_schema"] == {**one_string(), **others}
    assert caplog.messages == [
        "the parameters of 'f' cannot be enforced: look-around; its patterns, and lengths beside them, are left to the model"
    ]


@pytest.mark.parametrize("lengths", [{"minLength": True}, {"maxLength": True}, {"maxLength": "3"}])
def test_a_length_that_is_no_number_is_refused(llm: LLM, lengths: dict[str, Any]) -> None:
    """With some patterns, and of names, it became a part of the regular expression."""
    names = {"type": "object", "propertyNames": lengths}
    for schema in (one_string(**lengths), one_string(pattern="^[a-z]+$", **lengths), names):
        with pytest.raises(
            ValueError, match=r"json cannot be followed: .*(Expected positive integer|propertyNames: this)"
        ):
            llm.engine.grammars.compile(StructuredOutputsParams(json=schema))
