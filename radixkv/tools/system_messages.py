"""Puts system messages where chat templates take them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def later_ones_in_user_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation for a template that takes system messages at the beginning only: later ones are part of user messages.

    Args:
        messages: as chat templates expect them.
    """
    joined = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    later = messages[len(joined) :]
    for _, group in itertools.groupby(later, key=lambda message: message["role"] in ("system", "user")):
        turn = list(group)
        if any(message["role"] == "system" for message in turn):
            turn = [{"role": "user", "content": "\n\n".join(message["content"] for message in turn)}]
        joined.extend(turn)
    return joined
