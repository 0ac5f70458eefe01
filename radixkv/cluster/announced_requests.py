"""Announces requests that have come to a replica, from their arrival to their end, to the readers of its events.

An ingress knows the requests that it has sent. It needs to hear of requests only where there are several ingresses: then each
hears of all requests, and recognises its own by their sender.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from radixkv.cache import InvalidArgumentError
from radixkv.cluster.feed import BlockFeed
from radixkv.cluster.prefix_reuse import reuses_prefixes
from radixkv.cluster.records import Kind, TakenRequest, encode_number, encode_taken
from radixkv.prompts import Prompt
from radixkv.routing import prompt_hashes
from radixkv.sampling_params import BeamSearchParams, SamplingParams


class AnnouncedRequests:
    """All such requests of a replica. The object belongs to one event loop."""

    def __init__(self) -> None:
        self._feeds: list[BlockFeed] = []
        self._requests: dict[int, PendingRequest] = {}
        self._numbers = itertools.count(1)

    def add(self, prompt: Prompt, params: SamplingParams | BeamSearchParams, sender: int) -> PendingRequest:
        """A request has come; it is announced if there are several readers, since its sender knows it.

        Args:
            prompt: of the request.
            params: of the request.
            sender: who sent it.

        Raises:
            InvalidArgumentError: its tokens or its namespace are invalid, and there are several readers.
        """
        request = PendingRequest(self, next(self._numbers), prompt, params, sender)
        if len(self._feeds) > 1:
            self._send(request.records(self._feeds[0].block_size))
            request.announced = True
        self._requests[request.number] = request
        return request

    def join(self, feed: BlockFeed) -> Iterator[bytes]:
        """Announce requests to one more reader from now on.

        Returns:
            Records of the requests that there are, which the reader must get before those of its feed. Each may take as long
            to make as hashing a prompt.
        """
        self._feeds.append(feed)
        present = list(self._requests.values())
        for request in present:
            request.announced = True
        return self._records(present, feed.block_size)

    def _records(self, requests: list[PendingRequest], block_size: int) -> Iterator[bytes]:
        for request in requests:
            if request.number not in self._requests:
                continue
            try:
                yield request.records(block_size)
            except InvalidArgumentError:
                continue  # the engine is about to refuse it

    def leave(self, feed: BlockFeed) -> None:
        """Announce nothing more to a reader; one that has not joined is ignored."""
        if feed in self._feeds:
            self._feeds.remove(feed)

    def tell(self, request: PendingRequest, kind: Kind) -> None:
        """Announce that a request is PREFILLED, or has ENDED, to all that may have heard of it; after its end, do nothing."""
        if request.number not in self._requests:
            return
        if kind is Kind.ENDED:
            del self._requests[request.number]
        if request.announced:
            self._send(encode_number(kind, request.number))

    def _send(self, record: bytes) -> None:
        for feed in self._feeds:
            feed.append(record)


class PendingRequest:
    """A request from its arrival to its end. Whoever added it must `end` it.

    Attributes:
        number: its name in records.
        announced: whether a reader may have heard of it.
    """

    def __init__(
        self,
        requests: AnnouncedRequests,
        number: int,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        sender: int,
    ) -> None:
        self.number = number
        self.announced = False
        self._requests = requests
        self._prompt = prompt
        self._params = params
        self._sender = sender
        self._prefilled = False
        self._taken: bytes | None = None

    def prefilled(self) -> None:
        """Its prompt is computed; later calls do nothing."""
        if not self._prefilled:
            self._prefilled = True
            self._requests.tell(self, Kind.PREFILLED)

    def end(self) -> None:
        """It has ended; later calls do nothing."""
        self._requests.tell(self, Kind.ENDED)

    def records(self, block_size: int) -> bytes:
        """The records of its arrival, made when it is first asked for, and of its prompt's computation, where that is done.

        Raises:
            InvalidArgumentError: its tokens or its namespace are invalid.
        """
        if self._taken is None:
            prompt = self._prompt
            # Of a prompt that is computed already, what it left in the cache is STORED.
            hashes = [] if self._prefilled else prompt_hashes(prompt.token_ids, prompt.namespace, block_size)
            reads = reuses_prefixes(prompt, self._params, has_tokens=bool(prompt.resume))
            if not (reads and prompt.write_cache):
                hashes = []  # all of it may be computed, and none of it be held
            self._taken = encode_taken(TakenRequest(self.number, self._sender, len(prompt.token_ids), hashes))
        return self._taken + (encode_number(Kind.PREFILLED, self.number) if self._prefilled else b"")
