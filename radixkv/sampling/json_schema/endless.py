"""Parts of schemas that no value of finite length satisfies: a model that begins one cannot end it."""

from __future__ import annotations

from collections import defaultdict
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
    # By the identities of parts. Each requirement is met once, so that time grows with the schema and not with its square.
    unmet: dict[int, set[int]] = {}
    required_by: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for _, part in reached:
        requirements = _requirements(part, references)
        unmet[id(part)] = set(range(len(requirements)))
        for number, alternatives in enumerate(requirements):
            for each in alternatives:
                required_by[id(each)].append((id(part), number))
    ending = [identity for identity, numbers in unmet.items() if not numbers]
    for identity in ending:  # it grows meanwhile
        for other, number in required_by[identity]:
            if number in unmet[other]:
                unmet[other].remove(number)
                if not unmet[other]:
                    ending.append(other)
    return next((path for path, part in reached if unmet[id(part)]), None)


def _requirements(schema: dict[str, Any], references: References) -> list[list[dict[str, Any]]]:
    """The parts that must have an end for a value to have one: of each list, one."""
    if "const" in schema or "enum" in schema:
        return []
    needed: list[Any] = [_target(schema, references)]
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
    choices = [schema[keyword] for keyword in ("anyOf", "oneOf") if isinstance(schema.get(keyword), list)]
    # What is no object, such as True, has an end.
    return [
        alternatives
        for alternatives in (*([each] for each in needed), *choices)
        if alternatives and all(isinstance(each, dict) for each in alternatives)
    ]


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
