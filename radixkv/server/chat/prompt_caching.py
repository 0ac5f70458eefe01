"""The ends of prefixes that are to stay cached, and OpenAI's fields that mark them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from radixkv.server.not_supported import Only
from radixkv.server.strict import StrictModel

Lifetime = Literal["30m", "12h"]
# Of OpenAI's times to live and Anthropic's.
SECONDS: Mapping[str, float] = MappingProxyType({"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0})
_DEFAULT_LIFETIME: Lifetime = "30m"

Place = tuple[int, int]
"""A message or item of a request, and a part of it, each by its index."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a prefix that is to stay cached.

    Attributes:
        messages: the messages before it, in the form of chat completions; none: it stands after the tools.
        ttl: for how many seconds after its last use.
    """

    messages: Sequence[Mapping[str, Any]]
    ttl: float


class PromptCacheBreakpoint(StrictModel):
    """Marks the part of a message with which a prefix ends.

    Attributes:
        ttl: how long it stays cached after its last use; None: as in the request's options.
    """

    mode: Literal["explicit"]
    ttl: Lifetime | None = None


class IgnoredCacheControl(StrictModel):
    """Marks what to cache, for other services. Here everything is cached; `PromptCacheBreakpoint` also keeps it cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class PromptCacheOptions(StrictModel):
    """How a prompt is cached.

    Attributes:
        mode: ``explicit``: a request without breakpoints neither reads nor writes the cache.
        ttl: of breakpoints that have none.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Lifetime | None = None
    comparison_response_id: Only[None] = Field(default=None, exclude=True)
    prewarm: Only[Literal[False] | None] = Field(default=None, exclude=True)

    def allows(self, breakpoints: Sequence[Breakpoint]) -> bool:
        """Whether a request with these breakpoints may use the cache."""
        return self.mode != "explicit" or bool(breakpoints)


def last_marks(
    marks: Iterable[tuple[Place, PromptCacheBreakpoint | None]], options: PromptCacheOptions | None
) -> list[tuple[float, Place]]:
    """The last mark of each time to live, in the order of the prompt: what it keeps includes the earlier ones' prefixes.

    Args:
        marks: of each part, in the order of the prompt; None: it has none.
        options: of the request.

    Returns:
        Seconds for which the prefix stays cached, and where it ends.
    """
    last: dict[float, Place] = {}
    for place, mark in marks:
        if mark is not None:
            last[SECONDS[mark.ttl or (options and options.ttl) or _DEFAULT_LIFETIME]] = place
    return sorted(last.items(), key=lambda item: item[1])
