"""What the references in a JSON schema lead to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

# Characters of names that a fragment may have as they are, see RFC 3986.
_IN_FRAGMENTS = "/~!$&'()*+,;=:@?"


class References:
    """The references within a schema, each of which is followed once, however often it is there.

    Args:
        whole: the schema, in which references are pointers, see `use_pointers`.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self._targets: dict[str, Any] = {}

    def target_of(self, reference: Any) -> Any:
        """What a reference in the form of a JSON pointer leads to; None: nothing."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        if reference not in self._targets:
            self._targets[reference] = self._follow(reference)
        return self._targets[reference]

    def shared(self, name: str, schema: Any) -> Any:
        """The schema by reference, for several places; it becomes a definition of the whole. None: that has no place for it.

        Args:
            name: how the definition's name begins.
        """
        if isinstance(schema, bool):
            return schema
        definitions = self.whole.get("$defs", {})
        if not isinstance(definitions, dict):
            return None
        key = next(key for key in map(f"{name}-{{}}".format, itertools.count()) if key not in definitions)
        self.whole["$defs"] = definitions | {key: schema}
        return {"$ref": f"#/$defs/{key}"}

    def _follow(self, reference: str) -> Any:
        part = self.whole
        for name in unquote(reference).split("/")[1:]:
            if not isinstance(part, dict):
                return None
            part = part.get(name.replace("~1", "/").replace("~0", "~"))
        return part


def escape_name(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def use_pointers(parts: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Make references within a schema pointers from the whole, in place, and leave out the addresses of its parts.

    In a part that has an address of its own, ``$id``, "#" leads to that part (JSON Schema 2020-12, section 8.2). The compiler
    does not apply that to parts to which a reference leads.

    Args:
        parts: the schema, and every object within it that may be one, by its path; each after what it is a part of.
    """
    keyword = "$id"
    bases: dict[str, str] = {}
    places: dict[str, str] = {}
    references: list[tuple[str, dict[str, Any]]] = []
    for path, part in parts:
        if path == "#" and "draft-04" in str(part.get("$schema")):
            keyword = "id"
        above = path
        while above and above not in bases:
            above = above.rpartition("/")[0]
        base, anchor = bases.get(above, ""), ""
        address = part.get(keyword)
        if isinstance(address, str):
            base, anchor = _join(base, address)
            if path != "#":
                del part[keyword]
        if path == "#" or (isinstance(address, str) and not anchor):
            places.setdefault(base, path)
        for name in (anchor, part.get("$anchor")):
            if isinstance(name, str) and name:
                places.setdefault(f"{base}#{name}", path)
        bases[path] = base
        if isinstance(part.get("$ref"), str):
            references.append((base, part))
    for base, part in references:
        address, fragment = _join(base, part["$ref"])
        pointer = fragment if fragment.startswith("/") else ""
        place = places.get(address if pointer or not fragment else f"{address}#{fragment}")
        if place is None:  # nothing, wherever it is looked for
            part["$ref"] = f"{address}#{fragment}"
        else:
            part["$ref"] = f"#{quote(place[1:], _IN_FRAGMENTS)}{pointer}"


def _join(base: str, reference: str) -> tuple[str, str]:
    """The address to which a reference leads from another one, and the fragment there."""
    address, fragment = urldefrag(reference)
    return urljoin(base, address) if address else base, fragment
