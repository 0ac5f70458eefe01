"""Keeps in an ingress's `ReplicaSet` the replicas of its command line and a file, or of a registry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from radixkv.cluster.connection import check_url
from radixkv.cluster.replica_set import ReplicaSet
from radixkv.text_files import read_utf8

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_ATTEMPTS = 1.0
# Once one replica is up, the others have this long to describe what they run before requests are accepted.
_SECONDS_FOR_OTHERS = 5.0


class Membership:
    """Keeps a replica set as wanted: replicas that do not answer, or are refused, are tried until they are up.

    Args:
        replicas: the set.
        wanted: urls by name, to begin with.

    Attributes:
        wanted: urls by name.
    """

    def __init__(self, replicas: ReplicaSet, wanted: Mapping[str, str]) -> None:
        self.wanted = dict(wanted)
        self._replicas = replicas
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._tried: set[str] = set()
        self._refused: dict[str, ValueError] = {}
        self._attempted = asyncio.Event()

    @property
    def is_outdated(self) -> bool:
        """Whether replicas are wanted that cannot take the requests that the first ones took, and no other one is up."""
        return bool(self._refused) and not self._replicas.available

    async def wait_for_first(self) -> None:
        """Returns when one replica is up, and every other one is up or does not answer yet.

        Raises:
            ValueError: one cannot get the requests that the others get, or a url is impossible.
        """
        self.update(self.wanted)
        while not self._replicas.available:
            self._raise_refusal()
            await self.next_attempt()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS_FOR_OTHERS):
                while not self.wanted.keys() <= self._tried:
                    await self.next_attempt()
        self._raise_refusal()

    def _raise_refusal(self) -> None:
        if self._refused:
            raise next(iter(self._refused.values()))

    async def next_attempt(self) -> None:
        """Returns when another attempt to join a replica has ended, or after a while: one that was drained may be back."""
        self._attempted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS_BETWEEN_ATTEMPTS):
                await self._attempted.wait()

    def reload(self, given: Mapping[str, str], path: Path) -> None:
        """Read the file again; a bad one, or no replica at all, changes nothing and logs one error."""
        try:
            wanted = {**given, **read_replicas(path)}
            if not wanted:  # perhaps the file is being written
                raise ValueError(f"{path}: expected at least one NAME=URL, got none")
            self.update(wanted)
        except (OSError, ValueError) as error:
            _log.error("replicas are kept as they were: %s", error)

    async def close(self) -> None:
        """Try no more."""
        tasks = list(self._changing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def update(self, wanted: Mapping[str, str]) -> None:
        """Begin to add and remove replicas, without waiting for either, until the set is as wanted.

        Args:
            wanted: urls by name.
        """
        before, self.wanted = self.wanted, dict(wanted)
        self._replicas.wanted = self.wanted.keys()
        for name in dict.fromkeys([*self._replicas.added, *self._changing, *wanted]):
            is_there = name in self._replicas.added or name in self._changing
            if wanted.get(name) != before.get(name) or not is_there:
                task = asyncio.ensure_future(self._change(name, self._changing.get(name)))
                self._changing[name] = task
                task.add_done_callback(partial(self._changed, name))

    def _changed(self, name: str, task: asyncio.Task[None]) -> None:
        if self._changing.get(name) is task:
            del self._changing[name]

    async def _change(self, name: str, earlier: asyncio.Task[None] | None) -> None:
        """Remove the replica that has a name, and join the one that is wanted under it."""
        if earlier is not None:
            earlier.cancel()
            await asyncio.gather(earlier, return_exceptions=True)
        self._tried.discard(name)
        self._refused.pop(name, None)
        steps = [self._join(name)]
        if name in self._replicas.added:
            _log.info("replica %r is removed", name)
            steps.insert(0, self._replicas.remove(name))  # the name is free when that has begun
        await asyncio.gather(*steps)

    async def _join(self, name: str) -> None:
        complaint, is_up = "", False
        while name in self.wanted:
            try:
                await self._replicas.add(name, self.wanted[name])
                is_up = True
                self._refused.pop(name, None)
            except (ConnectionError, ValueError) as error:
                if isinstance(error, ValueError):
                    self._refused[name] = error
                if str(error) != complaint:
                    complaint = str(error)
                    _log.warning("%s", error)
            # Not if the attempt was cancelled: another url is wanted then, which was not tried.
            self._tried.add(name)
            self._attempted.set()
            if is_up:
                break
            await asyncio.sleep(_SECONDS_BETWEEN_ATTEMPTS)


def read_replicas(path: Path) -> dict[str, str]:
    """Names and urls from a file: one ``NAME=URL`` a line; what follows a ``#`` is a comment.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is malformed, a url is impossible, a name is given twice, or the file is not UTF-8.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(read_utf8(path).splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if text:
            name, url = parse_replica(text, f"{path}: line {number}")
            if name in found:
                raise ValueError(f"{path}: line {number}: {name!r} is given twice")
            found[name] = url
    return found


def parse_replica(text: str, where: str = "replica") -> tuple[str, str]:
    """A name and a url.

    Args:
        text: ``NAME=URL``.
        where: the text stands, for the error's message.

    Raises:
        ValueError: it is something else, or the url is impossible.
    """
    name, equals, url = text.partition("=")
    name, url = name.strip(), url.strip()
    if not (name and equals and url):
        raise ValueError(f"{where}: expected NAME=URL, got {text!r}")
    try:
        check_url(url)
    except ValueError as error:
        raise ValueError(f"{where}: {name!r}: {error}") from error
    return name, url
