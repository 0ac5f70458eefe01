"""What the references in a JSON schema lead to."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def target_of(reference: Any, whole: Any) -> Any:
    """What a reference in the form of a JSON pointer leads to within a schema; None: nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    part = whole
    for name in unquote(reference).split("/")[1:]:
        if not isinstance(part, dict):
            return None
        part = part.get(name.replace("~1", "/").replace("~0", "~"))
    return part
