"""Sizes in bytes, as options give them."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping

# In lower case.
_UNITS: Mapping[str, int] = types.MappingProxyType(
    {
        **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
        **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
        "b": 1,
        "": 1,
    }
)


def parse_size(name: str, size: str | int) -> int:
    """Bytes, from an option's value: a number, or text such as 10GiB.

    Raises:
        ValueError: it is neither, not above 0, or more than any address space.
    """
    is_given = isinstance(size, str | int) and not isinstance(size, bool)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size) if is_given else "")
    factor = _UNITS.get(match[2].lower()) if match else None
    num_bytes = int(float(match[1]) * factor) if match and factor else 0
    if not 1 <= num_bytes < 1 << 63:
        raise ValueError(
            f"{name}: expected a size above 0 such as 512MiB or 10GiB, or a whole number of bytes, got {size!r:.80}"
        )
    return num_bytes
