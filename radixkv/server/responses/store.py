"""Finished responses, kept in memory so that a request can continue one; the least recently used are forgotten first."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from radixkv.engine.clearing import NamespaceSelection
from radixkv.server.chat.prompt_caching import Breakpoint
from radixkv.server.output.logprobs import EncodedTokenLogprobs
from radixkv.server.responses.objects import OutputItem, OutputMessage, ResponseObject, as_input


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation that it ends.

    Attributes:
        messages: the conversation in the form of chat completions, the answer included, without instructions. The
            messages are shared with the responses that it continues.
        breakpoints: the last one of each time to live in the conversation, also without instructions, in order.
        num_bytes: what it counts for: its own bytes and all of the conversation's, which has no log-probabilities.
        namespaces: in which prompts of the conversation were cached: its own, and those of the responses that it continues.
        items: of the conversation, the output included, as JSON by their ids; see `listed_items`.
    """

    response: ResponseObject
    messages: Sequence[Mapping[str, Any]]
    breakpoints: Sequence[Breakpoint]
    num_bytes: int
    namespaces: frozenset[str]
    items: Mapping[str, bytes]

    @property
    def input_items(self) -> Mapping[str, bytes]:
        """Those before the output."""
        return dict(islice(self.items.items(), len(self.items) - len(self.response.output)))


@dataclass(eq=False)
class PendingResponse:
    """A response that is not finished.

    Attributes:
        tenant: whose it is.
        messages: the conversation that it answers, without instructions.
        breakpoints, namespaces: as in `StoredResponse`.
        items: likewise, without the output.
        num_bytes: what the conversation that it continues counts for, and its own items.
        cleared: whether one of the namespaces was cleared since it began, so that it must not be stored.
    """

    tenant: str
    messages: Sequence[Mapping[str, Any]]
    breakpoints: Sequence[Breakpoint]
    namespaces: frozenset[str]
    items: Mapping[str, bytes]
    num_bytes: int
    cleared: bool = False


class ResponseStore:
    """The responses of all tenants. Each tenant is bounded by itself, so that none can displace another's.

    Beyond the bound of all together, the tenant with the most loses its oldest.

    Args:
        max_responses: responses kept for a tenant at most.
        max_bytes: bytes kept for a tenant at most; a longer response is not kept at all.
        max_total_bytes: bytes kept for all tenants together.
    """

    def __init__(self, max_responses: int = 1024, max_bytes: int = 64 << 20, max_total_bytes: int = 512 << 20) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        # By tenant, then by id, the most recently used last.
        self._responses: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: dict[str, int] = {}
        # By tenant and id of an item of the output: the id of the response.
        self._of_items: dict[tuple[str, str], str] = {}
        self._pending: WeakSet[PendingResponse] = WeakSet()

    def begin(
        self,
        tenant: str,
        earlier: StoredResponse | None,
        namespace: str,
        messages: Sequence[Mapping[str, Any]],
        breakpoints: Sequence[Breakpoint],
        items: Mapping[str, bytes] = MappingProxyType({}),
        sources: Collection[StoredResponse] = (),
    ) -> PendingResponse:
        """Note a response that may be finished later; the note vanishes when the caller drops it.

        Args:
            earlier: the response that it continues.
            namespace: in which its prompt is cached.
            messages, breakpoints: see `PendingResponse`.
            items: of its own input, without those of ``earlier``.
            sources: further responses, of which the messages have items.
        """
        before = [*sources, *([] if earlier is None else [earlier])]
        namespaces = frozenset({namespace}).union(*(each.namespaces for each in before))
        num_bytes = _num_bytes(items)
        if earlier is not None:
            items, num_bytes = {**earlier.items, **items}, num_bytes + earlier.num_bytes
            num_bytes -= _num_bytes_of_logprobs(earlier.response)
        pending = PendingResponse(tenant, messages, breakpoints, namespaces, items, num_bytes)
        self._pending.add(pending)
        return pending

    def finish(
        self, pending: PendingResponse, response: ResponseObject, answer: Sequence[Mapping[str, Any]], num_bytes: int
    ) -> None:
        """Keep a response unless it was cleared since it began, and forget what no longer fits beside it.

        Args:
            pending: what `begin` returned.
            response: finished.
            answer: its output as messages.
            num_bytes: its own, without those of items, log-probabilities, and the conversation that it continues.
        """
        output = {item.id: json.dumps(as_input(item), ensure_ascii=False).encode() for item in response.output}
        num_bytes += pending.num_bytes + _num_bytes(output) + _num_bytes_of_logprobs(response)
        if pending.cleared or num_bytes > self._max_bytes:
            return
        tenant = pending.tenant
        own = self._responses.setdefault(tenant, OrderedDict())
        messages = [*pending.messages, *answer]
        items = {**pending.items, **output}
        own[response.id] = StoredResponse(response, messages, pending.breakpoints, num_bytes, pending.namespaces, items)
        self._of_items |= {(tenant, item.id): response.id for item in response.output}
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + num_bytes
        while len(own) > self._max_responses or self._num_bytes[tenant] > self._max_bytes:
            self._forget_oldest(tenant)
        while sum(self._num_bytes.values()) > self._max_total_bytes:
            self._forget_oldest(max(self._num_bytes, key=self._num_bytes.__getitem__))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The tenant's response with this id; None: it has none, or no longer."""
        own = self._responses.get(tenant, OrderedDict())
        stored = own.get(response_id)
        if stored is not None:
            own.move_to_end(response_id)
        return stored

    def item(self, tenant: str, item_id: str) -> tuple[OutputItem, StoredResponse] | None:
        """The item with this id in the output of one of the tenant's responses, and that response; None: as for `get`."""
        stored = self.get(tenant, self._of_items.get((tenant, item_id), ""))
        if stored is None:
            return None
        return next(item for item in stored.response.output if item.id == item_id), stored

    def remove(self, tenant: str, response_id: str) -> bool:
        """Forget a response; returns whether there was one."""
        stored = self._responses.get(tenant, OrderedDict()).pop(response_id, None)
        if stored is None:
            return False
        for item in stored.response.output:
            del self._of_items[tenant, item.id]
        self._num_bytes[tenant] -= stored.num_bytes
        return True

    def clear(self, selection: NamespaceSelection) -> None:
        """Forget all that hold texts of prompts cached in these namespaces, and those to come that have begun."""
        for pending in self._pending:
            pending.cleared |= _any_in(selection, pending.namespaces)
        for tenant, own in self._responses.items():
            for stored in [stored for stored in own.values() if _any_in(selection, stored.namespaces)]:
                self.remove(tenant, stored.response.id)

    def _forget_oldest(self, tenant: str) -> None:
        self.remove(tenant, next(iter(self._responses[tenant])))


def _num_bytes(items: Mapping[str, bytes]) -> int:
    return sum(sys.getsizeof(name) + sys.getsizeof(item) for name, item in items.items())


def _num_bytes_of_logprobs(response: ResponseObject) -> int:
    parts = (part for item in response.output if isinstance(item, OutputMessage) for part in item.content)
    return sum(len(part.logprobs.encoded) for part in parts if isinstance(part.logprobs, EncodedTokenLogprobs))


def _any_in(selection: NamespaceSelection, namespaces: frozenset[str]) -> bool:
    return any(namespace in selection for namespace in namespaces)
