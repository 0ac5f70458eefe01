"""Prepares JSON schemas for compilation: enforces limits, rewrites what would be refused, finds keywords."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from radixkv.sampling.json_schema.alternatives import replace_one_of
from radixkv.sampling.json_schema.endless import endless_part
from radixkv.sampling.json_schema.formats import replace_format
from radixkv.sampling.json_schema.names import (
    ANY_NAME,
    replace_other_names,
    replace_patterns_of_few_names,
    replace_property_names,
)
from radixkv.sampling.json_schema.numbers import infinite_number, limit_bounds, make_counts_whole, unusable_number
from radixkv.sampling.json_schema.patterns import rewrite_pattern
from radixkv.sampling.json_schema.references import References, escape_name, use_pointers
from radixkv.sampling.json_schema.unique import UniqueItems
from radixkv.tools.grammar import JSON_WHITESPACE

# Compile time grows with the square of a name's or regular expression's length: 0.2 s for the longest allowed.
MAX_NAME_CHARACTERS = 8_192
# An object's optional properties are alternatives: compiling this many takes half a second, and five times as many 7 s. Of
# properties that are only required, and described nowhere, 9,000 take a second.
_MAX_PROPERTIES = 1_000

# Their values are data.
_DATA = frozenset({"const", "enum", "default", "examples"})
_INTO_DATA = re.compile("/(" + "|".join(sorted(_DATA)) + ")(/|$)|%")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
_OF_STRINGS = ("pattern", "minLength", "maxLength")
_ALTERNATIVES = frozenset({"anyOf", "oneOf"})
_COUNTS = frozenset({"minProperties", "maxProperties"})
# Keywords that constrain nothing, but that the compiler refuses beside a reference to the schema that they are part of.
_ANNOTATIONS = frozenset({"deprecated", "discriminator", "example", "nullable"})
_NOT_EXCLUSIVE = (
    "more than one alternative may hold: let them differ in type or in the value of a required property, or use anyOf"
)
# Patterns that match any number of names: without an end, or with a repetition there.
_ENDLESS = re.compile(r"(?!.*\\[zZ])[^$]*|.*(?<!\\)[+*]\$", re.DOTALL)
# Two patterns of names that the compiler refuses.
_OVERLAPPING = re.compile(r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint")
# Characters, in JSON, that have no escape but their number.
_NUMBERED = re.compile(r"\\u00[01]|\x7f")


def with_json_options(schema: Any) -> Any:
    """A prepared schema with options for how its JSON is written. Its own options, in ``x-guidance``, take precedence.

    Numbers of characters are left out where names that are neither properties nor of a pattern are allowed beside them,
    except where the schema needs numbers: llguidance would let a name that is written with one pass for one of these.
    """
    if isinstance(schema, bool):  # has no place for it
        return schema
    is_open = any(
        part.get("additionalProperties") is not False and (part.get("properties") or part.get("patternProperties"))
        for part in _objects(schema)
    )
    escapes = 'nrbtf\\"' + ("u" if not is_open or _NUMBERED.search(json.dumps(schema)) else "")
    options = {"whitespace_pattern": JSON_WHITESPACE, "json_allowed_escapes": escapes}
    own = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**options, **own} if isinstance(own, dict) else own}


def prepare_schema(schema: Any) -> Any:
    """Check a schema's size and, in place, rewrite what the compiler refuses. The result allows nothing else.

    Raises:
        ValueError: it is neither an object nor a boolean, or too large, or has a number that is not finite.
    """
    if not isinstance(schema, dict | bool):
        raise ValueError(f"expected a JSON schema, an object or a boolean, got {type(schema).__name__}")
    reason = infinite_number(schema)
    if reason is not None:
        raise ValueError(reason)
    use_pointers(_walk(schema, _DATA))
    references = References(schema)
    for _, part in [*subschemas(schema)]:
        replace_property_names(part, references)
        replace_patterns_of_few_names(part, references)
    objects = _objects(schema)
    _check_sizes(objects)
    keeps_names = any(part.get("patternProperties") or _COUNTS & set(part) for part in objects)
    for part in objects:
        limit_bounds(part)
        make_counts_whole(part)
    unique_items = UniqueItems(references)
    for _, part in subschemas(schema):
        replace_format(part)
        rewrite_pattern(part)
        unique_items.replace(part)
        if not keeps_names:
            replace_other_names(part)
        replace_one_of(part, references)
        for keyword in _ANNOTATIONS & set(part):
            del part[keyword]
    return schema


def parts_with_patterns(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The regular expressions anywhere in a schema, each to be compiled by itself.

    Returns:
        For each string with a pattern, and for the name patterns of each object: a schema of an object of which it is the
        only property, and how such an object begins, up to the first character of the string or of a name.
    """
    for part in _objects(schema):
        if isinstance(part.get("pattern"), str):
            # With lengths, a pattern may take much more.
            yield _in_object({"type": "string", **{key: part[key] for key in _OF_STRINGS if key in part}}, '"')
        names = part.get("patternProperties")
        if isinstance(names, dict) and names and names != {ANY_NAME: True}:
            # Where other names are allowed, they are those that match no pattern.
            others = part.get("additionalProperties") is not False
            alone = {"patternProperties": dict.fromkeys(names, True), "additionalProperties": others}
            yield _in_object({"type": "object", **alone}, '{"')


