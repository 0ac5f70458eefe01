"""The look-ups of waiting groups' prefixes in tiers, and how long the engine's thread waits for their answers."""

from __future__ import annotations

import logging

from radixkv.tiers.moves.load import LookUp
from radixkv.tiers.moves.loader import BlockLoader
from radixkv.tiers.stack import Span

_log = logging.getLogger(__name__)

# How long a step waits for a look-up; after that it goes on, and the group is looked at again in the next step.
_LOOK_UP_SECONDS = 0.002


class PrefixLookUps:
    """The look-ups of one engine; for its thread."""

    def __init__(self, loader: BlockLoader) -> None:
        self._loader = loader
        self._not_sent: list[LookUp] = []
        self._waits = True  # look-ups are answered quickly
        self._unanswered: LookUp | None = None  # the last one that was given up

    @property
    def hangs(self) -> bool:
        """Whether the finder still works on a look-up that was given up: another would wait behind it and be given up."""
        return self._unanswered is not None and not self._unanswered.done.is_set()

    def add(self, look_up: LookUp) -> None:
        """A look-up to be sent with the next ones."""
        self._not_sent.append(look_up)

    def send(self) -> None:
        """Send the look-ups that were added."""
        for look_up in self._not_sent:
            self._loader.look_up(look_up)
        self._not_sent.clear()

    def answer(self, look_up: LookUp) -> list[Span] | None:
        """Where the prefix is; None: it is not known yet. Waits a moment, unless earlier look-ups took longer."""
        if look_up.done.is_set():
            self._waits = True
        elif self._waits and look_up not in self._not_sent:
            self._waits = look_up.done.wait(_LOOK_UP_SECONDS)
        return look_up.spans

    def give_up(self, look_up: LookUp) -> None:
        """Its group stops waiting for it."""
        if not look_up.waits_for_writer:
            if self._unanswered is None:  # said once
                _log.warning(
                    "tiers: looking up a prefix takes longer than computing it; until this is done, no other is looked up"
                )
            self._unanswered = look_up
