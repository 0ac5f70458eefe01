"""Where a request says that a prefix ends which is to stay cached, and OpenAI's fields for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from radixkv.server.strict import StrictModel

Lifetime = Literal["30m", "12h"]
SECONDS: Mapping[Lifetime, float] = MappingProxyType({"30m": 1800.0, "12h": 43200.0})
_DEFAULT_LIFETIME: Lifetime = "30m"


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
    """A prefix ends behind the part of a message that has this.

    Attributes:
        ttl: how long it stays cached after its last use; None: what the request's options say.
    """

    mode: Literal["explicit"]
    ttl: Lifetime | None = None


class PromptCacheOptions(StrictModel):
    """How a prompt is cached.

    Attributes:
        mode: ``explicit``: a request without breakpoints neither reads nor writes the cache.
        ttl: of breakpoints that say nothing themselves.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Lifetime | None = None

    def allows(self, breakpoints: Sequence[Breakpoint]) -> bool:
        """Whether a request with these breakpoints may use the cache."""
        return self.mode != "explicit" or bool(breakpoints)


def lifetime(mark: PromptCacheBreakpoint, options: PromptCacheOptions | None) -> float:
    """Seconds for which a marked prefix stays cached after its last use."""
    return SECONDS[mark.ttl or (options and options.ttl) or _DEFAULT_LIFETIME]
