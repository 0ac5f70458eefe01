"""The texts with which a notation of arguments surrounds keys and values."""

from __future__ import annotations

from dataclasses import dataclass

# Stands for the key, where it is repeated after the value.
KEY = "\ue003"


@dataclass(frozen=True)
class ValueFrame:
    """What stands around values of one kind.

    Attributes:
        begin: before the value.
        end: after the value. It may have `KEY` in it. It is empty only where the value itself shows its end.
    """

    begin: str
    end: str


@dataclass(frozen=True)
class ValueFrames:
    """What stands around values.

    Attributes:
        strings: around those that are strings, which stand as they are.
        others: around all others.
    """

    strings: ValueFrame
    others: ValueFrame

    @property
    def distinguish_strings(self) -> bool:
        """Whether strings begin in another way than other values."""
        return self.strings.begin != self.others.begin

    @property
    def longest_first(self) -> tuple[ValueFrame, ValueFrame]:
        """The frames, of which one may begin as the other does."""
        longer, shorter = sorted((self.strings, self.others), key=lambda frame: -len(frame.begin))
        return longer, shorter

    @property
    def literals(self) -> tuple[str, ...]:
        """All texts in it."""
        frames = (self.strings, self.others)
        return tuple(text for frame in frames for text in (frame.begin, *frame.end.split(KEY)))


@dataclass(frozen=True)
class Nested:
    """How objects and lists are written where they are not JSON.

    Attributes:
        object_open, object_close: around the members of an object, which are written as arguments are.
        list_open, list_close: around the items of a list.
        items: around each item.
        separator: between two items.
    """

    object_open: str
    object_close: str
    list_open: str
    list_close: str
    items: ValueFrames
    separator: str


@dataclass(frozen=True)
class Members:
    """Keys with their values.

    Attributes:
        key_begin: before each key; it may be empty.
        values: around the value, from the end of the key.
        separator: between two of them; it may be empty.
        nested: how objects and lists are written; None: as JSON.
    """

    key_begin: str
    values: ValueFrames
    separator: str
    nested: Nested | None = None

    @property
    def splits_kinds(self) -> bool:
        """Whether values of different kinds are written in different ways, where a schema allows several."""
        return self.nested is not None or self.values.distinguish_strings

    @property
    def shows_kinds(self) -> bool:
        """Whether a value shows what kind it is of, so that it needs no schema to be read."""
        return self.values.distinguish_strings and (self.nested is None or self.nested.items.distinguish_strings)

    @property
    def literals(self) -> tuple[str, ...]:
        """All texts in it."""
        nested = self.nested
        inner = (
            ()
            if nested is None
            else (
                nested.object_open,
                nested.object_close,
                nested.list_open,
                nested.list_close,
                nested.separator,
                *nested.items.literals,
            )
        )
        return (self.key_begin, self.separator, *self.values.literals, *inner)
