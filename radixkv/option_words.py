"""Error messages about options: what an option accepts, and what is wrong with a given value."""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def refuse_unknown(caller: str, options: Iterable[str], known: Collection[str]) -> None:
    """Refuse an unknown keyword in the words of Python's own error.

    Raises:
        TypeError: naming the first unknown keyword, and the nearest known one if there is one.
    """
    for name in options:
        if name not in known:
            near = nearest(name, known)
            meant = "" if near is None else f". Did you mean {near!r}?"
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{meant}")


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that is spelled most like ``name``; None: none is near.

    Args:
        likeness: the least that is near, from 0 to 1: the share of both names' letters that both have in the same order.
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1, likeness)), None)


def hint(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The end of an error about an unknown name: the `nearest` known one; empty where none is near."""
    near = nearest(name, known, likeness)
    return "" if near is None else f"; did you mean {near}?"


class Accepted(NamedTuple):
    """What a field accepts.

    Attributes:
        kinds: types, or one Literal; None is not among them.
        optional: whether None is accepted, too.
        low, high: the range of a number; None: no bound.
        above_low: whether ``low`` itself is out of the range.
    """

    kinds: tuple[Any, ...]
    optional: bool
    low: Any
    high: Any
    above_low: bool

    @classmethod
    def of(cls, field: FieldInfo) -> Accepted:
        """What ``field`` accepts."""
        annotation = field.annotation
        kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        at_least = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
        above = next((bound.gt for bound in field.metadata if isinstance(bound, Gt)), None)
        return cls(
            kinds=tuple(kind for kind in kinds if kind is not types.NoneType),
            optional=types.NoneType in kinds,
            low=at_least if above is None else above,
            high=next((bound.le for bound in field.metadata if isinstance(bound, Le)), None),
            above_low=above is not None,
        )

    def in_words(self) -> str:
        """Such as "a whole number of at least 1 or None"."""
        return self._kind_in_words() + self._range_in_words() + (" or None" if self.optional else "")

    def _kind_in_words(self) -> str:
        kind = self.kinds[0]
        if get_origin(kind) is Literal:
            return f"one of {', '.join(map(str, get_args(kind)))}"
        if Path in self.kinds:
            return "a path"
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return "a JSON object"
        words = {
            bool: "True or False",
            int: "a whole number",
            float: "a number",
            str: "text",
            datetime: "a date and time",
        }
        return words.get(kind, "a list" if get_args(kind) == (Any,) else "a list of texts")

    def _range_in_words(self) -> str:
        if self.low is None:
            return ""
        if self.above_low:
            return f" above {self.low}" + ("" if self.high is None else f" and up to {self.high}")
        return f" of at least {self.low}" if self.high is None else f" from {self.low} to {self.high}"


def in_one_line(error: ValidationError, fields: Mapping[str, FieldInfo]) -> str:
    """The first of the errors that pydantic found in these fields, worded like the library's own."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":  # from one of our validators
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    # A field that is hidden in a configuration's repr, such as a key, is hidden in errors, too.
    got = f"{first['input']!r:.80}" if fields[name].repr else f"a value of type {type(first['input']).__name__}"
    return f"{name}: expected {Accepted.of(fields[name]).in_words()}, got {got}"
