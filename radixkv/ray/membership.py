"""An ingress's replicas are those that the registry lists."""

from __future__ import annotations

import asyncio
import logging

from radixkv.cluster import ReplicaSet
from radixkv.cluster.generations import MismatchError
from radixkv.ray.registry import Listing, changes

_log = logging.getLogger(__name__)


class RegistryMembership:
    """Adds replicas to a set, and removes them, without waiting for either.

    Args:
        replicas: the set.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._removing: set[asyncio.Task[None]] = set()
        self._refused: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def is_outdated(self) -> bool:
        """Whether there are replicas, but none that can take the requests that the set's first replicas took."""
        return bool(self._refused) and not self._replicas.available

    def follow(self, listing: Listing) -> None:
        """Begin what the list asks for. A replica that could not be reached is tried again with the next list.

        Args:
            listing: what the registry says now.
        """
        self._refused &= set(listing.urls)
        added, gone = changes(self._replicas.added, listing)
        self._replicas.wanted = listing.urls.keys() - self._refused
        for name, url in added.items():
            if name not in self._adding and name not in self._refused:
                self._adding[name] = asyncio.ensure_future(self._add(name, url))
        for name in gone:
            if name not in self._adding:
                removal = asyncio.ensure_future(self._replicas.remove(name))
                self._removing.add(removal)
                removal.add_done_callback(self._removing.discard)

    async def wait_for_first(self) -> None:
        """Returns when there is a replica that requests can be sent to."""
        while not self._replicas.available:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Leave all replicas."""
        tasks = [*self._adding.values(), *self._removing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._replicas.close()

    async def _add(self, name: str, url: str) -> None:
        try:
            await self._replicas.add(name, url)
        except MismatchError as error:
            self._refused.add(name)
            _log.error("%s", error)
        except ConnectionError as error:
            _log.warning("%s", error)
        finally:
            del self._adding[name]
            self._changed.set()
