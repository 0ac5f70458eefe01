"""Announces a replica's requests, from arrival to end, to those readers of its events that did not send them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from radixkv.cache import InvalidArgumentError
from radixkv.cluster.feed import RecordFeed
from radixkv.cluster.records import ArrivedRequest, Kind, encode_arrived, encode_number
from radixkv.prompts import Prompt
from radixkv.routing import prompt_hashes
from radixkv.sampling_params import BeamSearchParams, SamplingParams


class AnnouncedRequests:
    """The unfinished requests of a replica, and the readers to which they are announced. It belongs to one event loop."""

    def __init__(self) -> None:
        self._readers: dict[RecordFeed, int] = {}  # each with the number by which it sends requests
        self._requests: dict[int, PendingRequest] = {}
        self._numbers = itertools.count(1)

    def add(self, prompt: Prompt, params: SamplingParams | BeamSearchParams, sender: int) -> PendingRequest:
        """A request has come, which is announced to all readers but its sender. The caller must `end` it.

        Raises:
            InvalidArgumentError: its tokens or its namespace are invalid, and there is such a reader.
        """
        request = PendingRequest(self._requests, next(self._numbers), prompt, params, sender)
        for feed, reader in self._readers.items():
            if reader != sender:
                feed.append(request.records(feed.block_size))
                request.announced_to.add(feed)
        self._requests[request.number] = request
        return request

    def join(self, feed: RecordFeed, reader: int) -> Iterator[bytes]:
        """Announce requests to one more reader, which sends its own by this number, from now on.

        Returns:
            Records of the unfinished requests that others have sent, which the reader must get before those of its feed. They
            are made one by one, since each may mean hashing a prompt.
        """
        self._readers[feed] = reader
        return self._records(feed, [request for request in self._requests.values() if request.sender != reader])

    def _records(self, feed: RecordFeed, requests: list[PendingRequest]) -> Iterator[bytes]:
        for request in requests:
            if request.number not in self._requests:
                continue
            try:
                record = request.records(feed.block_size)
            except InvalidArgumentError:
                continue  # the engine is about to refuse it
            request.announced_to.add(feed)
            yield record

    def leave(self, feed: RecordFeed) -> None:
        """Announce nothing more to a reader; one that has not joined is ignored."""
        self._readers.pop(feed, None)
        for request in self._requests.values():
            request.announced_to.discard(feed)


class PendingRequest:
    """A request from its arrival to its end. The caller of `AnnouncedRequests.add` must `end` it.

    Attributes:
        number: its name in records.
        sender: the number of the ingress that has sent it.
        announced_to: the readers that got the record of its arrival, and get that of its end.
    """

    def __init__(
        self,
        requests: dict[int, PendingRequest],
        number: int,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        sender: int,
    ) -> None:
        self.number = number
        self.sender = sender
        self.announced_to: set[RecordFeed] = set()
        self._requests = requests
        self._prompt = prompt
        self._params = params
        self._prefilled = False
        self._arrival: bytes | None = None

    def prefilled(self) -> None:
        """Its prompt is computed; later calls do nothing."""
        if not self._prefilled:
            self._prefilled = True
            self._announce(Kind.PREFILLED)

    def end(self) -> None:
        """It has ended; later calls do nothing."""
        self._requests.pop(self.number, None)
        self._announce(Kind.ENDED)
        self.announced_to.clear()

    def records(self, block_size: int) -> bytes:
        """The records of its arrival, made when it is first asked for, and of its prompt's computation, where that is done.

        Raises:
            InvalidArgumentError: its tokens or its namespace are invalid.
        """
        if self._arrival is None:
            prompt = self._prompt
            # Of a prompt that is computed already, what it left in the cache is STORED.
            hashes = [] if self._prefilled else prompt_hashes(prompt.token_ids, prompt.namespace, block_size)
            if not (prompt.reuses_prefixes(self._params) and prompt.write_cache):
                hashes = []  # all of it may be computed, and none of it be held
            self._arrival = encode_arrived(ArrivedRequest(self.number, prompt.num_tokens, hashes))
        return self._arrival + (encode_number(Kind.PREFILLED, self.number) if self._prefilled else b"")

    def _announce(self, kind: Kind) -> None:
        for feed in self.announced_to:
            feed.append(encode_number(kind, self.number))
