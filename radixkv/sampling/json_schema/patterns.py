"""Regular expressions in JSON schemas, rewritten for the compiler.

The compiler has no lookaheads, and a length beside a pattern may be too much work for it.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from radixkv.cache.arguments import is_whole

# Some number of characters of one kind: ^[a-z]{1,50}$.
_ONE_KIND = re.compile(
    r"\^(?P<kind>\[(?:\\.|[^\\\[\]])+\]|\\[pP]\{\w+\}|\\[dDsSwW]|[\w .])"
    r"(?:(?P<sign>[*+?])|\{(?P<least>\d+)(?P<range>,(?P<most>\d+)?)?\})\$"
)
_SIGNS = MappingProxyType({"*": (0, None), "+": (1, None), "?": (0, 1)})
_CHARACTER = r"\\.|\[(?:\\.|[^\\\]])*\]|[^()\\\[]"
# With parentheses in it at most once within each other.
_LOOKAHEAD = re.compile(rf"\^\(\?(?P<sign>[=!])(?P<ahead>(?:{_CHARACTER}|\((?:{_CHARACTER})*\))*)\)")
# What a lookahead excludes, and an equivalent pattern.
_NOT_AHEAD = MappingProxyType(
    {
        r"^[-+.]*$": r"[^-+.]",  # pydantic, of a decimal number
        r"\.": r"^([^.]|$)",  # zod, of an address
        r".*\.\.": r"^([^.]|\.[^.])*\.?$",
    }
)
# Pydantic, of a decimal number with limits: what lies ahead is the number of all digits, without zeros at the end.
_DIGITS = re.compile(
    r"\(\?:(?P<whole>\\d\{0,(?P<most>\d+)\})\|\(\?=\[\\d\.\]\{1,(?P<ahead>\d+)\}0\*\$\)"
    r"\\d(?:(?P<any>\*)|\{0,(?P=most)\})\\\.\\d(?:\*|\{0,(?P<places>\d+)\})0\*\$\)$"
)
_MAX_DIGITS = 100


def rewrite_pattern(part: dict[str, Any]) -> None:
    """Rewrite a schema's pattern, in place: its lookaheads as patterns of their own, and lengths beside it within it.

    What cannot be rewritten stays as it is. The result allows only what the original allows.
    """
    pattern = part.get("pattern")
    if not isinstance(pattern, str):
        return
    others = []
    rest = _DIGITS.sub(_without_lookahead, pattern)
    while found := _LOOKAHEAD.match(rest):
        other = f"^({found['ahead']})" if found["sign"] == "=" else _NOT_AHEAD.get(found["ahead"])
        if other is None:
            return
        others.append({"pattern": other})
        rest = f"^{rest[found.end() :]}"
    if others:
        # Of several alternatives, the lookaheads are part of the first.
        if _has_alternatives(rest) or not isinstance(part.get("allOf", []), list):
            return
        part["allOf"] = [*part.get("allOf", []), *others]
    part["pattern"] = rest
    _include_lengths(part)


def _include_lengths(part: dict[str, Any]) -> None:
    found = _ONE_KIND.fullmatch(part["pattern"])
    shortest, longest = part.get("minLength", 0), part.get("maxLength")
    if found is None or (not shortest and longest is None):
        return
    if not is_whole(shortest) or not (longest is None or is_whole(longest)):
        return
    if found["sign"]:
        least, most = _SIGNS[found["sign"]]
    else:
        least = int(found["least"])
        most = least if found["range"] is None else int(found["most"]) if found["most"] else None
    least = max(least, shortest)
    most = min((each for each in (most, longest) if each is not None), default=None)
    if most is None or least <= most:  # otherwise nothing satisfies it, as the compiler reports
        part["pattern"] = f"^{found['kind']}{{{least},{'' if most is None else most}}}$"
        part.pop("minLength", None)
        part.pop("maxLength", None)


def _without_lookahead(digits: re.Match[str]) -> str:
    most, total = int(digits["most"]), int(digits["ahead"]) - 1  # of which one is the point
    if total > _MAX_DIGITS:
        return digits[0]
    most = total if digits["any"] else min(most, total)
    places = total if digits["places"] is None else int(digits["places"])
    if most + places <= total:
        parts = [rf"\d{{0,{most}}}\.\d{{0,{places}}}0*"]
    else:
        parts = [rf"\d{{{whole}}}\.\d{{0,{min(places, total - whole)}}}0*" for whole in range(most + 1)]
    return f"(?:{'|'.join([digits['whole'], *parts])})$"


def _has_alternatives(pattern: str) -> bool:
    """Whether a pattern consists of alternatives, outside of parentheses."""
    depth = 0
    for part in re.findall(rf"{_CHARACTER}|.", pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return True
    return False
