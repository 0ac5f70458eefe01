"""Formats of strings that pydantic, zod and OpenAPI have beside those of JSON Schema, rewritten as patterns."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

# Those of JSON Schema, whether the compiler has them or not.
_STANDARD = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex".split()
)
# Of how a value is shown: they constrain nothing.
_ANNOTATIONS = frozenset({"password", "path", "binary"})
_HEX = "[0-9a-fA-F]"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_PART = f"{_HEX}{{1,4}}"
# With "::" for the missing parts, after any number of the others.
_IPV6 = "|".join(
    [
        f"(?:{_PART}:){{7}}{_PART}",
        *(f"(?:{_PART}:){{1,{7 - after}}}(?::{_PART}){{1,{after}}}" for after in range(1, 7)),
        f"(?:{_PART}:){{1,7}}:",
        f":(?::{_PART}){{1,7}}",
        "::",
    ]
)
_IPV4_INTERFACE = f"{_IPV4}(?:/(?:3[0-2]|[12]?[0-9]))?"
_IPV6_INTERFACE = f"(?:{_IPV6})(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?"
_BASE64 = r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
_PATTERNS = MappingProxyType(
    {
        "base64": _BASE64,
        "base64url": _BASE64.replace("+/", "_-"),
        "byte": _BASE64,
        "ipvanyaddress": f"{_IPV4}|{_IPV6}",
        "ipv4interface": _IPV4_INTERFACE,
        "ipv6interface": _IPV6_INTERFACE,
        "ipvanyinterface": f"{_IPV4_INTERFACE}|{_IPV6_INTERFACE}",
        **{
            f"uuid{version}": f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
            for version in range(1, 9)
        },
    }
)


def replace_format(part: dict[str, Any]) -> None:
    """Make a schema's format a pattern, in place, if it is one of those; leave out one that constrains nothing.

    A pattern beside a format that JSON Schema does not have is what the format means.
    """
    name = part.get("format")
    if not isinstance(name, str) or name in _STANDARD:
        return
    if name in _ANNOTATIONS or isinstance(part.get("pattern"), str):
        del part["format"]
    elif name in _PATTERNS and "pattern" not in part:
        del part["format"]
        part["pattern"] = f"^(?:{_PATTERNS[name]})$"
