"""Which replicas are up, and which of them run the same.

A generation is all replicas that run the same model with the same options: each can continue what another has begun. There is
one generation, except during an update, while the replicas of the old one are replaced::

    replicas                        requests go    an answer that has begun goes on
    one 5f1c0a77    two 5f1c0a77    to both        at either
    one 5f1c0a77    two 91e24bd0    to both        where it is
    one 91e24bd0    two 91e24bd0    to both        at either

So replicas of all generations must read a prompt as the same tokens, in blocks of the same size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from radixkv import __version__
from radixkv.cluster.description import ReplicaDescription

_log = logging.getLogger(__name__)


class MismatchError(ValueError):
    """A replica cannot take the requests that the others take, or is in the set under another name."""


class Generations:
    """The replicas that are up, by generation.

    Attributes:
        by_replica: the generation of each replica that is up, by the replica's name.
        rooms: tokens of a sequence that fit into the pool of each, likewise; infinite where its model ends before that.
        num_changes: how often a replica has come or gone.
    """

    def __init__(self) -> None:
        self.by_replica: dict[str, str] = {}
        self.rooms: dict[str, float] = {}
        self.num_changes = 0
        self._first: ReplicaDescription | None = None
        # The replicas that are up; while none is, the one that was up last.
        self._last: dict[str, ReplicaDescription] = {}
        # When the first replica of each generation was started, of those that were up here.
        self._begun: dict[str, float] = {}

    def check(self, replica: object, description: ReplicaDescription) -> None:
        """Refuse a replica of another version, or one that cannot get the same requests as the first that ever was up.

        Raises:
            MismatchError: something differs.
        """
        version = description.identity["version"]
        if version != __version__:
            raise MismatchError(f"{replica} runs RadixKV {version}; expected this ingress's version, {__version__}")
        difference = None if self._first is None else self._first.difference_in_prompts(description)
        if self._first is not None and difference is not None:
            raise MismatchError(
                f"{replica} cannot answer what the first replica does, of {self._first.identity['model']}: {difference}"
            )

    def add(self, name: str, description: ReplicaDescription) -> None:
        """A replica is up."""
        newest, generation = self.newest, description.generation
        begun = self._begun.get(generation)
        self._begun[generation] = description.started if begun is None else min(begun, description.started)
        self._first = self._first or description
        if not self.by_replica:
            self._last.clear()
        self._last[name], self.by_replica[name], self.rooms[name] = description, generation, description.room
        self.num_changes += 1
        if newest is not None and begun is None:
            difference = newest.difference(description)
            if difference is not None:
                _log.warning(
                    "replica %r is of another generation, %s: answers that have begun do not move between them; %s",
                    name,
                    generation,
                    difference,
                )

    def remove(self, name: str) -> None:
        """A replica is no longer up."""
        if name in self.by_replica:
            del self.by_replica[name], self.rooms[name]
            if self.by_replica:
                del self._last[name]
            self.num_changes += 1

    @property
    def newest(self) -> ReplicaDescription | None:
        """The description of the newest generation of those that are up, or of the one that was up last; None: none ever was.

        A generation is as old as the first of its replicas that ever was up: starting another one, under whatever name, does
        not make an old generation the newest.
        """
        return max(self._last.values(), key=lambda each: self._begun[each.generation], default=None)

    @property
    def capacities(self) -> list[Mapping[str, int]]:
        """Capacities of the replicas that are up, or were last; see `ReplicaDescription`."""
        return [each.capacity for each in self._last.values()]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that all of them take."""
        length: int = min(each.capacity["max_model_len"] for each in self._last.values())
        return length