def parts_with_more_names(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects anywhere in a schema that have properties, and others whose names match patterns of perhaps few names.

    Returns:
        For each: a schema of an object of which it is the only property, and how such an object begins, up to where one of
        the others may follow.
    """
    for part in _objects(schema):
        names, patterns = sorted(_names(part, "properties")), part.get("patternProperties")
        if names and isinstance(patterns, dict) and patterns:
            allowed = {pattern: values is not False for pattern, values in patterns.items()}
            if any(_ENDLESS.fullmatch(pattern) for pattern, is_allowed in allowed.items() if is_allowed):
                continue  # compiling it would take as long as the whole
            alone = {
                "properties": {**dict.fromkeys(names, False), names[0]: True},
                "patternProperties": allowed,
                "additionalProperties": part.get("additionalProperties") is not False,
            }
            yield _in_object({"type": "object", **alone}, f"{{{json.dumps(names[0])}:1,")


def not_to_compile(schema: Any) -> str | None:
    """Why a prepared schema must not be compiled; None: it may be."""
    for path, part in subschemas(schema):
        for keyword in _ALTERNATIVES & set(part):
            if part[keyword] == []:
                return f"{path}/{keyword}: expected at least one schema, got []"
    endless = endless_part(schema)
    if endless is not None:
        return f"{endless}: no value of finite length satisfies this"
    return unusable_number(_objects(schema))


def without_patterns(schema: Any) -> Any:
    """A copy of a schema in which strings have no patterns."""
    remaining = json.loads(json.dumps(schema))
    for _, part in subschemas(remaining):
        part.pop("pattern", None)
    return remaining


def _in_object(part: dict[str, Any], begin: str) -> tuple[dict[str, Any], str]:
    # As the whole answer, a value would be begun by the first bitmask, which would take a share of the work.
    return {"type": "object", "properties": {"x": part}, "required": ["x"]}, f'{{"x":{begin}'


def locate_refusal(schemas: Iterable[Any], message: str) -> str:
    """An error message of llguidance, with the paths in these schemas of the keywords or the format that it refuses."""
    refused: set[str] = set()
    if message.startswith("oneOf constraints are not supported"):
        refused, message = {"oneOf"}, _NOT_EXCLUSIVE
    elif found := re.search(r"Unimplemented keys: \[(.*?)\]", message):
        refused = set(re.findall(r'"(.*?)"', found[1]))
    unknown_format = re.search(r"Unknown format: (\S+)", message)
    overlapping = _OVERLAPPING.fullmatch(message)
    patterns = set(map(_unescaped, overlapping.groups())) if overlapping else set[str]()
    paths = [
        f"{path}/{keyword}"
        for schema in schemas
        for path, part in subschemas(schema)
        for keyword, value in part.items()
        if keyword in refused
        or (unknown_format and keyword == "format" and value == unknown_format[1])
        or (patterns and keyword == "patternProperties" and patterns <= set(map(_unescaped, _names(part, keyword))))
    ]
    if not paths:
        return message
    value = f" {unknown_format[1]!r}" if unknown_format else ""
    return f"{', '.join(paths[:5])}: this{value} cannot be enforced ({message})"


def _unescaped(pattern: str) -> str:
    """A regular expression without the escapes of slashes that the compiler writes in messages."""
    return pattern.replace("\\/", "/")


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, itself included, with its path as a JSON pointer (``#`` is the whole)."""
    pending: list[tuple[str, Any]] = [("#", schema)]
    while pending:
        path, part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        for keyword in _SCHEMA_MAPS:
            if isinstance(part.get(keyword), dict):
                pending += [(f"{path}/{keyword}/{escape_name(name)}", value) for name, value in part[keyword].items()]
        for keyword in _SCHEMA_LISTS:
            if isinstance(part.get(keyword), list):
                pending += [(f"{path}/{keyword}/{index}", value) for index, value in enumerate(part[keyword])]
        pending += [(f"{path}/{keyword}", part[keyword]) for keyword in _SCHEMAS if keyword in part]


def _names(schema: dict[str, Any], keyword: str) -> set[str]:
    """The names in a keyword's object or list; none if its value is something else."""
    names = schema.get(keyword)
    return {name for name in names if isinstance(name, str)} if isinstance(names, dict | list) else set()


def _check_sizes(objects: Iterable[dict[str, Any]]) -> None:
    """Raise a ValueError if a schema's objects have too many properties or too long a name or pattern."""
    num_properties = 0
    described: set[str] = set()
    required: set[str] = set()
    for part in objects:
        longest = max((len(text) for text in (*part, part.get("pattern")) if isinstance(text, str)), default=0)
        if longest > MAX_NAME_CHARACTERS:
            raise ValueError(f"a name or pattern has {longest} characters, expected at most {MAX_NAME_CHARACTERS}")
        names = _names(part, "properties")
        described |= names
        required |= _names(part, "required")
        num_properties += len(names) + len(_names(part, "patternProperties"))
    # Names that are only required, each once: the alternatives of an object may each require what is described beside them.
    num_properties += len(required - described)
    if num_properties > _MAX_PROPERTIES:
        raise ValueError(f"expected at most {_MAX_PROPERTIES} properties in all, got {num_properties}")


def _objects(schema: Any) -> list[dict[str, Any]]:
    """Every object in the text of a schema that may be a schema: a reference may make one of any."""
    everything = [part for _, part in _walk(schema, frozenset())]
    if any(_INTO_DATA.search(str(part.get("$ref"))) for part in everything):
        return everything
    return [part for _, part in _walk(schema, _DATA)]


def _walk(schema: Any, data: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object within a schema, itself included, with its path, but none within the values of these keywords."""
    pending = [("#", schema, data)]
    while pending:
        path, part, left_out = pending.pop()
        if isinstance(part, list):
            pending += [(f"{path}/{index}", each, data) for index, each in enumerate(part)]
        elif isinstance(part, dict):
            yield path, part
            for key, value in part.items():
                if key not in left_out:
                    # What has a name of its own may have any name.
                    are_named = left_out and key in _SCHEMA_MAPS
                    pending.append((f"{path}/{escape_name(key)}", value, frozenset() if are_named else data))
