"""What stands before the arguments of a call: text with places for the name of the tool, the call's number and its id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

from radixkv.tools.grammar import GrammarWriter
from radixkv.tools.source import AnswerSource, MalformedCallError, Parsing, collect_until, expect

# Characters for private use stand for what differs between calls.
NAME, ID, INDEX = "\ue000", "\ue001", "\ue002"
# Kimi K2's ids, by which its results are named: https://huggingface.co/moonshotai/Kimi-K2-Instruct (tool_call_guidance.md).
_NUMBERED_NAME = f"functions.{NAME}:{INDEX}"
_PLACE = re.compile(f"([{NAME}{ID}{INDEX}])")
_PATTERNS = MappingProxyType({NAME: r"(?P<name>.+)", ID: r"(?P<id>[\w.:-]+)", INDEX: r"[0-9]+"})
_TERMINALS = MappingProxyType({ID: "/[A-Za-z0-9_-]{1,40}/", INDEX: "/[0-9]{1,3}/"})


@dataclass(frozen=True)
class CallHead:
    """The text from the end of what comes before a call to its arguments.

    Attributes:
        text: with a private character for each place. It ends with text, and there is text between places.
    """

    text: str

    @property
    def before(self) -> str:
        """What stands before the first place."""
        return _PLACE.split(self.text, maxsplit=1)[0]

    @property
    def _after(self) -> str:
        return _PLACE.split(self.text)[-1]

    @property
    def is_readable(self) -> bool:
        """Whether it can be distinguished from what is around it."""
        parts = _PLACE.split(self.text)
        return all(parts[::2]) and parts.count(NAME) == 1 and parts.count(ID) <= 1

    def write(self, name: str, index: int, call_id: str) -> str:
        """The text for a call."""
        filled = {NAME: name, ID: call_id, INDEX: str(index)}
        return _PLACE.sub(lambda place: filled[place[0]], self.text)

    @property
    def named(self) -> str:
        """What follows `before`: the places, and all that is after them."""
        return self.text.removeprefix(self.before)

    def expression(self, writer: GrammarWriter, name: str) -> str:
        """A grammar expression for what follows `before` in a call of this tool."""
        parts = _PLACE.split(self.named.replace(NAME, name))
        return " ".join(_TERMINALS.get(part) or writer.literal(part) for part in parts if part)

    def read(self, source: AnswerSource) -> Parsing[tuple[str, str | None]]:
        """Take the text; the name in it, and the id if there is one.

        Raises:
            MalformedCallError: it is something else.
        """
        yield from expect(source, self.before)
        within, _ = yield from collect_until(source, [self._after])
        places = self.named.removesuffix(self._after)
        pattern = "".join(_PATTERNS.get(part) or re.escape(part) for part in _PLACE.split(places))
        found = re.fullmatch(pattern, within)
        if found is None:
            raise MalformedCallError
        if _NUMBERED_NAME in self.text:
            return found["name"], f"functions.{within}"
        return found["name"], found["id"] if ID in places else None
