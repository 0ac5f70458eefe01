"""Parts of schemas that no value of finite length satisfies: a model that begins one cannot end it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from radixkv.sampling.json_schema.references import References, escape_name

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")


def endless_part(schema: Any) -> str | None:
    """Where in a schema whose references are pointers a part is endless that a value may have; None: nowhere.

    As for a node that requires another node. What a schema says by other keywords than those of types, properties, items,
    references and combinations is taken to have an end.
    """
    references = References(schema)
    reached = list(_reached(schema, references))
    if not any("$ref" in part for _, part in reached):
        return None
    # The identities of parts that values satisfy whose parts satisfy parts that are in it already.
    ending: set[int] = set()
    size = -1
    while size < len(ending):
        size = len(ending)
        for _, part in reversed(reached):  # what is within a part before the part
            if _ends(part, references, ending):
                ending.add(id(part))
    return next((path for path, part in reached if id(part) not in ending), None)


def _ends(schema: dict[str, Any], references: References, ending: set[int]) -> bool:
    """Whether a value of finite length satisfies a schema, as far as this is known of what is within it."""
    if "const" in schema or "enum" in schema:
        return True
    needed = [_target(schema, references)]
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and alternatives:
            needed.append(next((each for each in alternatives if _is_in(each, ending)), alternatives[0]))
    parts = schema.get("allOf")
    needed += parts if isinstance(parts, list) else []
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        needed += [properties[name] for name in required if isinstance(name, str) and name in properties]
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int) and least > 0:
        first = schema.get("prefixItems")
        of_first = first[:least] if isinstance(first, list) else []
        needed += of_first if len(of_first) == least else [*of_first, schema.get("items")]
    return all(_is_in(each, ending) for each in needed)


def _is_in(part: Any, ending: set[int]) -> bool:
    return not isinstance(part, dict) or id(part) in ending


def _target(schema: dict[str, Any], references: References) -> Any:
    reference = schema.get("$ref")
    return references.whole if reference == "#" else references.target_of(reference)


def _reached(schema: Any, references: References) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of values and of parts of these, with their paths; each once, before what is within it."""
    pending: list[tuple[str, Any]] = [("#", schema)]
    seen: set[int] = set()
    while pending:
        path, part = pending.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        pending.append((str(part.get("$ref")), _target(part, references)))
        properties = part.get("properties")
        if isinstance(properties, dict):
            pending += [(f"{path}/properties/{escape_name(name)}", each) for name, each in properties.items()]
        for keyword in _LISTS:
            if isinstance(part.get(keyword), list):
                pending += [(f"{path}/{keyword}/{index}", each) for index, each in enumerate(part[keyword])]
        pending += [(f"{path}/{keyword}", part.get(keyword)) for keyword in ("items", "additionalProperties")]
