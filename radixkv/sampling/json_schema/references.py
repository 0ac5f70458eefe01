"""What the references in a JSON schema lead to."""

from __future__ import annotations

import itertools
from typing import Any
from urllib.parse import unquote


class References:
    """The references within a schema, each of which is followed once, however often it is there.

    Args:
        whole: the schema.
        have_addresses: whether parts of it have addresses of their own, from which "#" does not lead to the whole.
    """

    def __init__(self, whole: Any, have_addresses: bool) -> None:
        self.whole = whole
        self._targets: dict[str, Any] = {}
        self._address = ""
        if have_addresses:
            address = whole.get("$id")
            # The second is the compiler's, where a schema has no address.
            self._address = address.rstrip("#") if isinstance(address, str) else "json-schema:///"

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
        return {"$ref": f"{self._address}#/$defs/{key}"}

    def _follow(self, reference: str) -> Any:
        part = self.whole
        for name in unquote(reference).split("/")[1:]:
            if not isinstance(part, dict):
                return None
            part = part.get(name.replace("~1", "/").replace("~0", "~"))
        return part
