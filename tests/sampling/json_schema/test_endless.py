"""What only an endless value satisfies is refused, with its path."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.schemas import accepts

from radixkv import LLM
from radixkv.sampling.json_schema.endless import endless_part

NODE = {"$ref": "#/$defs/Node"}
NULL = {"type": "null"}


def node(schema: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    """A definition of a node whose ``next`` has this schema."""
    return {"type": "object", "properties": {"next": schema}, "required": ["next"], **keywords}


@pytest.mark.parametrize(
    "definition",
    [
        node(NODE),
        node({"anyOf": [NODE, {"type": "array", "items": NODE, "minItems": 1}]}),
        node({"allOf": [NODE, {"type": "object"}]}),
        node({"type": "array", "prefixItems": [NULL, NODE], "minItems": 2}),
        NODE,
        {"oneOf": [node(NODE), NODE]},
    ],
)
def test_a_schema_that_requires_itself_within_itself_is_endless(definition: dict[str, Any]) -> None:
    """It compiled, and the answer went on until it was cut off."""
    assert endless_part({**NODE, "$defs": {"Node": definition}}) == "#"
    branch = {"anyOf": [NULL, {"type": "object", "properties": {"a/b": NODE}}], "$defs": {"Node": definition}}
    assert endless_part(branch) == "#/anyOf/1/properties/a~1b"


@pytest.mark.parametrize(
    "definition",
    [
        node(NODE, required=[]),
        node({"anyOf": [NODE, NULL]}),
        node({"oneOf": [NULL, NODE]}),
        node({"type": "array", "items": NODE}),
        node({"type": "array", "prefixItems": [NULL, NODE], "minItems": 1}),
        node(NODE, type=["object", "null"]),
        {"enum": [{}], **node(NODE)},
        {"$ref": "#/$defs/Other"},
        True,
    ],
)
def test_one_that_may_end_is_not(definition: Any) -> None:
    assert endless_part({**NODE, "$defs": {"Node": definition, "Other": {"type": ["object"]}}}) is None


def test_what_nothing_refers_to_does_no_harm() -> None:
    assert endless_part({"type": "object", "$defs": {"Node": node(NODE)}}) is None
    assert endless_part(True) is None


def test_the_whole_may_refer_to_itself() -> None:
    assert endless_part(node({"$ref": "#"})) == "#"
    assert endless_part(node({"anyOf": [{"$ref": "#"}, NULL]})) is None


def test_such_a_schema_is_refused_with_the_path(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"list": NODE}, "$defs": {"Node": node(NODE)}}
    message = "json cannot be followed: #/properties/list: no value of finite length satisfies this"
    with pytest.raises(ValueError, match=re.escape(message)):
        accepts(llm, schema, {})


def test_time_grows_with_a_schema_and_not_with_its_square() -> None:
    """Definitions that were reached before those that they require took 25 s in a schema of 260 kB."""
    length = 2000
    chain = {f"d{i}": node({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    schema = {"properties": {name: {"$ref": f"#/$defs/{name}"} for name in chain}, "$defs": chain}
    assert endless_part({**schema, "$defs": {**chain, f"d{length}": NULL}}) is None
    assert endless_part({**schema, "$defs": {**chain, f"d{length}": {"$ref": "#/$defs/d0"}}}) is not None
